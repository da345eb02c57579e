"""Weights in few bits: rounded to nearest with a scale for each group of a row, and a frozen linear layer of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unteach.method.vocab_head import product_in_float32

__all__ = ["GROUP", "FrozenLinear", "rounded"]

GROUP = 64
"""Weights of a row that share a scale."""


def _codes(weights: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Whole numbers [rows, groups, group] of at most 2^(bits-1) - 1 and scales [rows, groups, 1] of weights [rows,
    columns]; the last group is filled up with zeros."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % group)).reshape(len(weights), -1, group)
    most = 2 ** (bits - 1) - 1
    scale = padded.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    return (padded / scale).round().clamp(-most, most), scale


def rounded(weights: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """Weights [rows, columns] to the nearest of 2^bits − 1 equidistant values, a scale for each group of a row."""
    codes, scale = _codes(weights, bits, group)
    return (codes * scale).reshape(len(weights), -1)[:, : weights.shape[1]]


class FrozenLinear(nn.Module):
    """y = x Wᵀ + b with a W that is never trained, kept in 4, 8 or 16 bits and made whole where it is used.

    4 and 8 bits: ``rounded``, whose values it computes with exactly. 16: ``half``. It computes in what autocast says,
    else in the input's type; for the backward pass W is made whole again, so no copy outlives a product.

    Args:
        weight: W [out, in].
        bias: b [out], kept as it is.
        bits: 4, 8 or 16.
        half: The type of 16 bits.
    """

    codes: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int, half: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.bits, (self.out_features, self.in_features) = bits, weight.shape
        weight, scale = weight.detach(), None
        if bits == 16:
            codes = weight.to(half)
        else:
            codes, scale = _codes(weight.float(), bits, GROUP)
            codes = codes.to(torch.int8)
        if bits == 4:  # two in a byte
            low, high = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
            codes = low | (high << 4)
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def whole(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [out, in] in a type."""
        return _whole(self.codes, self.scale, self.bits, self.in_features, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        if torch.compiler.is_compiling():
            rows = input.to(dtype).reshape(-1, self.in_features)
            found = _frozen_product(rows, self.codes, self.scale, self.bits, self.in_features, True)
            output = found.view(*input.shape[:-1], self.out_features)
        else:
            output = _FrozenProduct.apply(input, self.codes, self.scale, self.bits, dtype)
        return output if self.bias is None else output + self.bias.to(dtype)


def _whole(codes: Tensor, scale: Tensor | None, bits: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The weights [rows, columns] that codes and scales stand for."""
    if scale is None:
        return codes.to(dtype)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8
    return (codes.to(torch.float32) * scale).to(dtype).reshape(len(codes), -1)[:, :columns]


class _FrozenProduct(torch.autograd.Function):
    """x Wᵀ in a type, where only x has a gradient."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, input: Tensor, codes: Tensor, scale: Tensor | None, bits: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.save_for_forward(codes, scale)
        ctx.how, ctx.given = (bits, input.shape[-1], dtype), input.dtype
        return _product(input.to(dtype), _whole(codes, scale, *ctx.how).t())

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[no-untyped-def]
        codes, scale = ctx.saved_tensors
        return _product(tangent.to(ctx.how[-1]), _whole(codes, scale, *ctx.how).t())

    @staticmethod
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def]
        codes, scale = ctx.saved_tensors
        in_input = _product(upstream.to(ctx.how[-1]), _whole(codes, scale, *ctx.how)).to(ctx.given)
        return in_input, None, None, None, None


@torch.library.custom_op(
    "unteach::frozen_product", mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor? scale, int bits, int columns, bool transposed) -> Tensor",
)  # fmt: skip
def _frozen_product(
    x: Tensor, codes: Tensor, scale: Tensor | None, bits: int, columns: int, transposed: bool
) -> Tensor:
    """x Wᵀ, or x W, as an operator, which compiled code uses: else a compiled block keeps all of W, made whole."""
    matrix = _whole(codes, scale, bits, columns, x.dtype)
    return _product(x, matrix.t() if transposed else matrix)


@_frozen_product.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor | None, bits: int, columns: int, transposed: bool) -> Tensor:
    return x.new_empty(len(x), len(codes) if transposed else columns)


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scale, *ctx.how, ctx.transposed = inputs
    ctx.save_for_backward(codes, scale)


def _frozen_gradient(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    in_x = _frozen_product(upstream, *ctx.saved_tensors, *ctx.how, not ctx.transposed)
    return in_x, None, None, None, None, None


_frozen_product.register_autograd(_frozen_gradient, setup_context=_keep_codes)


def _product(input: Tensor, matrix: Tensor) -> Tensor:
    """``input @ matrix`` of inputs [..., n]; half precision is rounded once at the end, on a CPU too."""
    flat = input.reshape(-1, input.shape[-1])
    with torch.autocast(input.device.type, enabled=False):
        half = input.dtype in (torch.float16, torch.bfloat16)
        found = product_in_float32(flat, matrix).to(input.dtype) if half and not input.is_cuda else flat @ matrix
    return found.view(*input.shape[:-1], matrix.shape[-1])
