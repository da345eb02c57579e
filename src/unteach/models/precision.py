"""The precision in which a model computes: by autocast, with linear layers that read weights rounded once per pass.

Autocast rounds a weight whenever a forward pass meets it, and gives its gradient in half precision. Here the weights
are rounded once per pass, whatever the number of micro-batches, and their gradients are summed and kept in float32.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from unteach.method.tensors import is_sharded
from unteach.method.vocab_head import product_in_float32
from unteach.models.distributed import ranks

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def resolved_precision(name: str, device: torch.device) -> str:
    """What ``auto`` stands for: fp16 on CUDA, which rounds like tf32 at twice the speed (docs/scaling.md), or fp32."""
    return name if name != "auto" else "fp16" if device.type == "cuda" else "fp32"


@contextmanager
def precision_of_pass(name: str, device: torch.device) -> Iterator[None]:
    """Compute in a precision: fp32, tf32, fp16, bf16, or auto (see ``resolved_precision``), by autocast if half.

    Sums of float16 products are never rounded to float16 on the way.
    """
    name, settings = resolved_precision(name, device), torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), settings.allow_fp16_reduced_precision_reduction
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        keeps = ranks() == 1  # autocast's rounded copies: of sharded weights they would add up to the whole model
        with torch.autocast(device.type, dtype=HALF[name], cache_enabled=keeps) if name in HALF else nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        settings.allow_fp16_reduced_precision_reduction = before[1]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two half-precision matrices, rounded once at the end."""
    return torch.mm(a, b) if a.is_cuda else product_in_float32(a, b).to(a.dtype)


def rounded_layers(model: Any) -> list[nn.Linear]:
    """The layers whose weights ``half_weights`` rounds: the linear ones of the backbone that are not sharded."""
    return [m for m in model.base_model.modules() if type(m) is nn.Linear and not is_sharded(m.weight)]


@contextmanager
def half_weights(
    model: Any, dtype: torch.dtype, *, once: bool = True, value: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    sums: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Inside, the linear layers of the model's backbone compute in half precision, with weights rounded on entering.

    A change of the weights inside the block is not seen. With ``once`` off, each weight is rounded whenever it is met,
    in the backward pass, too: the same numbers, more work, and no copy of all weights. With ``value``, a function of
    weight and dtype, that is what layers compute with. Gradients of the weights are float32; ``backward`` adds them
    to ``.grad`` itself where there is one already, so use ``backward`` and not ``torch.autograd.grad``. Compiled layers
    do so only with ``sums``, for which every trained weight is given a ``.grad`` on entering. Layers with sharded
    weights, and other operations, are left to autocast, which the caller switches on.
    """
    linears: list[Any] = rounded_layers(model)
    try:
        for linear in linears:
            linear.__class__ = _HalfLinear
            linear.dtype = dtype
            if value is not None:
                linear.rounded = value(linear.weight, dtype)
            else:
                linear.rounded = linear.weight.detach().to(dtype) if once else None
            linear.total = None
            if sums and linear.weight.requires_grad:
                if linear.weight.grad is None:
                    linear.weight.grad = torch.zeros_like(linear.weight)
                linear.total = linear.weight.grad
        yield
    finally:
        _HalfLinear.last = None
        for linear in linears:
            linear.__class__ = nn.Linear
            for name in ("rounded", "dtype", "total"):
                linear.__dict__.pop(name, None)


class _HalfLinear(nn.Linear):
    """A linear layer while its weight is rounded."""

    dtype: torch.dtype
    rounded: Tensor | None
    """None: it is rounded whenever it is met."""
    total: Tensor | None
    """What gradients of the weight are added to; None: ``.grad``, by autograd."""
    last: tuple[weakref.ref[Tensor], int, Tensor] | None = None
    """The last input, its version and its rounded copy, which queries, keys and values share."""

    def forward(self, input: Tensor) -> Tensor:
        dtype, last = self.dtype, _HalfLinear.last
        if input.dtype == dtype or torch.compiler.is_compiling():
            half = input.detach().to(dtype)
        else:
            if last is None or last[0]() is not input or last[1] != input._version or last[2].dtype != dtype:
                last = _HalfLinear.last = weakref.ref(input), input._version, input.detach().to(dtype)
            half = last[2]
        output = _HalfProduct.apply(input, half, self.weight, self.rounded, self.total)
        return output if self.bias is None else (output + self.bias).to(output.dtype)


class _HalfProduct(torch.autograd.Function):
    """x Wᵀ with x [...,D] and W [V,D] rounded to half precision; gradients of the exact ones, that of W in float32."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, input: Tensor, x: Tensor, weight: Tensor, half: Tensor | None, total: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, half)
        ctx.dtype, ctx.total = input.dtype, total  # that one changes until the backward pass
        rows = x.reshape(-1, x.shape[-1])
        found = _times_rounded(rows, weight, True) if half is None else _product(rows, half.t())
        return found.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def]
        x, weight, half = ctx.saved_tensors
        upstream = upstream.reshape(-1, upstream.shape[-1]).to(x.dtype)
        in_x = None
        if ctx.needs_input_grad[0]:
            found = _times_rounded(upstream, weight, False) if half is None else _product(upstream, half)
            in_x = found.view(x.shape).to(ctx.dtype)
            del found
        in_weight = None
        if ctx.needs_input_grad[2]:
            in_weight = _weight_gradient(upstream.t(), x.reshape(-1, x.shape[-1]), weight, ctx.total)
        return in_x, None, in_weight, None, None


def _times_rounded(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """``x @ weight``, or its transpose, with the weight rounded to the type of x."""
    if torch.compiler.is_compiling():
        return _rounded_product(x, weight, transposed)
    half = weight.to(x.dtype)
    return _product(x, half.t() if transposed else half)


@torch.library.custom_op(
    "unteach::rounded_product", mutates_args=(), schema="(Tensor x, Tensor weight, bool transposed) -> Tensor"
)
def _rounded_product(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """``_times_rounded`` as an operator, so that a compiled block keeps the weight for its backward pass.

    Else it keeps the rounded one, too: a copy of all blocks' weights.
    """
    half = weight.to(x.dtype)
    return _product(x, half.t() if transposed else half)


@_rounded_product.register_fake
def _(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(len(x), weight.shape[0 if transposed else 1])


def _weight_gradient(a: Tensor, b: Tensor, weight: Tensor, total: Tensor | None) -> Tensor | None:
    """``a @ b`` in float32, or None after adding it to the gradient that the weight has already, in one pass."""
    if total is not None:
        _add_product(total, a, b)
    elif torch.compiler.is_compiling() or not a.is_cuda or weight.grad is None:
        return product_in_float32(a, b)
    else:
        _add_to(weight.grad, a, b)
    return None


def _add_to(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` of two half-precision matrices to a float32 one, in one pass where the device can."""
    if a.is_cuda and _adds_in_place(a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(product_in_float32(a, b))


@torch.library.custom_op(
    "unteach::add_product", mutates_args=["total"], schema="(Tensor(a!) total, Tensor a, Tensor b) -> ()"
)
def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``_add_to`` as an operator, so that compiled code keeps it so.

    Else a compiled block makes a gradient of its own, which autograd then adds: twice the memory traffic.
    """
    _add_to(total, a, b)


@_add_product.register_fake
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    return None


@functools.cache
def _adds_in_place(dtype: torch.dtype) -> bool:
    """Whether this PyTorch adds a half-precision product to a float32 matrix in place."""
    a = torch.eye(16, dtype=dtype, device="cuda")
    total = torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool(torch.equal(total, torch.ones_like(total) + torch.eye(16, device="cuda")))
