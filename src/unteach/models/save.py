"""Save a model as a folder that differs from its source in the changed tensors alone.

Every other tensor has the same bytes as in the source, and configuration, generation settings, tokenizer and licence
files are copied as they are.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from unteach.config import ForgetConfig
from unteach.models.distributed import full_tensor, is_first_rank, ranks, wait_for_all
from unteach.models.load import (
    COPIED,
    INDEX,
    WEIGHTS,
    StoredTensor,
    find_folder,
    has_tokenizer,
    stored_tensors,
    weight_files,
)

__all__ = ["Rounding", "rounding_loss", "save_model", "save_result"]

LARGEST_ROUNDING = 0.01
"""Share of the displacement that rounding to the source's dtype may lose before float32 is saved instead."""
_LICENCES = ("license", "licence", "notice", "use_policy")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Rounding:
    """What saving in a narrower type takes away from what was learnt, θ new weights, θ₀ those of the source."""

    tensors: int
    """How many tensors were changed."""
    displacement: float
    """‖θ - θ₀‖ before saving."""
    error: float
    """‖saved - θ‖."""
    lost: float
    """Share of the moved weights that are saved with their old value."""

    @property
    def relative(self) -> float:
        """‖saved - θ‖ / ‖θ - θ₀‖: 0 when nothing is lost, about 1 when everything is."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.displacement if self.displacement else math.inf

    def summary(self) -> str:
        """One line for people."""
        if self.error == 0.0:
            return f"{self.tensors} changed tensors saved exactly"
        return (
            f"{self.tensors} changed tensors saved with a rounding error of {self.relative:.2g} of what was learnt;"
            f" {self.lost:.1%} of the moved weights keep their old value"
        )


def rounding_loss(
    model: Any, source: str, *, changed: Iterable[str] | Mapping[str, Tensor], save_dtype: torch.dtype | None = None
) -> Rounding:
    """What `save_model` with the same arguments would lose by rounding, without writing anything."""
    folder = find_folder(source)
    stored = stored_tensors(folder)
    values = _stored_values(model, changed, stored)
    tally = _Tally()
    for file in sorted({stored[name].file for name in values}):
        with safe_open(folder / file, "pt") as tensors:
            for name in values:
                if stored[name].file == file:
                    tally.converted(name, values[name], tensors.get_tensor(name), save_dtype)
    return tally.result()


def save_model(
    model: Any,
    tokenizer: Any,
    source: str,
    out: Path,
    *,
    changed: Iterable[str] | Mapping[str, Tensor],
    card: str,
    save_dtype: torch.dtype | None = None,
) -> Rounding:
    """Write a model folder that differs from its source in the changed tensors alone.

    The folder appears at once, when it is complete; what was at `out` before (an older model) is then replaced.

    Args:
        model: The model, its parameters named as Transformers names them.
        tokenizer: Written where the source has no tokenizer files; else those are copied.
        source: What the model was loaded from, as given to `load_model`.
        out: The new folder.
        changed: Names of the changed parameters, or their values by name (whole tensors where the model is sharded).
        card: The text of README.md.
        save_dtype: The type of the changed tensors; None: each as in the source. A bfloat16 source rounds them, and
            can lose all that was learnt: see the returned `Rounding`. `torch.float32` keeps it exactly; the
            configuration then says float32, so that loading does not round either.

    Returns:
        What rounding took away.

    Raises:
        ValueError: If a changed tensor is not in the source, has another shape there or is not finite, or if `out` is
            the source or a folder that holds something else than a model.
    """
    folder = find_folder(source)
    _check_out(folder, out)
    stored = stored_tensors(folder)
    values = _stored_values(model, changed, stored)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        rounding = _write_weights(folder, partial, stored, values, save_dtype)
        _copy_rest(folder, partial)
        if save_dtype is not None:
            _name_dtype(partial, save_dtype)
        if not has_tokenizer(partial):
            tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        _put_in_place(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return rounding


def save_result(
    model: Any, parameters: Mapping[str, Any], tokenizer: Any, config: ForgetConfig, out: Path, card: str
) -> str:
    """Save the model; the first rank writes what all gather. Returns a line for people."""
    changed: dict[str, Any] | list[str] = list(parameters)
    if ranks() > 1:
        changed = {}
        for name, value in parameters.items():
            whole = full_tensor(value.detach())
            if is_first_rank():
                changed[name] = whole.to("cpu")
    line = ""
    if is_first_rank():
        save_dtype = torch.float32 if config.save_dtype == "float32" else None
        if config.save_dtype == "auto":
            lost = rounding_loss(model, config.model, changed=changed).relative
            save_dtype = torch.float32 if lost > LARGEST_ROUNDING else None
        rounding = save_model(model, tokenizer, config.model, out, changed=changed, card=card, save_dtype=save_dtype)
        line = f"model saved to {out}; {rounding.summary()}"
    wait_for_all()
    return line


def _write_weights(
    folder: Path,
    partial: Path,
    stored: Mapping[str, StoredTensor],
    values: Mapping[str, Tensor],
    save_dtype: torch.dtype | None,
) -> Rounding:
    """Write the weights files anew, one at a time; those without a changed tensor are copied whole."""
    tally = _Tally()
    for file in weight_files(folder):
        names = [name for name in values if stored[name].file == file]
        if not names:
            shutil.copyfile(folder / file, partial / file)
            continue
        with safe_open(folder / file, "pt") as tensors:
            content = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            metadata = tensors.metadata()
        for name in names:
            content[name] = tally.converted(name, values[name], content[name], save_dtype)
        save_file(content, partial / file, metadata)
        del content
    return tally.result()


class _Tally:
    """Converts tensors to the type they are saved in, and adds up what that loses."""

    def __init__(self) -> None:
        self.tensors = self.moved = self.lost = 0
        self.displacement = self.error = 0.0

    def converted(self, name: str, value: Tensor, old: Tensor, save_dtype: torch.dtype | None) -> Tensor:
        """The value as it is saved in place of `old`."""
        value = value.detach().to("cpu")
        saved = torch.empty(value.shape, dtype=save_dtype or old.dtype)  # memory of its own: a file cannot share any
        saved.copy_(value)
        if not bool(torch.isfinite(saved).all()):
            what = "not finite" if not bool(torch.isfinite(value).all()) else f"too large for {saved.dtype}"
            raise ValueError(f"{name} has values that are {what}: this model is broken and is not saved")
        wide = torch.promote_types(value.dtype, old.dtype)
        value, before, after = value.to(wide), old.to(wide), saved.to(wide)
        moved = value != before
        self.tensors += 1
        self.moved += int(moved.sum())
        self.lost += int((moved & (after == before)).sum())
        self.displacement = math.hypot(self.displacement, _norm(value - before))
        self.error = math.hypot(self.error, _norm(after - value))
        return saved

    def result(self) -> Rounding:
        """All of it."""
        return Rounding(self.tensors, self.displacement, self.error, self.lost / self.moved if self.moved else 0.0)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _stored_values(
    model: Any, changed: Iterable[str] | Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """The changed tensors under the names, and in the layout, that the source's files have.

    A tied parameter is written under each of its names that the files have. Where Transformers loads weights under
    other names or joined (experts of a mixture, for instance), its own conversion is run backwards.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameters = {_plain_name(name): value for name, value in model.named_parameters(remove_duplicate=False)}
    names = [_plain_name(name) for name in changed]
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ValueError(f"changed names {unknown[0]!r}, which is no parameter of the model")
    given = {_plain_name(name): value for name, value in changed.items()} if isinstance(changed, Mapping) else {}
    state = {}
    for name in names:
        value = given.get(name, parameters[name]).detach()
        state.update({other: value for other, parameter in parameters.items() if parameter is parameters[name]})
    prefix = f"{model.base_model_prefix}."
    found: dict[str, Tensor] = {}
    missing: dict[str, Tensor] = {}
    for name, value in revert_weight_conversion(model, state).items():
        spellings = (name, name.removeprefix(prefix), prefix + name)
        match = next((spelling for spelling in spellings if spelling in stored), None)
        if match is None:
            missing[name] = value
        elif tuple(value.shape) != stored[match].shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the source's {match} {stored[match].shape}")
        else:
            found[match] = value
    written = {value.data_ptr() for value in found.values()}
    for name, value in missing.items():
        if value.data_ptr() not in written:
            raise ValueError(f"{name} was changed, but the source's weights files have no tensor of that name")
    return found


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _check_out(folder: Path, out: Path) -> None:
    if out.exists() and out.resolve() == folder.resolve():
        raise ValueError(f"out is '{out}', the folder of the source model: it must be another one")
    if out.exists() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise ValueError(f"out is '{out}', which exists and holds something else than a model: choose another folder")


