"""Every step of a run: into ``metrics.jsonl``, onto a progress bar, and to a tracker if one is wished for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.writing import write_whole

__all__ = ["StepLog"]


class StepLog:
    """Where the metrics of a run's steps go.

    Args:
        folder: The run folder.
        config: Names the tracker and the largest number of steps.
        say: Unused lines for people go here when there is no terminal.
    """

    def __init__(self, folder: Path, config: ForgetConfig, say: Callable[[str], None]) -> None:
        self.file = folder / "metrics.jsonl"
        self.tracker = _tracker(config, folder)
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


def _tracker(config: ForgetConfig, folder: Path) -> Callable[[dict[str, Any] | None], None] | None:
    """A function that takes the rows of a run and, at its end, None."""
    if config.track == "none":
        return None
    try:
        if config.track == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"))

            def write(row: dict[str, Any] | None) -> None:
                if row is None:
                    writer.close()
                    return
                for name, value in row.items():
                    if name != "step":
                        writer.add_scalar(name, value, row["step"])

            return write
        import importlib

        module = importlib.import_module(config.track)  # wandb and trackio share these three calls
    except ImportError:
        raise InputError(f"track is {config.track!r}, which is not installed: pip install {config.track}") from None
    module.init(project="unteach", name=folder.name)
    return lambda row: module.finish() if row is None else module.log(row)
