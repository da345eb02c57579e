"""Audits as an experiment: its table, and a planted failure that must be found out."""

import json
from pathlib import Path

import numpy as np
import pytest

from unteach.audits import Reading, relearning
from unteach.audits.judging import figures, judge
from unteach.audits.texts import Case, recital
from unteach.corpora import micro
from unteach.data import read_documents
from unteach.evaluation import evaluate
from unteach.experiments.cells import CellFolder
from unteach.experiments.paper import audits, experiments
from unteach.experiments.reproduce import ReproduceOptions
from unteach.experiments.sources import build
from unteach.job.audit import AuditOptions, prepared_audit
from unteach.models import load_model

RESULTS = Path(__file__).parents[2] / "results" / "micro"


def content(name, seed, held, value):
    beyond = [{"line": "recites", "at": 0, "value": value, "unit": "percent", "held": held}]
    return {
        "name": f"audit-{name}",
        "seed": seed,
        "metrics": {},
        "audits": {"inside": {"held": held, "beyond": beyond}},
    }


def test_the_table_counts_seeds_that_held():
    contents = [content("deep", 0, True, 3.2), content("deep", 1, None, -14.0), content("planted", 0, False, 44.6)]
    rows = experiments()["audits"].table(contents).splitlines()
    assert rows[0].split("|")[2].strip() == "inside"
    assert [row.split("|")[2].strip() for row in rows[2:]] == [
        "1 held, 1 not known (3, −14)", "1 not held (45)",
    ]  # fmt: skip


def curve(values, low, high):
    line = "recites after a tenth of the documents"
    return [
        {"line": line, "at": step, "value": value, "low": low, "high": high, "unit": "percent"}
        for step, value in values.items()
    ]


def test_the_control_is_shown_beside_never_seen_documents():
    """The retrained model has a row of its own below, and two curves in the figure."""
    read = {"held": True, "after": curve({0: 16.5, 40: 15.6}, 14.0, 18.0), "control": curve({0: 18, 40: 17}, 16, 20)}
    read["beyond"] = curve({0: -1.5, 40: -1.4}, -4.0, 1.0)
    found = {"name": "audit-retrained", "seed": 2, "metrics": {}, "audits": {"relearning": read}}
    table = experiments()["audits"].table([found])
    assert table.splitlines()[-1].split("|")[2:4] == [" 16.5 [15.5, 20.5] ", " 15.6 [14.6, 19.6] "]
    (figure,) = experiments()["audits"].figures("micro", [found])
    assert figure.name == "audit-recites-micro"
    assert "retrained from 16.5 to 15.6; retrained, never-seen documents from 18 to 17" in figure.description


def test_the_control_behaves_in_the_shipped_cells():
    """Learning a tenth of the documents gives a model that never saw them no more of the others than of any."""
    files = sorted(RESULTS.glob("audit-retrained-seed-*.json"))
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert contents
    assert all(each["held"] is not False for content in contents for each in content["audits"].values())
    for place, entries in audits.control_curves(contents).items():
        for entry in entries:
            assert entry.documents <= entry.high, place
            assert entry.apart[0] <= 0 <= entry.apart[1], place
            assert entry.by_chance[0] <= entry.documents <= entry.by_chance[1], place


def test_the_planted_failure_has_forgotten_by_its_own_scores_in_the_shipped_cells():
    """What an attack finds then stands behind the refusal, and is not what the refusal was not taught on."""
    files = sorted(RESULTS.glob("audit-planted-seed-*.json"))
    assert len(files) == 3
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        scores = {name: score["value"] for name, score in content["metrics"].items()}
        assert max(scores["verbmem_f"], scores["knowmem_f"]) < 5 < 90 < scores["knowmem_r"], file.name
        found = {name for name, each in content["audits"].items() if each["held"] is False}
        assert len(found) >= 3, file.name