def _copy_rest(folder: Path, partial: Path) -> None:
    """Copy configuration, tokenizer and licence files."""
    for entry in sorted(folder.iterdir()):
        wanted = entry.suffix in COPIED or entry.stem.lower().startswith(_LICENCES)
        foreign = entry.name.endswith(".index.json") and (entry.name != INDEX or (folder / WEIGHTS).is_file())
        if entry.is_file() and wanted and not foreign and entry.name != "adapter_config.json":
            shutil.copyfile(entry, partial / entry.name)


def _name_dtype(partial: Path, dtype: torch.dtype) -> None:
    """Make the configuration name the type of the changed tensors, and the index the new size."""
    config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(partial / "config.json", config)
    if (partial / INDEX).is_file():
        index = json.loads((partial / INDEX).read_text(encoding="utf-8"))
        index.setdefault("metadata", {})["total_size"] = sum(
            _data_size(partial / file) for file in set(index["weight_map"].values())
        )
        _write_json(partial / INDEX, index)


def _data_size(file: Path) -> int:
    """Bytes of all tensors in a safetensors file: what follows the header's length (8 bytes) and the header."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _put_in_place(partial: Path, out: Path) -> None:
    """Write everything through to the disk, then give the folder its name."""
    for entry in [*partial.iterdir(), partial]:
        descriptor = os.open(entry, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if out.exists():
        old = out.with_name(f".{out.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old)
    else:
        partial.rename(out)
