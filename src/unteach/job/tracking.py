"""Every step of a run: into ``metrics.jsonl``, onto a progress bar, and to a tracker if one is wished for."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.settings import nearest_name
from unteach.writing import write_whole

__all__ = ["TRACKERS", "StepLog", "check_tracker"]

Tracker = Callable[[dict[str, Any] | None], None]
"""Takes the row of every step and, at the end of the run, None."""


class StepLog:
    """Where the metrics of a run's steps go.

    Args:
        folder: The run folder.
        config: Names the tracker and the largest number of steps.
        say: Unused lines for people go here when there is no terminal.
    """

    def __init__(self, folder: Path, config: ForgetConfig, say: Callable[[str], None]) -> None:
        self.file = folder / "metrics.jsonl"
        self.tracker = _open_tracker(config.track, folder)
        self.console = Console(file=sys.stderr)
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.progress.add_task("", total=config.max_steps)

    def __enter__(self) -> StepLog:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()
        if self.tracker is not None:
            self.tracker(None)

    def add(self, row: dict[str, Any]) -> None:
        """Log one step."""
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = (
            f"NLL {row['nll_forget']:.3f}  divergence {row['divergence']:.1e}  |g| {row['grad_norm']:.2g}  "
            f"clip {row['clip_factor']:.2f}  {row['tokens_per_second']:,.0f} tokens/s"
        )
        self.progress.update(self.task, completed=row["step"], description=shown)
        if self.tracker is not None:
            self.tracker(row)

    def rewind(self, step: int) -> None:
        """Drop the rows after a step: they will come again. A half-written last line goes too."""
        if not self.file.exists():
            return
        rows = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if row["step"] > step:
                break
            rows.append(line)
        write_whole(self.file, "".join(f"{line}\n" for line in rows))


def check_tracker(name: str) -> None:
    """Refuse what is no tracker.

    Raises:
        InputError: There is none of that name.
    """
    known = ["none", *TRACKERS]
    if name not in known:
        raise InputError(f"track is {name!r}: it must be one of {', '.join(known)}{nearest_name(name, known)}")


def _open_tracker(name: str, folder: Path) -> Tracker | None:
    """The tracker of that name, for a run in that folder; None where the name is none.

    Raises:
        InputError: There is no such tracker, or it is not installed.
    """
    check_tracker(name)
    try:
        return None if name == "none" else TRACKERS[name](folder)
    except ImportError:
        raise InputError(f"track is {name!r}, which is not installed: pip install {name}") from None


def _tensorboard(folder: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def track(row: dict[str, Any] | None) -> None:
        if row is None:
            writer.close()
        else:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(name, value, row["step"])

    return track


def _service(module_name: str, folder: Path) -> Tracker:
    """A tracker that has wandb's calls."""
    module = importlib.import_module(module_name)
    module.init(project="unteach", name=folder.name)
    return lambda row: module.finish() if row is None else module.log(row)


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": functools.partial(_service, "wandb"),
    "trackio": functools.partial(_service, "trackio"),
}
"""What opens each tracker, given the run folder. To add one, add it here; ``--track NAME`` finds it."""
