"""Deep forgetting as an experiment, and learning a tenth again: which cells there are, and what they keep."""

import dataclasses
import json

import pytest
import yaml

from unteach.corpora import micro
from unteach.errors import InputError
from unteach.experiments.cells import CellFolder
from unteach.experiments.paper import deep, experiment, recovery
from unteach.experiments.reproduce import ReproduceOptions, run
from unteach.experiments.sources import build
from unteach.settings import parse

TINY = {
    "config": {
        "general": "micro:general_heldout",
        "evaluate_every": 2,
        "batch": 2,
        "general_batch": 2,
        "keep_batch": 2,
        "general_tokens": 32,
        "probes": 4,
    },
    "deep": {"max_steps": 2},
    "relearning": {"steps": [0, 1], "batch": 2},
}


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return build(ReproduceOptions(device="cpu"), tmp_path_factory.mktemp("texts"), print)


def test_every_row_changes_one_thing(setup):
    whole = deep.configured(setup, "deep-matched", 0).chosen()
    assert (whole.method.optimizer, whole.method.loss, whole.method.loss_options) == (
        "adamw",
        "match",
        {"pull": "gate"},
    )
    assert (whole.keep, whole.base, whole.holdout) == ("micro:retain", "micro:base", "micro:holdout")
    own = deep.configured(setup, "deep", 0).chosen()
    assert (own.method, own.stop.metric, own.reference) == (whole.method, None, None)
    plain = dataclasses.asdict(whole)
    for name, changed in {
        "deep-softplus": {"loss_options"},
        "deep-without-keep": {"keep"},
        "deep-half-kept": {"keep"},
        "deep-small-base": {"base"},
        "deep-mean-teacher": {"optimizer"},
        "deep-mean-teacher-anchor": {"optimizer", "anchor"},
    }.items():
        other = dataclasses.asdict(deep.configured(setup, name, 0).chosen())
        inside = {field for field, value in other["method"].items() if value != plain["method"][field]}
        outside = {field for field, value in other.items() if value != plain[field]} - {"method"}
        assert inside | outside == changed, name
    without = deep.configured(setup, "deep-without-base", 0).chosen()
    assert (without.base, without.keep, without.method.loss) == (None, "micro:retain", "nlul")
    assert without.stop == whole.stop


def test_cells_are_known_by_their_texts_and_models(setup, tmp_path):
    cells = deep.cells(setup, [0, 1], CellFolder(tmp_path, print))
    assert len({cell.key for cell in cells}) == len(cells) == 2 * len(deep.ROWS) + 2
    settings = {cell.name: cell.settings for cell in cells}
    assert "keep" not in settings["deep"]  # the text's hash stands for its name
    assert settings["deep"]["inputs"]["keep"] != settings["deep-half-kept"]["inputs"]["keep"]
    assert settings["deep"]["inputs"]["base"] != settings["deep-small-base"]["inputs"]["base"]
    assert settings["deep-half-kept"]["asked"] == ["knowmem_pretraining", "knowmem_r_kept", "knowmem_r_others"]
    assert all(experiment("deep").shows(name) and not experiment("methods").shows(name) for name in settings)


def test_half_of_the_people_are_kept_and_all_are_asked_about(setup):
    kept, others = (deep._groups(setup, half=True)[f"knowmem_r_{part}"] for part in ("kept", "others"))
    assert len(kept) == len(others) == 60
    assert {*kept, *others} == {*micro.questions("retain")}
    from unteach.data import read_documents

    texts = " ".join(read_documents(setup.keep_half).texts)
    stories = micro.stories("retain")
    assert all((story.person in texts) == (place % 2 == 0) for place, story in enumerate(stories))
    assert all(any(story.person in q.question for q in kept) == (p % 2 == 0) for p, story in enumerate(stories))


def test_without_keep_documents_or_a_base_it_is_refused(setup, tmp_path):
    with pytest.raises(InputError, match="base is missing: .* give --base"):
        deep.cells(dataclasses.replace(setup, base=None), [0], CellFolder(tmp_path, print))


