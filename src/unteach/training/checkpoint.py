"""Checkpoints of a run: everything the loop needs to go on, bit for bit on one rank, written all or nothing.

Whole weights are written as a file. Sharded ones as a folder: each rank writes its own part of them
(``torch.distributed.checkpoint``), the first also all the rest. Either can be read by any number of ranks.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unteach.errors import InputError
from unteach.method.tensors import is_sharded
from unteach.models.distributed import divided_like, from_first_rank, is_first_rank, ranks, wait_for_all

__all__ = ["Checkpoints"]

REST = "rest.pt"
"""In a folder: everything but the sharded tensors, which have stand-ins without data."""


class Checkpoints:
    """The ``checkpoints`` folder of a run.

    A checkpoint is written under a temporary name, flushed to disk and renamed, so that one that exists is whole,
    whenever the program was killed. It holds plain tensors and numbers and is read with ``weights_only=True``. Several
    ranks must all see the ``folder``; ``keep`` are kept besides the protected ones.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        if is_first_rank():
            folder.mkdir(parents=True, exist_ok=True)
            for left_over in folder.glob("*.part"):
                _remove(left_over)
            for old in folder.glob("*.old"):  # killed between the two renames of a folder written again
                _remove(old) if old.with_suffix("").exists() else old.rename(old.with_suffix(""))
        wait_for_all()

    def path(self, step: int) -> Path:
        """The checkpoint of a step: its file, or its folder if that is newer or the only one."""
        file, folder = self.folder / f"step_{step:06d}.pt", self.folder / f"step_{step:06d}"
        return max((path for path in (file, folder) if path.exists()), key=_written, default=file)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        return sorted({int(path.stem.removeprefix("step_")) for path in self._all()})

    def _all(self) -> list[Path]:
        return [path for path in self.folder.glob("step_*") if path.suffix in ("", ".pt")]

    def save(self, step: int, content: dict[str, Any], *, protect: Collection[int]) -> None:
        """Write the checkpoint of a step, then drop old ones but those of the steps ``protect``."""
        sharded: dict[str, Tensor] = {}

        def take_out(path: str, tensor: Tensor) -> Tensor:
            if not is_sharded(tensor):
                return tensor
            sharded[path] = tensor
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        content = _map_tensors(content, take_out)
        final = self.folder / (f"step_{step:06d}" if sharded else f"step_{step:06d}.pt")
        if sharded:
            _write_folder(final, content, sharded)
        elif is_first_rank():
            _write(final.with_suffix(".part"), content)
            os.replace(final.with_suffix(".part"), final)
        if is_first_rank():
            kept = set(self.steps()[-self.keep :]) | {*protect, step}
            for old in self._all():
                number = int(old.stem.removeprefix("step_"))
                if number not in kept or (number == step and old != final):
                    _remove(old)
        wait_for_all()

    def load(self, step: int | None = None, like: Tensor | None = None) -> dict[str, Any]:
        """The checkpoint of a step, or the last one written.

        Where the trainable weight ``like`` is sharded, so are all weights and states that are read.
        """
        if not self.steps():
            raise InputError(
                f"{str(self.folder.parent)!r} has no checkpoint to resume from: start it anew with another --out"
            )
        path = from_first_rank(max(self._all(), key=_written) if step is None else self.path(step))
        if path.is_dir():
            return _read_folder(path, like)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=ranks() > 1)

        def divide(path: str, tensor: Tensor) -> Tensor:
            states = path.startswith(("weights/", "optimizer/")) and tensor.ndim > 0  # AdamW counts steps in a scalar
            return divided_like(tensor, like) if states and like is not None else tensor

        return _map_tensors(content, divide) if like is not None and is_sharded(like) else content


def _write_folder(final: Path, content: dict[str, Any], sharded: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    partial, old = final.with_suffix(".part"), final.with_suffix(".old")
    if is_first_rank():
        partial.mkdir()
    wait_for_all()
    dcp.save(sharded, storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
    if is_first_rank():
        _write(partial / REST, content)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        if old.exists():
            _remove(old)


def _read_folder(path: Path, like: Tensor | None) -> dict[str, Any]:
    """Read what several ranks wrote, sharded as ``like`` is."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import empty

    wanted: dict[str, Any] = {}

    def make_room(path: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if like is not None and is_sharded(like):
            mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
            wanted[path] = empty(*tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)
        else:
            wanted[path] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return wanted[path]

    rest = torch.load(path / REST, map_location="cpu", weights_only=True)
    content = _map_tensors(rest, make_room)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank reads: that is intended
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path), no_dist=ranks() == 1)
    return content


def _map_tensors(tree: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """A copy of nested dicts and lists with every tensor replaced by ``change(path, tensor)``."""
    if isinstance(tree, Tensor):
        return change(path.removesuffix("/"), tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, change, f"{path}{key}/") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(value, change, f"{path}{number}/") for number, value in enumerate(tree))
    return tree


def _write(file: Path, content: dict[str, Any]) -> None:
    with open(file, "wb") as stream:
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _written(path: Path) -> int:
    """When a checkpoint was written."""
    return (path / REST if path.is_dir() else path).stat().st_mtime_ns


def _remove(path: Path) -> None:
    """Remove a file at once; a folder after giving it a name under which nothing is looked for."""
    if path.is_dir():
        unnamed = path if path.suffix == ".part" else path.with_suffix(".part")
        shutil.rmtree(path.rename(unnamed))
    else:
        path.unlink()
