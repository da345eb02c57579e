"""Files that are there whole or not at all, scores that several runs share, and where rows go besides the folder."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.evaluation.formulas import Metric
from unteach.evaluation.scores import Scores
from unteach.job import run_forget
from unteach.job.run_folder import TRACKERS, SharedScores, step_log
from unteach.writing import write_whole

ROW = {"step": 1, "nll_forget": 1.0, "divergence": 0.0, "grad_norm": 1.0, "clip_factor": 1.0, "tokens_per_second": 9.0}


@pytest.mark.skipif(os.name == "nt", reason="files are not locked on Windows")
def test_of_several_one_measures_and_the_others_wait(tmp_path: Path) -> None:
    """A lock belongs to an open file: threads that open their own wait for each other as processes do."""
    measured = []

    def compute() -> float:
        measured.append(1)
        time.sleep(0.2)
        return 1.5

    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda _: SharedScores(tmp_path / "shared").measured_once("stop before", compute), range(4))
        assert list(found) == [1.5] * 4
    assert len(measured) == 1


def test_every_name_is_measured_once_and_what_failed_again(tmp_path: Path) -> None:
    values = iter(range(3))
    scores = SharedScores()
    assert [scores.measured_once(name, lambda: next(values)) for name in ("a", "b", "a")] == [0, 1, 0]
    scores = SharedScores(tmp_path)
    with pytest.raises(ZeroDivisionError):
        scores.measured_once("a", lambda: 1 // 0)
    assert scores.measured_once("a", lambda: 2) == 2
    assert SharedScores(tmp_path).measured_once("a", lambda: 3) == 2


def test_scores_are_kept_as_they_were(tmp_path: Path) -> None:
    metric = Metric(100 / 3, None, 0.1 + 0.2, count=3, higher_is_better=None, unit="percent")
    scores = Scores("micro", {"privleak": metric}, {"verbmem_f": [{"prompt": "a", "score": 1 / 3}]}, ("note",))
    for value in (scores, {"verbmem_f": 1 / 3}, 2.5):
        SharedScores(tmp_path).measured_once(repr(type(value)), lambda value=value: value)
        known = SharedScores(tmp_path).measured_once(repr(type(value)), lambda: 1 // 0)
        assert type(known) is type(value)
        assert known.to_dict() == scores.to_dict() if isinstance(known, Scores) else known == value


def log(folder: Path, track: str) -> None:
    with step_log(folder / "metrics.jsonl", ForgetConfig(model="m", track=track)) as add:
        add(ROW)


def test_a_tracker_that_is_registered_gets_every_row_and_the_end(tmp_path, monkeypatch):
    rows = []
    monkeypatch.setitem(TRACKERS, "mine", lambda folder: rows.append)
    log(tmp_path, "mine")
    assert rows == [ROW, None]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_with_the_calls_of_wandb(name, tmp_path, monkeypatch):
    done = []
    calls = {
        call: lambda *row, call=call, **named: done.append((call, row, named)) for call in ("init", "log", "finish")
    }
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**calls))
    log(tmp_path, name)
    begun = ("init", (), {"project": "unteach", "name": tmp_path.name})
    assert done == [begun, ("log", (ROW,), {}), ("finish", (), {})]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=f"pip install {name}"):
        log(tmp_path, name)


def test_an_unknown_tracker_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match=r"track is 'wanb': .* none, tensorboard, wandb, trackio \(did you mean wandb"):
        run_forget(ForgetConfig(model="nowhere", out=str(tmp_path / "run"), track="wanb"))
    assert not (tmp_path / "run").exists()


def test_text_and_bytes_are_written_and_nothing_is_left_beside_them(tmp_path):
    for content, expected in (("añ\n", "añ\n".encode()), (b"\x00\xff", b"\x00\xff")):
        write_whole(tmp_path / "new" / "file", content)
        assert (tmp_path / "new" / "file").read_bytes() == expected
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_until_all_is_written_the_old_file_is_there(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_whole(file, "old")

    def stop(source, target):
        assert (file.read_text(), source.read_text(), target) == ("old", "new", file)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "new")
    assert file.read_text() == "old"
