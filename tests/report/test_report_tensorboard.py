from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from run_folders import make_references, make_run

from unteach.report import write_tensorboard


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as where it is not installed
    with pytest.raises(ValueError, match="pip install tensorboard"):
        write_tensorboard(make_run(tmp_path / "run", steps=10, every=10), tmp_path / "events")


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="the optional package tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scalars_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = write_tensorboard(make_run(tmp_path / "run", steps=10, every=5), tmp_path / "events")
    assert folder.name == "mt-nlul-kl-seed0"
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("train/nll_forget")] == list(range(1, 11))
    assert [event.step for event in events.Scalars("scores/verbmem_f")] == [0, 5, 10]
    with pytest.raises(ValueError, match="not a run folder"):
        write_tensorboard(make_references(tmp_path / "scores.json"), tmp_path / "events")
