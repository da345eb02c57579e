"""Checkpoints of a run: everything the loop needs to go on bit for bit, written all or nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from unteach.errors import InputError

__all__ = ["Checkpoints"]


class Checkpoints:
    """The ``checkpoints`` folder of a run.

    A checkpoint is written to a temporary file, flushed to disk and renamed, so that one that exists is whole, whenever
    the program was killed. It holds plain tensors and numbers and is read with ``weights_only=True``.

    Args:
        folder: The folder; made if need be.
        keep: How many to keep besides the protected one.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob("*.part"):
            left_over.unlink()

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step_{step:06d}.pt"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        return sorted(int(path.stem.removeprefix("step_")) for path in self.folder.glob("step_*.pt"))

    def save(self, step: int, content: dict[str, Any], *, protect: int) -> None:
        """Write the checkpoint of a step, then drop old ones but that of step ``protect``."""
        partial = self.path(step).with_suffix(".part")
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path(step))
        kept = set(self.steps()[-self.keep :]) | {protect, step}
        for old in self.steps():
            if old not in kept:
                self.path(old).unlink()

    def load(self, step: int | None = None) -> dict[str, Any]:
        """The checkpoint of a step, or the last one written."""
        if not self.steps():
            raise InputError(
                f"{str(self.folder.parent)!r} has no checkpoint to resume from: start it anew with another --out"
            )
        newest = max(self.folder.glob("step_*.pt"), key=lambda path: path.stat().st_mtime_ns)
        return torch.load(newest if step is None else self.path(step), map_location="cpu", weights_only=True)
