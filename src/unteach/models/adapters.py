"""Adapters (LoRA): a few trained weights beside a frozen base, as layers, as PEFT's folders, and as PEFT's own models.

A linear layer y = W x + b becomes y = W x + b + s B A x with A [r, in] and B [out, r] of a small rank r. W stays, in
float32 or fewer bits; A and B are the parameters that an optimizer moves and its teacher follows. B is zero at
first, so that the model is what it was.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unteach.errors import InputError, first_line
from unteach.models.quantised import FrozenLinear

__all__ = [
    "AdaptedLinear", "StoredAdapter", "adapted_layers", "adapter_parameters", "add_adapters", "is_adapter",
    "keep_base_in", "merge", "merged_weights", "read_adapter", "without_peft", "write_adapter",
]  # fmt: skip

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANK = 16
_PLAIN_STARTS = (True, False, None, "gaussian")
"""How PEFT may have begun an adapter: the others change the base, too."""
_STORED = "_adapter_config"
"""Attribute of a model that keeps the configuration of the adapter it was loaded with."""
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")


class AdaptedLinear(nn.Module):
    """W x + b + s B A x.

    Args:
        base: The layer of W and b, which is frozen.
        rank: r.
        scale: s.
        draws: What A is drawn from, normal with variance 1/r: G Aᵀ, the gradient in B, has then the norm of the
            gradient G in W, on average; None: A is left at zero.

    Differs from PEFT, whose A is √(3 in/r) times smaller. B must then become large, where the gradient in A outgrows
    that in B, and a run whose step sizes were measured at its start goes faster and faster (docs/decisions.md).
    """

    def __init__(self, base: Any, rank: int, scale: float, draws: torch.Generator | None = None) -> None:
        super().__init__()
        self.base, self.scale, self.transposed = base, scale, _is_transposed(base)
        rows, columns = reversed(base.weight.shape) if self.transposed else base.weight.shape
        plain: Any = {"bias": False, "device": base.weight.device}
        self.lora_A, self.lora_B = nn.Linear(columns, rank, **plain), nn.Linear(rank, rows, **plain)
        nn.init.zeros_(self.lora_A.weight)
        nn.init.zeros_(self.lora_B.weight)
        if draws is not None:
            values = torch.randn(rank, columns, generator=draws)  # in main memory: the same whatever the device
            with torch.no_grad():
                self.lora_A.weight.copy_(values / math.sqrt(rank))

    def forward(self, input: Tensor) -> Tensor:
        """The output of the base and of the adapter."""
        return torch.add(self.base(input), self.lora_B(self.lora_A(input)), alpha=self.scale)


class Layer(NamedTuple):
    """An adapted layer, ours or PEFT's."""

    base: Any
    a: Tensor
    b: Tensor
    scale: float
    transposed: bool
    """Whether W is kept as [in, out]."""

    def merged(self, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """W + s B A, as W is kept; ``gather`` gives the whole of a sharded tensor."""
        change = self.scale * (gather(self.b.detach()) @ gather(self.a.detach()))
        if isinstance(self.base, FrozenLinear):
            whole = self.base.whole() + change
            return whole.t() if self.transposed else whole
        return gather(self.base.weight.detach()) + (change.t() if self.transposed else change)


def _is_transposed(layer: nn.Module) -> bool:
    """Whether a layer's weight is [in, out], as in GPT-2."""
    return type(layer).__name__ == "Conv1D"


def adapted_layers(model: nn.Module) -> dict[str, Layer]:
    """The adapted layers of a model, ours or those that PEFT made, by the names that they have without adapters."""
    found = dict[str, Layer]()
    modules: Iterator[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        if isinstance(module, AdaptedLinear):
            two = module.lora_A.weight, module.lora_B.weight
            found[name] = Layer(module.base, *two, module.scale, module.transposed)
        elif isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and len(module.lora_A):
            (active,) = module.active_adapters
            two, base = (module.lora_A[active].weight, module.lora_B[active].weight), module.base_layer
            found[name] = Layer(base, *two, module.scaling[active], _is_transposed(base))
    return found


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' weights by name; all others are frozen."""
    chosen = {id(tensor) for layer in adapted_layers(model).values() for tensor in (layer.a, layer.b)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in chosen}


def add_adapters(model: nn.Module, inside: nn.Module, rank: int = RANK, seed: int = 0) -> None:
    """Put an adapter, drawn by a seed, beside every linear layer of a part of the model, in place."""
    draws = torch.Generator().manual_seed(seed)
    parts = {id(module) for module in inside.modules()}
    for name, module in list(model.named_modules()):
        if id(module) in parts and (type(module) is nn.Linear or _is_transposed(module)):
            model.set_submodule(name, AdaptedLinear(module, rank, 1.0, draws).eval())


def keep_base_in(model: nn.Module, bits: int | None, half: torch.dtype | None, device: Any = None) -> None:
    """Keep what lies under our adapters in 4, 8, 16 or 32 bits, moved to a device first, in place.

    ``half`` is the type that 16 bits are of (None: bfloat16), and in which they are kept where no ``bits`` are given.
    """
    bits, half = bits or (16 if half else 32), half or torch.bfloat16
    if bits == 32:
        return
    for module in model.modules():
        if isinstance(module, AdaptedLinear) and not isinstance(module.base, FrozenLinear):
            base = module.base.to(device) if device else module.base
            weight = base.weight.t() if module.transposed else base.weight
            module.base = FrozenLinear(weight, base.bias, bits, half)


def merged_weights(
    model: nn.Module, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """Names, as in the model without adapters, and values W + s B A of all weights that have an adapter."""
    for name, layer in adapted_layers(model).items():
        yield f"{name}.weight", layer.merged(gather)


def merge(model: nn.Module) -> list[str]:
    """Make ordinary layers of our adapted ones, in place; the names of the weights that have changed."""
    changed = []
    for name, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            weight, base = adapted_layers(module)[""].merged(), module.base
            if isinstance(base, FrozenLinear):
                bias = base.bias
                base = _Conv1D() if module.transposed else nn.Linear(1, 1)
                base.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
                base.nf = base.out_features = module.lora_B.out_features
                base.nx = base.in_features = module.lora_A.in_features
            base.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
            model.set_submodule(name, base)
            changed.append(f"{name}.weight")
    return changed


def _Conv1D() -> Any:  # noqa: N802
    """GPT-2's linear layer."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D(1, 1)


def without_peft(model: Any, option: str = "model") -> Any:
    """The Hugging Face model inside PEFT's, adapters and all; any other as it is.

    An ``InputError`` where it is adapted in another way than by one plain LoRA.
    """
    if not (settings := getattr(model, "peft_config", None)):
        return model
    wrong = next(filter(None, (_unsupported(each.to_dict()) for each in settings.values())), "")
    if not wrong and len(active := _active(model)) != 1:
        wrong = f"{len(active)} adapters are active, one must be"
    if wrong:
        how = "merge and save it, then load FOLDER: model.merge_and_unload().save_pretrained(FOLDER)"
        raise InputError(f"{option} is a {type(model).__name__}: {wrong}; {how}")
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter's folder as PEFT writes it, its weights not yet read."""

    folder: Path
    config: dict[str, Any]
    ranks: dict[str, int]
    """Of every layer that it changes, by name."""

    @property
    def base(self) -> str:
        """The name of the model that it belongs to."""
        return self.config["base_model_name_or_path"]

    def add_to(self, model: nn.Module, *, empty: bool = False) -> None:
        """Put it beside the layers that it changes, in place; ``empty``: without its values.

        A ``ValueError`` where the model is none that it was made for.
        """
        modules: dict[str, Any] = dict(model.named_modules())
        if strange := [name for name in self.ranks if not hasattr(modules.get(name), "weight")]:
            raise ValueError(f"it changes {strange[0]}, which its base does not have")
        if any(modules[name] is model.get_output_embeddings() for name in self.ranks):  # type: ignore[operator]
            raise ValueError("it changes the vocabulary head, which is not supported")
        for name, rank in self.ranks.items():
            size = math.sqrt(rank) if self.config.get("use_rslora") else rank
            model.set_submodule(name, AdaptedLinear(modules[name], rank, self.config["lora_alpha"] / size).eval())
        model.__dict__[_STORED] = self.config
        if empty:
            return
        with safe_open(self.folder / WEIGHTS, "pt") as tensors, torch.no_grad():
            for key in tensors.keys():  # noqa: SIM118 - not a dictionary
                name, which = _KEY.fullmatch(key).groups()  # type: ignore[union-attr]
                weight, value = model.get_parameter(f"{name}.lora_{which}.weight"), tensors.get_tensor(key)
                if weight.shape != value.shape or not bool(value.isfinite().all()):
                    wrong = "has values that are not finite" if weight.shape == value.shape else "has another shape"
                    raise ValueError(f"{key} {wrong} ({list(value.shape)}, its base needs {list(weight.shape)})")
                weight.copy_(value)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> StoredAdapter:
    """What a folder holds of an adapter; a ``ValueError`` says why it cannot be used."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, named = config["peft_type"], config["base_model_name_or_path"]
    except (KeyError, TypeError, OSError, RecursionError, ValueError):
        raise ValueError(f"{CONFIG} is not readable, or names no base model") from None
    if wrong := _unsupported(config) or ("" if isinstance(named, str) and named else "it names no base model"):
        raise ValueError(wrong)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"it has no {WEIGHTS}")
    ranks = dict[str, set[int]]()
    try:
        with safe_open(folder / WEIGHTS, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dictionary
                found, shape = _KEY.fullmatch(key), tensors.get_slice(key).get_shape()
                if not found or len(shape) != 2:
                    raise ValueError(f"{key} is no weight of a plain {kind}")
                ranks.setdefault(found[1], set()).add(shape[0 if found[2] == "A" else 1])
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{WEIGHTS} is not a whole safetensors file: {first_line(error)}") from None
    if not ranks or any(len(each) != 1 for each in ranks.values()):
        raise ValueError("its two matrices do not belong together")
    return StoredAdapter(folder, config, {name: each.pop() for name, each in ranks.items()})


def _unsupported(config: dict[str, Any]) -> str:
    """What of an adapter's configuration is more than a plain LoRA; empty if nothing."""
    kind = config.get("peft_type")
    if getattr(kind, "value", kind) != "LORA":
        return f"its kind is {getattr(kind, 'value', kind)}, and only LORA is supported"
    for name in ("use_dora", "modules_to_save", "alpha_pattern", "trainable_token_indices", "layer_replication"):
        if config.get(name):
            return f"its {name} is not supported"
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        return "its biases are trained, which is not supported"
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        return f"its init_lora_weights is {config['init_lora_weights']!r}, which changes the base, too"
    alpha = config.get("lora_alpha")
    return "" if isinstance(alpha, int | float) and alpha > 0 else f"its lora_alpha is {alpha!r}"


def write_adapter(folder: Path, model: Any, weights: dict[str, Tensor], base: str) -> None:
    """Write a model's adapter as PEFT does: its configuration and these values of its ``adapter_parameters``."""
    layers, name_of = adapted_layers(model), re.compile(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
    content = {}
    for name, value in weights.items():
        module, which = name_of.fullmatch(name).groups()  # type: ignore[union-attr]
        content[f"base_model.model.{module}.lora_{which}.weight"] = value.detach().to("cpu").contiguous()
    save_file(content, folder / WEIGHTS, {"format": "pt"})
    if peft := getattr(model, "peft_config", None):
        config = peft[_active(model).pop()].to_dict()
    else:
        config = getattr(model, _STORED, None) or _own_config(model, layers)
    named, _, revision = base.partition("@")
    config = config | {"base_model_name_or_path": named, "revision": revision or None, "inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, default=_plain) + "\n", encoding="utf-8")


def _active(model: Any) -> set[str]:
    """The names of the adapters of PEFT that a model computes with."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "lora_A", None), nn.ModuleDict)]
    return {name for layer in layers for name in layer.active_adapters}


def _own_config(model: nn.Module, layers: dict[str, Layer]) -> dict[str, Any]:
    """The configuration of adapters that ``add_adapters`` made."""
    ends = {name.split(".")[-1] for name in layers}
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear or _is_transposed(module)}
    alike = [name for name in linear if name.split(".")[-1] in ends]  # outside the blocks
    (rank,) = {len(layer.a) for layer in layers.values()}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "bias": "none", "target_modules": sorted(layers if alike else ends),
        "fan_in_fan_out": any(layer.transposed for layer in layers.values()),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """What JSON has no form for."""
    return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))
