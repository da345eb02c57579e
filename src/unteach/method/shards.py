"""What the optimizers need to know of sharded weights: parts, norms, and gathered copies that must go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["global_norm", "is_sharded", "local_part", "other_weights", "reshard_gathered_modules"]


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a ``DTensor``, of which this rank holds a part."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, sharing its memory: the tensor itself unless it is a ``DTensor``."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def global_norm(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all tensors together, over all ranks for ``DTensor``s.

    Half precision is accumulated in float32. Should float32 overflow (finite entries beyond 1e19), float64 is used.
    """
    if not tensors:
        return 0.0
    norm = _norm_in(None, tensors)
    return norm if math.isfinite(norm) else _norm_in(torch.float64, tensors)


def _norm_in(dtype: torch.dtype | None, tensors: Sequence[Tensor]) -> float:
    """Norm accumulated in ``dtype`` (None: float32, or float64 for float64 tensors)."""
    kinds: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # type: ignore[attr-defined]
        kinds.setdefault((tensor.device, tensor.dtype, layout), []).append(tensor)
    norms = []
    for (_, own_dtype, _), same_kind in kinds.items():
        accumulate = dtype or (torch.float64 if own_dtype == torch.float64 else torch.float32)
        stacked = torch.stack(list(torch._foreach_norm(same_kind, 2, dtype=accumulate)))
        norm = torch.linalg.vector_norm(stacked)
        norms.append(float(norm.full_tensor() if is_sharded(norm) else norm))
    return math.hypot(*norms) if all(map(math.isfinite, norms)) else sum(norms)


def reshard_gathered_modules(parameters: Iterable[Tensor]) -> None:
    """Make FSDP2 modules that still hold gathered copies of these parameters drop them.

    After a forward pass without gradients FSDP2 keeps the root module's parameters gathered (unless it was sharded with
    ``reshard_after_forward=True``). The next forward pass would then silently ignore a change of the sharded values.
    """
    if not any(is_sharded(parameter) for parameter in parameters):
        return
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def other_weights(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Let a module compute with other values of its parameters; on leaving, even by an exception, the own are back."""
    with torch.no_grad():
        reshard_gathered_modules(parameters)
        places = [local_part(p.detach()) for p in parameters]
        own = [place.clone() for place in places]
        torch._foreach_copy_(places, [local_part(value) for value in values])
        try:
            yield
        finally:
            torch._foreach_copy_(places, own)
            reshard_gathered_modules(parameters)
