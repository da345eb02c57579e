"""Checkpoints of a run: everything the loop needs to go on, bit for bit on one rank, written all or nothing.

A checkpoint is a folder: a safetensors file of every rank that has weights of its own, and ``state.json`` with all the
rest and the SHA-256 of every part, its own among them. Any number of ranks can read it. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unteach.errors import InputError, first_line
from unteach.method.tensors import is_sharded, local_part
from unteach.models.distributed import from_all_ranks, from_first_rank, is_first_rank, rank, ranks, wait_for_all
from unteach.writing import file_sha256, sealed, sync, sync_folder, unsealed

__all__ = ["Checkpoints"]

FORMAT = "unteach.checkpoint/1"
STATE = "state.json"
_TENSOR, _PAIRS, _TUPLE = "$tensor", "$pairs", "$tuple"
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class _Damaged(Exception):  # noqa: N818  (says what is wrong with a checkpoint; the one before it may be sound)
    """A checkpoint cannot be used."""


class Checkpoints:
    """The ``checkpoints`` folder of a run.

    A checkpoint is written under a temporary name, flushed to disk and renamed, so that one that exists is whole,
    whenever the program was killed; its checksums say whether it still is. Several ranks must all see the ``folder``.

    Args:
        keep: How many are kept, besides those that these and the search may go back to.
        logs: Files of lines that grow along with the run; each checkpoint knows how they began.
        run: What tells this run from others; a checkpoint of another one is not used. Empty: it is not known.
    """

    def __init__(self, folder: Path, keep: int, logs: Sequence[Path] = (), run: str = "") -> None:
        self.folder, self.keep, self.logs, self.run = folder, keep, logs, run
        if is_first_rank():
            folder.mkdir(parents=True, exist_ok=True)
            for left_over in folder.glob("*.part"):
                _remove(left_over)
            for old in folder.glob("*.old"):  # killed between the two renames of a folder written again
                _remove(old) if old.with_suffix("").exists() else old.rename(old.with_suffix(""))
        wait_for_all()

    def path(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.folder / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        names = (path.name.removeprefix("step_") for path in self.folder.glob("step_*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, step: int, content: dict[str, Any], *, protect: Collection[int]) -> None:
        """Write the checkpoint of a step, then drop old ones but those of the steps ``protect``."""
        whole, divided = dict[str, Tensor](), dict[str, Tensor]()

        def take_out(path: str, tensor: Tensor) -> Any:
            (divided if is_sharded(tensor) else whole)[path] = tensor
            return {_TENSOR: path, "shape": list(tensor.shape), "dtype": _TYPES[tensor.dtype]}

        plain = _encoded(content, take_out)
        final = self.path(step)
        partial, old = final.with_suffix(".part"), final.with_suffix(".old")
        if is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        wait_for_all()
        try:
            mine = {name: local_part(tensor) for name, tensor in divided.items()} | (whole if is_first_rank() else {})
            name = f"rank_{rank()}.safetensors"
            file = {name: _write_tensors(partial / name, mine)} if mine else {}
            files = {name: sums for each in from_all_ranks(file) for name, sums in each.items()}
            if is_first_rank():
                state = {"format": FORMAT, "step": step, "number": self._last_number() + 1, "needs": sorted(protect)}
                state |= {"run": self.run, "logs": self._log_sums(), "files": files, "content": plain}
                with (partial / STATE).open("w", encoding="utf-8") as stream:
                    stream.write(sealed(state))
                    sync(stream)
                sync_folder(partial)
                if final.exists():
                    final.rename(old)
                partial.rename(final)
                sync_folder(self.folder)
        except BaseException:
            if is_first_rank():
                shutil.rmtree(partial, ignore_errors=True)
                if old.exists() and not final.exists():
                    with suppress(OSError):
                        old.rename(final)
            raise
        if is_first_rank():
            if old.exists():
                _remove(old)
            self._drop_others({*protect, step})
        wait_for_all()

    def _drop_others(self, kept: set[int]) -> None:
        """Remove all but the last ones written, those given, and what any of these may go back to."""
        states = {step: self._state_or_none(step) or {} for step in self.steps()}
        last = sorted(states, key=lambda step: states[step].get("number", -1))[-self.keep :]
        kept = kept | {*last} | {needed for step in last for needed in states[step].get("needs", ())}
        for step in states.keys() - kept:
            _remove(self.path(step))

    def load(
        self, step: int | None = None, like: Tensor | None = None, say: Callable[[str], None] = lambda line: None
    ) -> dict[str, Any]:
        """The checkpoint of a step, or the last one that is sound; ``say`` gets a line on each that is not.

        Where the trainable weight ``like`` is sharded, so are all weights and states that are read.
        """
        said, found = from_first_rank(self._find(step) if is_first_rank() else ([], None))
        for line in said if is_first_rank() else ():
            say(line)
        if found is None:
            raise InputError(said[-1] if said else self._nothing())
        path = self.path(found)
        state = unsealed((path / STATE).read_text(encoding="utf-8"))
        with ExitStack() as opened:
            parts = [opened.enter_context(safe_open(path / name, "pt")) for name in sorted(state["files"], key=_number)]
            names = [set(part.keys()) for part in parts]

            def read(name: str, shape: list[int]) -> Tensor:
                holders = [part for part, held in zip(parts, names, strict=True) if name in held]
                states = name.startswith(("weights/", "optimizer/")) and shape  # AdamW counts steps in a scalar
                if like is not None and is_sharded(like) and states:
                    return _divided(holders, name, shape, like)
                whole = [part.get_tensor(name) for part in holders]
                return torch.cat(whole) if len(whole) > 1 else whole[0].clone()

            return _decoded(state["content"], read)

    def _find(self, step: int | None) -> tuple[list[str], int | None]:
        """What to say, and the step of the checkpoint that is asked for or of the last sound one; None: neither."""
        states = {at: self._state_or_none(at) for at in self.steps()}
        order = sorted(states, key=lambda at: (states[at] or {}).get("number", at), reverse=True)
        sound: dict[int, str] = {}

        def wrong_with(at: int) -> str:
            if at not in sound:
                try:
                    self._check(at)
                    sound[at] = ""
                except _Damaged as problem:
                    sound[at] = str(problem)
            return sound[at]

        said: list[str] = []
        for at in order if step is None else [step]:
            needs = (states.get(at) or {}).get("needs", ()) if step is None else ()
            wrong = next(filter(None, map(wrong_with, (at, *needs))), "")
            if not wrong:
                return [*said, *self._wrong_logs(states[at] or {})], at
            said.append(f"warning: {wrong}" + (", so the checkpoint before it is used" if step is None else ""))
        if said and step is None:
            better = "copy the folder back from a backup, or start anew with another --out"
            said[-1] = f"{self.folder}: no checkpoint is sound ({said[0].removeprefix('warning: ')}): {better}"
            said[-1] = said[-1].replace(", so the checkpoint before it is used", "")
        elif said:
            said[-1] = f"{said[-1].removeprefix('warning: ')}: go on from the one before it with --resume"
        return said, None

    def _nothing(self) -> str:
        """What to say where there is no checkpoint at all."""
        old = sorted(self.folder.glob("step_*.pt"))
        what = f"only {old[-1].name}, which an earlier version wrote," if old else "no checkpoint"
        return f"{str(self.folder.parent)!r} has {what} to resume from: start it anew with another --out"

    def _check(self, step: int) -> None:
        """Raise ``_Damaged`` unless every part of a checkpoint is what was written."""
        path = self.path(step)
        try:
            state = self._state(step)
            for name, sums in state["files"].items():
                file = path / Path(name).name
                if not file.is_file():
                    raise ValueError(f"{name} is missing")
                if file.stat().st_size != sums["bytes"] or file_sha256(file) != sums["sha256"]:
                    raise ValueError(f"the checksum of {name} does not match")
                with safe_open(file, "pt"):
                    pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            missing = "it is missing" if isinstance(error, FileNotFoundError) else first_line(error)
            raise _Damaged(f"{path} is damaged: {missing}") from None

    def _state(self, step: int) -> dict[str, Any]:
        state = unsealed((self.path(step) / STATE).read_text(encoding="utf-8"))
        if state.get("format") != FORMAT or state.get("step") != step:
            raise ValueError(f"{STATE} is of format {state.get('format')!r}, step {state.get('step')!r}")
        if self.run and state.get("run") and state["run"] != self.run:
            raise ValueError("it is a checkpoint of another run")
        return state

    def _state_or_none(self, step: int) -> dict[str, Any] | None:
        try:
            return self._state(step)
        except (OSError, ValueError, RecursionError):
            return None

    def _last_number(self) -> int:
        return max(((self._state_or_none(step) or {}).get("number", -1) for step in self.steps()), default=-1)

    def _log_sums(self) -> dict[str, Any]:
        """Length and SHA-256 of every log as it is now, on the disk."""
        sums = {}
        for file in self.logs:
            if file.exists():
                with file.open("rb+") as stream:
                    content = stream.read()
                    sync(stream)
                sums[file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return sums

    def _wrong_logs(self, state: dict[str, Any]) -> list[str]:
        """A line for each log that does not begin as it did when the checkpoint was written."""
        said = []
        for file in self.logs:
            if sums := state.get("logs", {}).get(file.name):
                content = file.read_bytes()[: sums["bytes"]] if file.is_file() else b""
                if hashlib.sha256(content).hexdigest() != sums["sha256"]:
                    lost = "its lines are no longer what the run wrote; the weights do not depend on them"
                    said.append(f"warning: {file} is damaged: {lost}")
        return said


def _encoded(tree: Any, take_out: Callable[[str, Tensor], Any], path: str = "") -> Any:
    """Nested dicts, lists and tuples as JSON has them, every tensor replaced by ``take_out(path, tensor)``."""
    if isinstance(tree, Tensor):
        return take_out(path.removesuffix("/"), tree)
    if isinstance(tree, Mapping):
        values = {key: _encoded(value, take_out, f"{path}{key}/") for key, value in tree.items()}
        return values if all(isinstance(key, str) for key in tree) else {_PAIRS: list(values.items())}
    if isinstance(tree, list | tuple):
        parts = [_encoded(value, take_out, f"{path}{number}/") for number, value in enumerate(tree)]
        return {_TUPLE: parts} if isinstance(tree, tuple) else parts
    return tree


def _decoded(tree: Any, read: Callable[[str, list[int]], Tensor]) -> Any:
    """What ``_encoded`` was given, with the tensors of ``read(name, shape)``."""
    if isinstance(tree, list):
        return [_decoded(value, read) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return read(tree[_TENSOR], tree["shape"])
    if _TUPLE in tree:
        return tuple(_decoded(value, read) for value in tree[_TUPLE])
    if _PAIRS in tree:
        return {key: _decoded(value, read) for key, value in tree[_PAIRS]}
    return {key: _decoded(value, read) for key, value in tree.items()}


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file, one tensor in main memory at a time; its length and SHA-256."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # wide ones first: all are aligned
    header, place = {}, 0
    for name in order:
        end = place + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _TYPES[tensors[name].dtype], "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with file.open("wb") as stream:
        begin = (len(text).to_bytes(8, "little"), text)
        for part in itertools.chain(begin, (_bytes_of(tensors[name]) for name in order)):
            stream.write(part)
            digest.update(part)
        sync(stream)
    return {"bytes": 8 + len(text) + place, "sha256": digest.hexdigest()}


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data


def _divided(parts: Sequence[Any], name: str, shape: list[int], like: Tensor) -> Tensor:
    """This rank's rows of a tensor, which lies in files one after the other, as one that is sharded as ``like`` is."""
    from torch.distributed.tensor import DTensor

    each = -(-shape[0] // ranks())
    start, stop = (min(number * each, shape[0]) for number in (rank(), rank() + 1))
    pieces, first = [], 0
    for part in parts:
        rows = part.get_slice(name)
        count = rows.get_shape()[0]
        low, high = max(start, first) - first, min(stop, first + count) - first
        if low < high:
            pieces.append(rows[low:high])
        first += count
    kind = parts[0].get_tensor(name).dtype if not pieces else pieces[0].dtype
    mine = torch.cat(pieces) if pieces else torch.empty((0, *shape[1:]), dtype=kind)
    local = mine.clone().to(like.device)
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    size = torch.Size(shape)
    strides = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=strides)


def _number(name: str) -> int:
    """The rank that wrote a file."""
    return int(name.removeprefix("rank_").removesuffix(".safetensors"))


def _remove(path: Path) -> None:
    """Remove a file at once; a folder after giving it a name under which nothing is looked for."""
    if path.is_dir():
        unnamed = path if path.suffix == ".part" else path.with_suffix(".part")
        if unnamed != path:
            shutil.rmtree(unnamed, ignore_errors=True)
        shutil.rmtree(path.rename(unnamed))
    else:
        path.unlink()
