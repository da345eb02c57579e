"""Whole runs: what is looked at, where runs are matched, and what the tables say."""

import dataclasses

import pytest

from unteach.experiments.cells import CellFolder
from unteach.experiments.paper import experiments
from unteach.experiments.paper.trajectories import AUTHORS, METHODS, _points, authors, configured, matched
from unteach.experiments.reproduce import ReproduceOptions
from unteach.experiments.sources import build

AUC = "auc_forget_holdout_min_40"


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return build(ReproduceOptions(device="cpu"), tmp_path_factory.mktemp("texts"), print)


def run(name, looks, seed=0, norms=(0.5, 2.0), clip=1.0):
    goal = {"verbmem_f": 20.0, "nll_forget": 2.0, AUC: 0.5}
    known = ("step", "verbmem_f", "nll_forget", "nll_general", AUC)
    return {
        "name": f"trajectory-{name}", "seed": seed, "metrics": {}, "method": {"clip": clip},
        "stop_scores": [dict(zip(known, look, strict=True)) for look in looks], "stop_reference": goal,
        "curve": {"step": [1, 2], "grad_norm": list(norms)},
    }  # fmt: skip


LOOKS = [(0, 100.0, 0.0, 3.0, 0.0), (4, 80.0, 0.5, 3.1, 0.1), (8, 40.0, 1.5, 3.5, 0.3), (12, 50.0, 2.5, 3.6, 0.9)]


def test_runs_are_matched_where_they_first_come_to_a_level():
    point = matched(run("a", LOOKS), "verbmem_f", 60.0)
    assert point["step"] == 6.0, "half-way from 80 to 40, not where it comes back"
    assert (point["nll_forget"], point["nll_general"]) == (1.0, pytest.approx(3.3))
    assert (point["nll_general_rise"], point["privleak"]) == (pytest.approx(0.3), pytest.approx(-60.0))
    assert matched(run("a", LOOKS), "verbmem_f", 45.0)["step"] == 7.5
    assert matched(run("a", LOOKS), "nll_forget", 2.5)["step"] == 12.0
    assert matched(run("a", LOOKS), "verbmem_f", 20.0) is None, "it never came there"
    assert matched(run("a", LOOKS), "knowmem_f", 20.0) is None, "not measured"


def test_the_tables_compare_at_the_same_recital_and_at_the_same_loss():
    further = [*LOOKS[:3], (12, 20.0, 2.0, 3.9, 0.6)]
    contents = [run("a", LOOKS), run("a", LOOKS, 1), run("b", further, norms=(2.0, 3.0), clip=None)]
    contents[1]["stop_reference"] = contents[1]["stop_reference"] | {"verbmem_f": 40.0}  # on the passages of that seed
    found = experiments()["trajectories"].table(contents)
    assert found.count("came there") == 4
    assert "The same recital, half-way to the retrained model's (verbmem_f 63.3):" in found
    parts = [[word.strip() for word in line.split("|")[1:-1]] for line in found.splitlines() if line.startswith("| ")]
    rows = [row for row in parts if row[0] in ("a", "b")]
    assert [row[:3] for row in rows[:2]] == [["a", "2 of 2", "6 (1)"], ["b", "1 of 1", "6"]]
    assert [row[1:3] for row in rows[2:4]] == [["1 of 2", "8"], ["1 of 1", "12"]]
    assert [row[-1] for row in rows[:2]] == ["50 (0)", "–"], "a run without a clip has clipped nothing"
    own = [row for row in parts if row[0] == "retrained"]
    assert len(own) == 4
    assert {row[3] for row in own} == {"–"}, "where cells do not have it, nothing is said"
    for content, seed_own in zip(contents, (3.2, 3.4, 3.2), strict=True):
        content["stop_reference"] = content["stop_reference"] | {"nll_general": seed_own}
    row = next(line for line in experiments()["trajectories"].table(contents).splitlines() if "retrained " in line[:20])
    own = [word.strip() for word in row.split("|")[1:-1]]
    assert own[:4] == ["retrained", "–", "–", "0.300 (0.141)"], "once for each seed, however many methods have it"
    assert own[7] == "0.0 (0.0)", "its own PrivLeak is the zero of the others"
    beyond = [*LOOKS[:3], (12, 50.0, 2.5, 3.6, 0.9), (16, 50.0, 20.0, 9.0, 1.0)]
    assert [x for x, _ in _points(run("a", beyond), "nll_general", "nll_forget")] == [0.0, 0.5, 1.5, 2.5], "too far"
    drawn = experiments()["trajectories"].figures("micro", contents)
    names = {figure.name for figure in drawn}
    assert {"trajectories-by-nll_forget-privleak-micro", "trajectories-by-verbmem_f-nll_general_rise-micro"} <= names


def test_the_parts_of_the_authors_method_differ_in_one_number():
    whole, stronger, free, descent = (authors(name) for name in AUTHORS)
    assert (whole.lr, whole.teacher_rate, whole.damping, whole.clip, whole.alpha) == (5e-4, 10.0, 5.0, 1.0, 0.05)
    assert stronger == dataclasses.replace(whole, alpha=10 * whole.alpha)
    assert free == dataclasses.replace(stronger, clip=None)
    assert descent == dataclasses.replace(whole, alpha=1000 * whole.alpha)


def test_every_run_takes_its_steps_and_looks_at_everything(setup, tmp_path):
    for name, steps, every in (
        ("mt-nlul-qkl", 80, 4),
        ("authors", 800, 40),
        ("authors-x10", 400, 20),
        ("authors-descent", 80, 4),
    ):
        config = configured(setup, name, 1)
        assert (config.max_steps, config.evaluate_every, config.stop.refine) == (steps, every, False)
        assert config.stop.metric == f"verbmem_f <= -1 and {AUC} >= 0 and knowmem_f <= 100 and knowmem_r >= 0"
    cells = experiments()["trajectories"].cells(setup, [0, 1], CellFolder(tmp_path, print))
    assert len({cell.key for cell in cells}) == len(cells) == 2 * (len(METHODS) + len(AUTHORS))
    assert not any(experiments()["methods"].shows(cell.name) for cell in cells)
