"""Save a model as a folder that differs from its source in the changed tensors alone.

Every other tensor has the same bytes as in the source, and configuration, generation settings, tokenizer and licence
files are copied as they are.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from unteach.config import ForgetConfig
from unteach.models.adapters import adapted_layers, is_adapter, merged_weights, read_adapter, write_adapter
from unteach.models.distributed import full_tensor, is_first_rank, ranks, wait_for_all
from unteach.models.load import (
    COPIED,
    INDEX,
    MERGED,
    WEIGHTS,
    find_folder,
    has_tokenizer,
    stored_tensors,
    weight_files,
    whole_folder,
)

__all__ = ["Rounding", "rounding_loss", "save_adapter", "save_model", "save_result"]

LARGEST_ROUNDING = 0.01
"""Share of the displacement that rounding to the source's dtype may lose before float32 is saved instead."""
_LICENCES = ("license", "licence", "notice", "use_policy")
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
Changed = Iterable[str] | Mapping[str, Tensor]


@dataclass(slots=True)
class Rounding:
    """What saving changed tensors in a narrower type takes away, θ new weights, θ₀ those of the source."""

    tensors: int = 0
    displacement: float = 0.0
    """‖θ - θ₀‖ before saving."""
    error: float = 0.0
    """‖saved - θ‖."""
    moved: int = 0
    unmoved: int = 0
    """How many of the moved weights are saved with their old value."""

    @property
    def lost(self) -> float:
        """Share of the moved weights that are saved with their old value."""
        return self.unmoved / self.moved if self.moved else 0.0

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

    def convert(self, name: str, value: Tensor, old: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The value as it is saved in place of `old`, in a type or in that of `old`; adds what that loses."""
        value = value.detach().to("cpu")
        saved = torch.empty(value.shape, dtype=dtype or old.dtype)  # memory of its own: a file cannot share any
        saved.copy_(value)
        if not bool(torch.isfinite(saved).all()):
            what = "not finite" if not bool(torch.isfinite(value).all()) else f"too large for {saved.dtype}"
            raise ValueError(f"{name} has values that are {what}: this model is broken and is not saved")
        wide = torch.promote_types(value.dtype, old.dtype)
        value, before, after = value.to(wide), old.to(wide), saved.to(wide)
        moved = value != before
        self.tensors += 1
        self.moved += int(moved.sum())
        self.unmoved += int((moved & (after == before)).sum())
        self.displacement = math.hypot(self.displacement, _norm(value - before))
        self.error = math.hypot(self.error, _norm(after - value))
        return saved


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def rounding_loss(model: Any, source: str, *, changed: Changed, save_dtype: torch.dtype | None = None) -> Rounding:
    """What `save_model` with the same arguments would lose by rounding, without writing anything."""
    return _write_weights(model, whole_folder(find_folder(source)), None, changed, save_dtype)


def save_model(
    model: Any,
    tokenizer: Any,
    source: str,
    out: Path,
    *,
    changed: Changed,
    card: str,
    save_dtype: torch.dtype | None = None,
) -> Rounding:
    """Write a model folder that differs from its source in the changed tensors alone.

    The folder appears at once, when it is complete; an older model at `out` is then replaced. The source is what the
    model was loaded from; the tokenizer is written only where it has none. `card` is the text of README.md.

    Args:
        changed: Names of the changed parameters, as Transformers names them, or their values by name (whole tensors
            where the model is sharded). Each must be in the source, in the same shape, and finite.
        save_dtype: The type of the changed tensors; None: each as in the source. A bfloat16 source rounds them, and
            can lose all that was learnt: see the returned `Rounding`. `torch.float32` keeps it exactly; the
            configuration then says float32, so that loading does not round either.
    """
    folder = find_folder(source)
    with _new_folder(out, folder) as partial:
        rounding = _write_weights(model, whole_folder(folder), partial, changed, save_dtype)
        for given in dict.fromkeys((whole_folder(folder), folder)):  # an adapter's folder may have a tokenizer, too
            _copy_others(given, partial)
        if save_dtype is not None:
            _name_dtype(partial, save_dtype)
        if not has_tokenizer(partial):
            tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
    return rounding


def save_adapter(model: Any, tokenizer: Any, source: str, out: Path, *, weights: dict[str, Tensor], card: str) -> None:
    """Write the folder of a model's adapter, as PEFT does, with its tokenizer and card; other arguments as above."""
    folder = find_folder(source)
    for name, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} has values that are not finite: this adapter is broken and is not saved")
    if is_adapter(folder):
        base = read_adapter(folder).base
    else:  # a hub id, or a folder that PEFT can load wherever it is called
        base = source if not Path(source).expanduser().is_dir() and ":" not in source else str(folder.resolve())
    with _new_folder(out, folder) as partial:
        write_adapter(partial, model, weights, base)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def _new_folder(out: Path, source: Path) -> Iterator[Path]:
    """A folder to fill in the block; it becomes ``out`` at once, when it is complete, and replaces an older model."""
    if out.exists() and out.resolve() == source.resolve():
        raise ValueError(f"out is '{out}', the folder of the source model: it must be another one")
    if out.exists() and any(out.iterdir()) and not ((out / "config.json").is_file() or is_adapter(out)):
        raise ValueError(f"out is '{out}', which exists and holds something else than a model: choose another folder")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for entry in [*partial.iterdir(), partial]:  # everything is on the disk before the folder has its name
            descriptor = os.open(entry, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        old = out.with_name(f".{out.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_others(folder: Path, partial: Path) -> None:
    """Copy configuration, tokenizer and licence files."""
    for entry in folder.iterdir():
        wanted = entry.suffix in COPIED or entry.stem.lower().startswith(_LICENCES)
        foreign = entry.name.endswith(".index.json") and (entry.name != INDEX or (folder / WEIGHTS).is_file())
        if entry.is_file() and wanted and not foreign and entry.name not in ("adapter_config.json", "receipt.json"):
            shutil.copyfile(entry, partial / entry.name)


def save_result(
    model: Any, parameters: Mapping[str, Any], tokenizer: Any, config: ForgetConfig, out: Path, card: str
) -> str:
    """Save the model, or its adapter; the first rank writes what all gather. Returns a line for people."""

    adapted = adapted_layers(model)

    def gathered(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Whole tensors, on the first rank; each is gathered, or made, and moved before the next."""
        moved = ranks() > 1 or adapted
        whole = ((name, full_tensor(value.detach())) for name, value in values)
        return {name: (value.to("cpu") if moved else value) if is_first_rank() else None for name, value in whole}

    line = ""
    if config.save == "adapter":
        weights = gathered(parameters.items())
        if is_first_rank():
            save_adapter(model, tokenizer, config.model, out, weights=weights, card=card)
            line = f"adapter saved to {out}: {len(weights)} tensors"
    else:
        changed = gathered((name, model.get_parameter(name)) for name in getattr(model, MERGED, ()))
        changed |= gathered(merged_weights(model, full_tensor) if adapted else parameters.items())
        if is_first_rank():
            exact = config.save_dtype == "float32" or (
                config.save_dtype == "auto"
                and rounding_loss(model, config.model, changed=changed).relative > LARGEST_ROUNDING
            )
            dtype = torch.float32 if exact else None
            rounding = save_model(model, tokenizer, config.model, out, changed=changed, card=card, save_dtype=dtype)
            line = f"model saved to {out}; {rounding.summary()}"
    wait_for_all()
    return line


def _write_weights(
    model: Any, folder: Path, partial: Path | None, changed: Changed, save_dtype: torch.dtype | None
) -> Rounding:
    """Write the weights files anew, those without a changed tensor as they are; without a folder, only measure."""
    rounding, stored = Rounding(), stored_tensors(folder)
    values = _stored_values(model, changed, {name: tensor.shape for name, tensor in stored.items()})
    for file in weight_files(folder):
        names = [name for name in values if stored[name].file == file]
        if names:
            with safe_open(folder / file, "pt") as tensors:
                wanted = names if partial is None else tensors.keys()
                content, metadata = {name: tensors.get_tensor(name) for name in wanted}, tensors.metadata()
            for name in names:
                content[name] = rounding.convert(name, values[name], content[name], save_dtype)
            if partial is not None:
                save_file(content, partial / file, metadata)
            del content
        elif partial is not None:
            shutil.copyfile(folder / file, partial / file)
    return rounding


def _stored_values(model: Any, changed: Changed, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The changed tensors under the names, and in the layout, that the source's files have, given as shapes.

    A tied parameter is written under each of its names that the files have. Where Transformers loads weights under
    other names or joined (experts of a mixture, for instance), its own conversion is run backwards.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameters = {_WRAPPERS.sub("", name): value for name, value in model.named_parameters(remove_duplicate=False)}
    parameters |= {f"{name}.weight": layer.a for name, layer in adapted_layers(model).items()}  # not under its own name
    state = {}
    for given in changed:
        name = _WRAPPERS.sub("", given)
        if name not in parameters:
            raise ValueError(f"changed names {name!r}, which is no parameter of the model")
        value = (changed[given] if isinstance(changed, Mapping) else parameters[name]).detach()
        state.update({other: value for other, parameter in parameters.items() if parameter is parameters[name]})
    prefix = f"{model.base_model_prefix}."
    found: dict[str, Tensor] = {}
    missing: dict[str, Tensor] = {}
    for name, value in revert_weight_conversion(model, state).items():
        spellings = (name, name.removeprefix(prefix), prefix + name)
        match = next((spelling for spelling in spellings if spelling in stored), None)
        if match is None:
            missing[name] = value
        elif tuple(value.shape) != stored[match]:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the source's {match} {stored[match]}")
        else:
            found[match] = value
    written = {value.data_ptr() for value in found.values()}
    for name, value in missing.items():
        if value.data_ptr() not in written:
            raise ValueError(f"{name} was changed, but the source's weights files have no tensor of that name")
    return found


def _name_dtype(partial: Path, dtype: torch.dtype) -> None:
    """Make the configuration name the type of the changed tensors, and the index the new size."""
    config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = str(dtype).removeprefix("torch.")
    contents = {"config.json": config}
    if (partial / INDEX).is_file():
        contents[INDEX] = index = json.loads((partial / INDEX).read_text(encoding="utf-8"))
        size = 0
        for file in set(index["weight_map"].values()):
            with (partial / file).open("rb") as stream:  # tensors follow the header's length (8 bytes) and the header
                size += (partial / file).stat().st_size - 8 - int.from_bytes(stream.read(8), "little")
        index.setdefault("metadata", {})["total_size"] = size
    for name, content in contents.items():
        (partial / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
