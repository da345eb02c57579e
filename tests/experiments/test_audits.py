"""Audits as an experiment: its table, and a planted failure that must be found out."""

import pytest

from unteach.corpora import micro
from unteach.data import read_documents
from unteach.evaluation import evaluate
from unteach.experiments.cells import CellFolder
from unteach.experiments.paper import audits, experiments
from unteach.experiments.reproduce import ReproduceOptions
from unteach.experiments.sources import build
from unteach.job.audit import AuditOptions, prepared_audit
from unteach.models import load_model


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


def test_every_cell_has_a_key_of_its_own_and_an_attack_changed_is_another_cell(tmp_path):
    setup = build(ReproduceOptions(device="cpu"), tmp_path, print)
    cells = experiments()["audits"].cells(setup, [0, 1], CellFolder(tmp_path, print))
    assert len({cell.key for cell in cells}) == len(cells) == 2 * len(audits.ROWS)
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
    assert scores["verbmem_f"] < 5
    assert scores["knowmem_f"] < 5
    assert scores["knowmem_r"] > 90
    names = {"before": "micro:target", "reference": "micro:retrained", "documents": "micro:forget"}
    audit = prepared_audit(AuditOptions(subject="micro:target", quick=True, device="cpu", **names))
    audit.models = dict(audit.models) | {"after": lambda: model}
    found = audit.run(None, ("inside", "membership", "other_words"))
    assert [each["held"] for each in found.values()] == [False] * 3


@pytest.mark.slow
def test_the_retrained_model_is_no_further_than_never_seen_documents():
    """The control behaves: what never saw the documents is not found out, without a reference to compare with."""
    names = {"before": "micro:target", "documents": "micro:forget"}
    audit = prepared_audit(AuditOptions(subject="micro:retrained", quick=True, device="cpu", **names))
    found = audit.run(None, ("inside", "membership", "other_words", "quantisation"))
    assert {name: each["note"] for name, each in found.items() if each["held"] is False} == {}