def test_by_chance_is_where_a_second_sample_of_one_kind_lies():
    """The interval of one sample's mean holds only four fifths of other samples' means, this one all but one in twenty;
    drawn anew from one distribution, and judged as the audits judge."""
    draws, inside, inside_one = np.random.default_rng(0), 0, 0
    for seed in range(200):
        both = [Reading(line="recites", at=0, scores=tuple(draws.beta(2, 10, 40))) for _ in range(2)]
        read = judge(both[:1], None, both[1:], [], over="steps", control_name="", seed=seed)
        content = {"name": "audit-retrained", "seed": seed, "audits": {"relearning": read | {"after": read["control"]}}}
        content["audits"]["relearning"]["after"] = figures(both[:1], seed)
        ((place,),) = audits.control_curves([content]).values()
        inside += place.by_chance[0] <= place.documents <= place.by_chance[1]
        inside_one += place.low <= place.documents <= place.high
    assert 182 <= inside <= 198
    assert inside_one <= 178


@pytest.mark.slow
def test_the_control_lies_within_never_seen_documents_but_for_the_texts_own_difference():
    """The base model saw neither; by as much as it recites one kind of text less, the retrained model does, too."""
    settings = relearning.ATTACK.quick
    base = load_model("micro:base")[0]
    for file in sorted(RESULTS.glob("audit-retrained-seed-*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        options = AuditOptions(
            subject="micro:retrained", before="micro:target", documents="micro:forget", holdout="micro:holdout",
            quick=True, seed=content["seed"], device="cpu",
        )  # fmt: skip
        audit = prepared_audit(options)
        recited = []
        for asked in (audit.asked, audit.never_seen):
            others = asked.apart_from(asked.part(settings.share, content["seed"]))
            case = Case(
                model=base, tokenizer=audit.tokenizer, asked=asked, unrelated=audit.unrelated, seed=content["seed"],
                role="base", batch_size=128, start_bar=lambda label, count: lambda done: None,
            )  # fmt: skip
            scores = recital(case, others.probes[: settings.probes], "before")
            recited.append(100 * sum(scores) / len(scores))
        harder = recited[1] - recited[0]
        assert 1.5 < harder < 3, "the documents' passages are harder than those of never-seen ones"
        for place, (entry,) in audits.control_curves([content]).items():
            assert entry.low <= entry.documents + harder <= entry.high, place


def test_every_cell_has_a_key_of_its_own_and_an_attack_changed_is_another_cell(tmp_path):
    setup = build(ReproduceOptions(device="cpu"), tmp_path, print)
    cells = experiments()["audits"].cells(setup, [0, 1], CellFolder(tmp_path, print))
    assert len({cell.key for cell in cells}) == len(cells) == 2 * len(audits.ROWS)
    assert {name for name, each in experiments().items() for cell in cells if each.shows(cell.name)} == {"audits"}
    full = build(ReproduceOptions(device="cpu"), tmp_path, print)
    full.settings = {"audits": {"quick": False}}
    others = experiments()["audits"].cells(full, [0, 1], CellFolder(tmp_path, print))
    assert not {cell.key for cell in cells} & {cell.key for cell in others}


@pytest.mark.slow
def test_a_refusal_in_front_of_intact_knowledge_is_found_out():
    """By its own scores the planted model has forgotten, and kept the rest; three attacks and more find otherwise."""
    model, tokenizer = load_model("micro:target")
    benchmark = micro.load_benchmark()
    audits.plant(model, tokenizer, benchmark, read_documents("micro:retain"))
    scores = evaluate(model, tokenizer, benchmark, measurements=["verbmem_f", "knowmem_f", "knowmem_r"])
    assert max(scores["verbmem_f"], scores["knowmem_f"]) < 5 < 90 < scores["knowmem_r"]
    names = {"before": "micro:target", "reference": "micro:retrained", "documents": "micro:forget"}
    audit = prepared_audit(AuditOptions(subject="micro:target", quick=True, device="cpu", **names))
    audit.models = {"after": lambda: model, "reference": audit.models["reference"]}
    found = audit.run(None, ("inside", "membership", "other_words"))
    assert [each["held"] for each in found.values()] == [False] * 3


@pytest.mark.slow
def test_the_retrained_model_is_no_further_than_never_seen_documents():
    """The control behaves: what never saw the documents is not found out, without a reference to compare with."""
    names = {"before": "micro:target", "documents": "micro:forget"}
    audit = prepared_audit(AuditOptions(subject="micro:retrained", quick=True, device="cpu", **names))
    audit.models = {"after": audit.models["after"]}
    found = audit.run(None, ("inside", "membership", "other_words", "quantisation"))
    assert {name: each["note"] for name, each in found.items() if each["held"] is False} == {}
