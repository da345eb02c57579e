"""How a model's outputs move while its weights move along a way: forward-mode differentiation, in any precision.

Two nearly equal networks differ by less than half precision can hold beside their outputs. The derivative of the
outputs along the way from one to the other is that difference by itself: it is carried through the layers next to the
activations and rounded as a number of its own size.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from unteach.method.tensors import global_norm
from unteach.method.vocab_head import product_in_float32, scaled_to, unscaled

__all__ = ["MIDDLE", "moving_weights", "value_and_change"]

MIDDLE = 0.5
"""Where on the way the derivative is taken: from its middle it misses the difference by the cube of the way's length,
from either end by the square."""


@contextmanager
def moving_weights(
    model: Any, parameters: Sequence[Tensor], way: Sequence[Tensor], dtype: torch.dtype | None = None,
    back: float = MIDDLE,
) -> Iterator[float]:  # fmt: skip
    """Inside, what the backbone computes carries its derivative along the way, without gradients.

    ``value_and_change`` gives the change of an output from θ - u to θ. Attention is computed in the plain way,
    which alone can be differentiated forward, and experts one after the other.

    Args:
        model: A Hugging Face causal language model, its parameters at θ.
        parameters: Those that moved.
        way: u, by how much they did.
        dtype: Half precision for the linear layers; None: as the weights are.
        back: The derivative is taken at θ - back · u.

    Yields:
        The power of two by which the way is multiplied, so that float16 can hold what comes of it.
    """
    _learn_derivatives()
    length = global_norm(way)
    factor = 2.0 ** -math.floor(math.log2(length)) if length else 1.0
    ways = {id(parameter): u for parameter, u in zip(parameters, way, strict=True)}
    made: dict[int, Tensor] = {}
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    linears: list[Any] = []
    with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH), _plain_experts(model):
        try:
            for module in model.base_model.modules():
                half = dtype is not None and type(module) is nn.Linear
                if half:
                    linears.append(module)
                    _round(module, dtype, ways.get(id(module.weight)), factor, back)
                for name, parameter in list(module._parameters.items()):
                    if id(parameter) in ways and not (half and name == "weight"):
                        u, value = ways[id(parameter)], parameter.detach()
                        if id(parameter) not in made:
                            made[id(parameter)] = forward_ad.make_dual(value.sub(u, alpha=back), u * factor)
                        replaced.append((module, name, parameter))
                        module._parameters[name] = made[id(parameter)]
            yield factor
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter  # type: ignore[assignment]
            for linear in linears:
                linear.__class__ = nn.Linear
                for name in ("rounded", "moved"):
                    linear.__dict__.pop(name, None)


def value_and_change(output: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """An output, and by how much it changes on the way, in float32 or float64."""
    value, tangent = forward_ad.unpack_dual(output)
    least = torch.promote_types(value.dtype, torch.float32)
    return value, value.new_zeros(value.shape, dtype=least) if tangent is None else tangent.to(least) / factor


def _round(linear: Any, dtype: torch.dtype | None, u: Tensor | None, factor: float, back: float) -> None:
    """Let a linear layer compute with its weight and the weight's way, each rounded by itself."""
    weight = linear.weight.detach()
    linear.__class__ = _MovingLinear
    linear.rounded = (weight if u is None else weight.sub(u, alpha=back)).to(dtype)
    linear.moved = None if u is None else scaled_to(u * factor, linear.rounded.dtype)


class _MovingLinear(nn.Linear):
    """A half-precision linear layer y = W x + b, and ẏ = W ẋ + Ẇ x + ḃ: sums in float32, rounded once at the end."""

    rounded: Tensor
    moved: tuple[Tensor, Tensor | None] | None
    """Ẇ, and the power of two that it was multiplied by."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return self._forward(input)

    def _forward(self, input: Tensor) -> Tensor:
        x, tangent = forward_ad.unpack_dual(input)
        dtype = self.rounded.dtype
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        result = product_in_float32(flat, self.rounded.t()).to(dtype).view(*x.shape[:-1], -1)
        products = [] if self.moved is None else [(flat, *self.moved)]
        if tangent is not None:
            moved, factor = scaled_to(tangent.reshape(flat.shape).float(), dtype)
            products.append((moved, self.rounded, factor))
        if products:
            changes = [unscaled(product_in_float32(a, b.t()), factor) for a, b, factor in products]
            change = functools.reduce(torch.add, changes).to(dtype)
            result = forward_ad.make_dual(result, change.view(result.shape))
        return result if self.bias is None else (result + self.bias).to(dtype)


@functools.cache
def _learn_derivatives() -> None:
    """Let PyTorch make its forward derivatives, which warns that its own way of doing so is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


@contextmanager
def _plain_experts(model: Any) -> Iterator[None]:
    """Inside, a mixture's experts are computed by plain products, not by grouped ones, which have no derivative."""
    config = model.base_model.config
    before = getattr(config, "_experts_implementation", None)
    try:
        config._experts_implementation = "eager" if before else before
        yield
    finally:
        config._experts_implementation = before
