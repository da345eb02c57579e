"""Where tensors are, and lists of weights as the optimizers handle them: sharded parts and norms, exchanges, and Triton
kernels for both.

The kernels of the mean teacher's step and exchange read and write every number once. They run where they can; on a CPU,
without Triton, and for tensors that are not contiguous float32, plain PyTorch does the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unteach.errors import InputError

BLOCK = 1024
"""Numbers handled by one program of a kernel."""


def resolved_device(name: str) -> torch.device:
    """The device of that name; auto: a GPU if there is one. An ``InputError`` where there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # no such name, or PyTorch has none of it here
        raise InputError(f"device is {name!r}: it must be auto, cpu, or a device that is here, such as cuda") from None
    return device


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
    kinds: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # type: ignore[attr-defined]
        kinds.setdefault((tensor.device, tensor.dtype, layout), []).append(tensor)

    def norm_in(least: torch.dtype) -> float:
        norms = []
        for (_, dtype, _), same_kind in kinds.items():
            each = torch._foreach_norm(same_kind, 2, dtype=torch.promote_types(dtype, least))
            norm = torch.linalg.vector_norm(torch.stack(list(each)))
            norms.append(float(norm.full_tensor() if is_sharded(norm) else norm))
        return math.hypot(*norms)

    norm = norm_in(torch.float32)
    return norm if math.isfinite(norm) else norm_in(torch.float64)


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


def exchange(first: list[Tensor], second: list[Tensor]) -> None:
    """Exchange the values of two lists of tensors, in place."""
    if is_fusible(first, second):
        _launch(1, (first, second))
        return
    kept = [value.clone() for value in first]
    torch._foreach_copy_(first, second)
    torch._foreach_copy_(second, kept)


def is_fusible(*lists: Sequence[Tensor]) -> bool:
    """Whether the kernels can run on these tensors: contiguous float32 on one CUDA device, and Triton is there."""
    flat = [tensor for tensors in lists for tensor in tensors]
    fit = all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in flat)
    return fit and _kernels() is not None


def fused_step(
    student: list[Tensor], teacher: list[Tensor], momentum: list[Tensor], gradient: list[Tensor],
    lr: float, decay: float, clip_factor: float, damping: float, slide: float,
) -> None:  # fmt: skip
    """``mean_teacher.plain_step`` in one pass: 4 reads and 3 writes of each weight."""
    lists = (student, teacher, momentum, gradient)
    _launch(0, lists, lr, decay, clip_factor, clip_factor * damping, slide)


def _launch(kernel: int, lists: Sequence[Sequence[Tensor]], *numbers: float) -> None:
    """Run a kernel tensor by tensor."""
    kernels: Any = _kernels()
    for tensors in zip(*lists, strict=True):
        count = tensors[0].numel()
        if count:  # a shard may be empty
            with torch.cuda.device_of(tensors[0]):
                kernels[kernel][(-(-count // BLOCK),)](*tensors, count, *numbers, BLOCK=BLOCK)


@functools.cache
def _kernels() -> tuple[Any, Any] | None:
    """The kernels for the step and the exchange, or None where there is no Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None
    globals()["tl"] = tl  # a kernel's source finds its names among the globals of the module

    @triton.jit
    def step_kernel(  # type: ignore[no-untyped-def]
        student, teacher, momentum, gradient, count,
        lr, decay, clip_factor, damping, slide, BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        theta = tl.load(student + place, mask=inside)
        reference = tl.load(teacher + place, mask=inside)
        velocity = tl.load(momentum + place, mask=inside)
        slope = tl.load(gradient + place, mask=inside)
        velocity = decay * velocity + clip_factor * slope + damping * (theta - reference)
        theta = theta - lr * velocity
        tl.store(momentum + place, velocity, mask=inside)
        tl.store(student + place, theta, mask=inside)
        tl.store(teacher + place, reference + slide * (theta - reference), mask=inside)

    @triton.jit
    def exchange_kernel(first, second, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        one, other = tl.load(first + place, mask=inside), tl.load(second + place, mask=inside)
        tl.store(first + place, other, mask=inside)
        tl.store(second + place, one, mask=inside)

    return step_kernel, exchange_kernel
