"""The field's methods: equal budgets, what counts as undone, and the order of the table."""

import dataclasses

import pytest

from unteach.experiments.cells import CellFolder
from unteach.experiments.paper import experiments
from unteach.experiments.paper.field import MODELS, TRY, configured, left, rows
from unteach.experiments.reproduce import ReproduceOptions
from unteach.experiments.sources import build
from unteach.method import field
from unteach.method.losses import LOSSES


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return build(ReproduceOptions(device="cpu"), tmp_path_factory.mktemp("texts"), print)


def metrics(**values):
    return {name: {"value": value, "low": value, "high": value} for name, value in values.items()}


AUC, LOSS = "auc_forget_holdout_min_40", "auc_forget_holdout_ppl"
BEFORE = metrics(
    verbmem_f=100.0, knowmem_f=90.0, **{AUC: 0.0, LOSS: 0.0}, knowmem_r=80.0, nll_retain=0.1, nll_holdout=2.1,
    nll_general=3.0, degenerate=0.0,
)  # fmt: skip
GOAL = metrics(
    verbmem_f=20.0, knowmem_f=10.0, **{AUC: 0.5, LOSS: 0.5}, knowmem_r=80.0, nll_retain=0.1, nll_holdout=2.1,
    nll_general=3.0, degenerate=0.0,
)  # fmt: skip


def test_what_is_left_undone_is_none_at_the_goal_and_all_where_nothing_or_too_much_was_done():
    assert left(GOAL, BEFORE, GOAL) == (0.0, 0.0, 0.0, 0.0)
    assert left(BEFORE, BEFORE, GOAL) == (1.0, 1.0, 1.0, 0.0)
    below = GOAL | metrics(verbmem_f=5.0, knowmem_f=0.0, **{AUC: 0.75})
    assert left(below, BEFORE, GOAL) == (0.0, 0.0, 0.5, 0.0), "too unlikely is detectable, too"
    half = BEFORE | metrics(verbmem_f=60.0, knowmem_f=30.0)
    assert left(half, BEFORE, GOAL) == (0.5, 0.25, 1.0, 0.0)
    for damage, share in (
        ({"knowmem_r": 60.0}, 0.25),
        ({"nll_retain": 1.1}, 0.5),
        ({"nll_general": 3.4}, 0.8),
        ({"degenerate": 30.0}, 0.3),
        ({"knowmem_r": 60.0, "nll_retain": 1.1, "nll_general": 9.0}, 1.0),
    ):
        assert left(GOAL | metrics(**damage), BEFORE, GOAL)[3] == pytest.approx(share), damage


def test_every_method_has_the_same_number_of_different_tries(setup):
    found = rows(setup)
    for name, row in found.items():
        tries = row.tries()
        assert len(tries) == 6, name
        assert len({str(method) for method in tries}) == 6, name
        assert all(method.problems("") == [] and method.optimizer == row.method.optimizer for method in tries)
    published = {name for name, loss in LOSSES.items() if loss.function.__module__.startswith(field.__name__)}
    published |= {
        name for name, loss in LOSSES.items() if loss.rows and loss.rows.__module__.startswith(field.__name__)
    }
    assert {"simnpo", "dpo", "rmu"} <= published
    assert published <= {row.method.loss for row in found.values()}, "every loss in method/field has a row"


def test_alternates_are_given_to_the_method_that_reads_them_alone(setup):
    found = rows(setup)
    given = {name for name, row in found.items() if configured(setup, row, row.method, 0).alternates}
    assert given == {"dpo"}
    assert configured(setup, found["dpo"], found["dpo"].method, 0).alternates == "micro:alternates"
    assert rows(dataclasses.replace(setup, alternates=None)).keys() == found.keys() - {"dpo"}, "a benchmark without"


def test_cells_can_be_told_apart_and_need_their_tries(setup, tmp_path):
    cells = experiments()["field"].cells(setup, [0, 1], CellFolder(tmp_path, print))
    assert len({(cell.name, cell.seed) for cell in cells}) == len({cell.key for cell in cells}) == len(cells)
    for cell in cells:
        if TRY not in cell.name and not cell.name.endswith(MODELS):
            needed = [need.name for need in cell.needs]
            assert needed == ["field-target", "field-retrained", *(f"{cell.name}{TRY}{n}" for n in range(1, 7))]


def content(name, seed=0, **values):
    return {"name": f"field-{name}", "seed": seed, "metrics": values.pop("metrics", GOAL), **values}


def test_the_table_begins_with_the_method_that_gets_most_done():
    half = GOAL | metrics(knowmem_f=50.0)
    contents = [
        content("target", metrics=BEFORE),
        content("retrained", metrics=GOAL),
        content("broken", metrics=GOAL | metrics(knowmem_r=0.0, nll_general=9.0)),
        content("idle", metrics=BEFORE, method={"alpha": 0.2}),
        content("half", metrics=half, method={"alpha": 20.0}),
        *(content("good", seed, method={"alpha": 2.0}, **{"try": 3}) for seed in (0, 1)),
        content("good-try-1", metrics=BEFORE),
    ]
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in
             experiments()["field"].table(contents).splitlines()]  # fmt: skip
    assert sorted(line[0] for line in lines[2:4]) == ["retrained", "target"]
    assert [line[0] for line in lines[4:]] == ["good", "half", "broken", "idle"]
    marks, undone, alpha = (lines[0].index(name) for name in ("recited, known, detectable, rest", "left", "α"))
    assert [line[marks] for line in lines[4:]] == ["✓ ✓ ✓ ✓", "✓ ✗ ✓ ✓", "✓ ✓ ✓ ✗", "✗ ✗ ✗ ✓"]
    assert [line[undone] for line in lines[4:]] == ["0.00", "0.50", "1.00", "3.00"]
    assert [line[alpha] for line in lines[4:]] == ["2", "20", "–", "0.2"]
    assert "half" in experiments()["field"].table(contents[2:]), "without the models there are no marks"


def test_the_table_of_requests_names_the_untouched_target_once():
    """It is nobody's work: the requests of all methods begin with it."""
    before, after = metrics(verbmem_f=99.0, knowmem_r=92.0), metrics(verbmem_f=18.0, knowmem_r=88.0)
    requests = [{"request": 0, "metrics": before}, {"request": 1, "metrics": after, "steps": 15}]
    cells = [{"name": f"sequential-{name}", "seed": 0, "requests": requests, "metrics": after} for name in ("a", "b")]
    lines = experiments()["sequential"].table(cells).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["target", "a, after 1", "b, after 1"]
    assert lines[2].count("99.0") == 1
