"""`unteach audit` behind the command line: what it takes from a run folder, what it refuses, what it writes."""

import json
import re

import pytest
import yaml

from tiny_models import save_tiny
from unteach.audits import attacks
from unteach.errors import InputError
from unteach.job.audit import AuditOptions, run
from unteach.job.card import model_card, with_audits
from unteach.settings import help_text

TEXT = "The river near the school was closed by {} on Monday, and {} waited in the rain with 40 people."
NAMES = ("Adamar", "Bolin", "Cyton", "Diwel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder as `unteach forget` leaves it, with all that its config names."""
    root = tmp_path_factory.mktemp("audit")
    for seed, name in enumerate(("target", "retrained", "run/model")):
        save_tiny(root / name, seed=seed)
    for part, names in (("forget", NAMES[:2]), ("holdout", NAMES[2:])):
        lines = [json.dumps({"text": TEXT.format(name, name)}) for name in names]
        (root / f"{part}.jsonl").write_text("\n".join(lines))
    named = {"model": "target", "reference": "retrained", "documents": "forget.jsonl", "holdout": "holdout.jsonl"}
    config = {key: str(root / value) for key, value in named.items()}
    (root / "run/config.yaml").write_text(yaml.safe_dump(config))
    card = model_card(base_model="target", settings={}, data={}, scores={"before": {}, "after": {}})
    (root / "run/model/README.md").write_text(card)
    return root


@pytest.mark.slow
def test_a_run_folder_knows_everything(folder):
    subject = folder / "run"
    found = run(AuditOptions(subject=str(subject), attacks=("inside", "membership"), quick=True, device="cpu"))
    assert set(found["attacks"]) == {"inside", "membership"}
    assert json.loads((subject / "audits/summary.json").read_text()) == {k: v for k, v in found.items() if k != "out"}
    content = json.loads((subject / "audits/inside.json").read_text())
    assert content["compared_with"] == "reference"
    assert len(set(content["inputs"].values())) == 6, "three models, documents, holdout, general text"
    card = (subject / "model/README.md").read_text()
    assert card.index("## Does it hold?") < card.index("## Scores")
    assert content["note"] in card
    assert "Does it hold?" in (subject / "report.html").read_text()
    written = "".join(file.read_text() for file in (subject / "audits").iterdir())
    assert not any(name in written for name in NAMES)


def test_flags_go_before_the_run(folder, tmp_path):
    given = {"subject": str(folder / "run"), "attacks": ("inside",), "quick": True, "out": tmp_path, "device": "cpu"}
    before = (folder / "run/model/README.md").read_text()
    run(AuditOptions(reference=str(folder / "target"), seed=1, **given))
    content = json.loads((tmp_path / "inside.json").read_text())
    assert content["inputs"]["reference"] == content["inputs"]["before"]
    assert content["seed"] == 1
    assert (folder / "run/model/README.md").read_text() == before, "an audit elsewhere changes nothing in the run"


def test_a_model_without_a_control_is_told_so(folder, tmp_path):
    given = {"before": str(folder / "target"), "documents": str(folder / "forget.jsonl"), "out": tmp_path}
    run(AuditOptions(subject=str(folder / "run/model"), attacks=("inside",), quick=True, device="cpu", **given))
    content = json.loads((tmp_path / "inside.json").read_text())
    assert content["held"] is None
    assert "--reference" in content["note"]


def test_wrong_input(folder, tmp_path):
    with pytest.raises(InputError) as error:
        run(AuditOptions(subject=str(folder / "run/model"), attacks=("insight",), out=tmp_path, seed=-1))
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "before is missing", "documents is missing", "attacks is 'insight'", "seed is -1",
    ]  # fmt: skip
    assert "did you mean inside?" in error.value.problems[2]
    with pytest.raises(InputError, match="out is missing: .*model' is no run folder"):
        run(AuditOptions(subject=str(folder / "run/model")))
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text((folder / "run/config.yaml").read_text())
    with pytest.raises(InputError, match="has no model yet"):
        run(AuditOptions(subject=str(unfinished)))


def test_options_name_every_attack():
    (named,) = re.findall(r"Only these: ([\w, ]+)\.", " ".join(help_text(AuditOptions).split()))
    assert set(named.split(", ")) == set(attacks())


def test_a_card_has_one_section_of_audits():
    card = model_card(base_model="m", settings={}, data={}, scores={"before": {}, "after": {}})
    once = with_audits(card, ["✓ inside: held"])
    again = with_audits(once, ["✗ inside: not"])
    assert again == with_audits(card, ["✗ inside: not"])
    assert "- ✗ inside: not\n\n## Scores\n" in again
