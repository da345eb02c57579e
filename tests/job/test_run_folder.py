"""Scores that several runs share."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from unteach.evaluation.scores import Scores
from unteach.evaluation.statistics import Metric
from unteach.job.run_folder import SharedScores


def measure(folder: Path) -> float:
    """In a process of its own: note who measures, and take some time for it."""

    def compute() -> float:
        with (folder / "measured").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return 1.5

    return SharedScores(folder / "shared").measured_once("stop before", compute)


@pytest.mark.skipif(os.name == "nt", reason="files are not locked on Windows")
def test_of_several_processes_one_measures_and_the_others_wait(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(measure, [tmp_path] * 4, chunksize=1) == [1.5] * 4
    assert len((tmp_path / "measured").read_text().split()) == 1


def test_every_name_is_measured_once() -> None:
    values = iter(range(3))
    scores = SharedScores()
    assert [scores.measured_once(name, lambda: next(values)) for name in ("a", "b", "a")] == [0, 1, 0]


def test_what_failed_is_measured_again(tmp_path: Path) -> None:
    scores = SharedScores(tmp_path)
    with pytest.raises(ZeroDivisionError):
        scores.measured_once("a", lambda: 1 // 0)
    assert scores.measured_once("a", lambda: 2) == 2
    assert SharedScores(tmp_path).measured_once("a", lambda: 3) == 2


def test_scores_are_kept_as_they_were(tmp_path: Path) -> None:
    metric = Metric(100 / 3, None, 0.1 + 0.2, count=3, higher_is_better=None, unit="percent")
    scores = Scores(
        "micro", {"privleak": metric}, {"verbmem_f": [{"prompt": "a", "score": 1 / 3}]}, ("note",), {"n": 1}
    )
    for value in (scores, {"verbmem_f": 1 / 3}, 2.5):
        SharedScores(tmp_path).measured_once(repr(type(value)), lambda value=value: value)
        known = SharedScores(tmp_path).measured_once(repr(type(value)), lambda: 1 // 0)
        assert type(known) is type(value)
        assert known.to_dict() == scores.to_dict() if isinstance(known, Scores) else known == value
