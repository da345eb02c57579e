"""Where the rows of a run go besides its folder."""

import sys
from types import SimpleNamespace

import pytest

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.job import run_forget
from unteach.job.run_folder import TRACKERS, StepLog

ROW = {"step": 1, "nll_forget": 1.0, "divergence": 0.0, "grad_norm": 1.0, "clip_factor": 1.0, "tokens_per_second": 9.0}


def log(tmp_path, track):
    with StepLog(tmp_path, ForgetConfig(model="m", track=track)) as steps:
        steps.add(ROW)


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
    assert done == [
        ("init", (), {"project": "unteach", "name": tmp_path.name}),
        ("log", (ROW,), {}),
        ("finish", (), {}),
    ]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=f"pip install {name}"):
        log(tmp_path, name)


def test_an_unknown_tracker_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match=r"track is 'wanb': .* none, tensorboard, wandb, trackio \(did you mean wandb"):
        run_forget(ForgetConfig(model="nowhere", out=str(tmp_path / "run"), track="wanb"))
    assert not (tmp_path / "run").exists()