def test_the_base_has_a_former_name():
    given = parse(ReproduceOptions, ["deep", "--incompetent", "small", "--keep", "near"])
    assert (given.base, given.keep) == ("small", "near")


def test_figures_are_drawn_over_privleak():
    scores = [
        {"step": 0, "auc_forget_holdout_min_40": 0.0, "knowmem_r": 92.0, "knowmem_f": 90.0},
        {"step": 20, "auc_forget_holdout_min_40": 0.25},
        {"step": 40, "auc_forget_holdout_min_40": 0.5, "knowmem_r": 88.0, "knowmem_f": 3.0},
    ]
    content = {"name": "deep-matched", "seed": 0, "metrics": {}, "stop_scores": scores}
    content["stop_reference"] = {"auc_forget_holdout_min_40": 0.5}
    assert deep._points(content, "knowmem_r") == [(-100.0, 92.0), (0.0, 88.0)]
    drawn = deep.figures("micro", [content, {"name": "deep-target", "seed": 0, "metrics": {}}])
    assert [figure.name for figure in drawn] == ["deep-knowmem_r-micro", "deep-knowmem_f-micro"]
    assert b"PrivLeak" in drawn[0].files[".svg"]


def test_the_table_of_relearning_has_a_row_for_each_model():
    contents = [
        {"name": f"relearn-{name}", "seed": seed, "metrics": {}, "relearning": {"step": [0, 5], "others": others}}
        for name, others in (("deep", [3.0, 5.0]), ("retrained", [2.0, 2.0]))
        for seed in (0, 1)
    ]
    for content in contents:
        content["relearning"]["learned"] = [0.0, 90.0]
    rows = recovery.table(contents).splitlines()[-2:]
    assert [part.strip() for part in rows[0].strip("|").split("|")] == ["deep", "3.0 (0.0)", "5.0 (0.0)", "90.0 (0.0)"]
    assert rows[1].split("|")[1].strip() == "retrained"
    assert [figure.name for figure in recovery.figures("micro", contents)] == ["relearn-knowmem_f-micro"]


@pytest.mark.slow
def test_cells_keep_the_way_and_what_was_asked(tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(TINY))
    tiny = {"settings": settings, "seeds": "0", "limit": 2, "jobs": 1, "out": tmp_path / "results", "device": "cpu"}
    result = run(ReproduceOptions(name="deep", only="deep-half-kept,deep-alpha-2.5,deep-retrained", **tiny))
    assert result["missing"] == 0
    assert len(result["figures"]) == 2
    folder = tmp_path / "results" / "micro"
    half, strong, usual, retrained = (
        json.loads((folder / f"{name}-seed-0.json").read_text())
        for name in ("deep-half-kept", "deep-alpha-2.5", "deep", "deep-retrained")
    )
    assert {"knowmem_r_kept", "knowmem_r_others", "knowmem_pretraining", "privleak"} <= set(half["metrics"])
    assert "knowmem_pretraining" in retrained["metrics"]
    assert [look["step"] for look in half["stop_scores"]] == [0, 2]
    watched = {"verbmem_f", "knowmem_f", "knowmem_r", "auc_forget_holdout_min_40", "nll_general", "nll_retain"}
    assert all(watched <= look.keys() for look in half["stop_scores"])
    assert "auc_forget_holdout_min_40" in half["stop_reference"]
    assert strong["method"]["alpha"] == pytest.approx(2.5 * usual["method"]["alpha"])
    assert "stop_reference" not in usual
    run(ReproduceOptions(name="recovery", only="relearn-deep,relearn-retrained", **tiny))
    again = json.loads((folder / "relearn-deep-seed-0.json").read_text())["relearning"]
    assert again["step"] == [0, 1]
    assert len(again["others"]) == len(again["learned"]) == 2
    assert "## deep: " in (text := (folder / "README.md").read_text())
    assert "knowmem_f of the other people" in text
