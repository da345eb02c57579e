"""The mean teacher's step and exchange as Triton kernels: each reads and writes every number once.

``mean_teacher.py`` has the same arithmetic in plain PyTorch and uses it wherever these cannot run: on a CPU, without
Triton, and for tensors that are not contiguous float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["available", "exchange", "step"]

BLOCK = 1024
"""Numbers handled by one program of a kernel."""


def available(*lists: Sequence[Tensor]) -> bool:
    """Whether the kernels can run on these tensors: contiguous float32 on one CUDA device, and Triton is there."""
    return (
        all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for tensors in lists for t in tensors)
        and _kernels() is not None
    )


def step(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    momentum: Sequence[Tensor],
    gradient: Sequence[Tensor],
    *,
    lr: float,
    decay: float,
    clip_factor: float,
    damping: float,
    slide: float,
) -> None:
    """One step of Algorithm 2, in place, tensor by tensor: 4 reads and 3 writes of each weight.

    θ, θ', v and g (not changed) with η ``lr``, μ ``decay``, l ``clip_factor``, λ ``damping`` and l η κ ``slide``, the
    teacher's share of the way to the new student.
    """
    kernels: Any = _kernels()
    for theta, reference, velocity, slope in zip(student, teacher, momentum, gradient, strict=True):
        if not theta.numel():  # a shard may be empty
            continue
        with torch.cuda.device_of(theta):
            kernels[0][(-(-theta.numel() // BLOCK),)](
                theta, reference, velocity, slope, theta.numel(),
                lr, decay, clip_factor, clip_factor * damping, slide, BLOCK=BLOCK,
            )  # fmt: skip


def exchange(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Exchange the values of two lists of tensors, in place and without a copy."""
    kernels: Any = _kernels()
    for one, other in zip(first, second, strict=True):
        if not one.numel():
            continue
        with torch.cuda.device_of(one):
            kernels[1][(-(-one.numel() // BLOCK),)](one, other, one.numel(), BLOCK=BLOCK)


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
