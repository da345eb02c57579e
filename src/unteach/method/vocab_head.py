"""Losses and divergences straight from last hidden states, through the LM head in chunks, never the full logits.

The [B,T,V] logits of a batch are the largest tensor of a language-model step. Nothing here needs them: the log-odds of
the label (``losses.py``) and the divergences (``divergences.py``) have closed-form gradients in a row of logits, so
rows are made, used and dropped a chunk at a time. Both gradients are taken in the forward pass, so each row is made
once (but for the log-odds through a head that is trained, whose gradient needs the rows again).

Under autocast the products are in half precision and their sums in float32. Gradients in the logits, often far below
what float16 can hold, are multiplied by a power of two before they are rounded, and divided by it after.

Shapes: N real tokens, D hidden width, V vocabulary entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unteach.method.divergences import RowFunction, compute_dtype

__all__ = [
    "Head", "chunks_as_on", "fused_rows", "mean_of_rows", "product_in_float32", "scaled_to", "token_log_odds",
    "unscaled",
]  # fmt: skip

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""Logits held at once (64 and 256 MB in float32), at most: rows per chunk are this divided by V."""
CHUNKS = 16
"""Rows are dealt out to about so many chunks, so that they take a small part of what all logits would."""
CHUNK_ROWS = 64
"""Chunks are not made smaller than this for the sake of their number."""

_fused: ContextVar[bool] = ContextVar("fused", default=False)
_kind: ContextVar[str | None] = ContextVar("kind", default=None)


def fused_rows() -> AbstractContextManager[None]:
    """Inside, what is done with the rows of a chunk is compiled into a few kernels (by ``torch.compile``)."""
    return _during(_fused, True)


def chunks_as_on(kind: str) -> AbstractContextManager[None]:
    """Inside, chunks are as large as on a device of this kind, wherever the tensors are: for rehearsals."""
    return _during(_kind, kind)


@contextmanager
def _during(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The LM head: logits = cap · tanh(scale (x Wᵀ + b) / cap), without the cap for most models."""

    weight: Tensor
    """W [V,D]."""
    bias: Tensor | None = None
    """b [V]."""
    scale: float = 1.0
    """A constant that multiplies the logits (Cohere's ``logit_scale``, one over Granite's ``logits_scaling``)."""
    cap: float | None = None
    """Gemma's ``final_logit_softcapping``."""

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a Hugging Face causal language model."""
        linear, config = model.get_output_embeddings(), model.config
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(weight=linear.weight, bias=getattr(linear, "bias", None), scale=float(scale), cap=cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n,V] of hidden states [n,D], in float32 or float64; the product itself is in ``hidden.dtype``."""
        return self.capped(self.raw(hidden))

    def raw(self, hidden: Tensor) -> Tensor:
        """The same before the cap."""
        raw = product_in_float32(hidden, self.weight.to(hidden.dtype).T)
        if self.bias is not None:
            raw += self.bias.to(raw.dtype)
        if self.scale != 1.0:
            raw *= self.scale
        return raw

    def capped(self, raw: Tensor) -> Tensor:
        """Logits of what they are before the cap."""
        return raw if self.cap is None else self.cap * torch.tanh(raw / self.cap)

    def detached(self) -> Head:
        """The head's present values, copied if they will change under it."""
        trained = {n: t for n in ("weight", "bias") if (t := getattr(self, n)) is not None and t.requires_grad}
        return replace(self, **{name: tensor.detach().clone() for name, tensor in trained.items()})

    def rounded(self, dtype: torch.dtype) -> Head:
        """The same head with its weight in another dtype."""
        return self if self.weight.dtype == dtype else replace(self, weight=self.weight.detach().to(dtype))


def token_log_odds(hidden: Tensor, labels: Tensor, head: Head) -> Tensor:
    """Log-odds z [N] of the labels [N], as ``losses.token_log_odds`` of the logits: all that LL, NPO and NLUL need.

    In float32 or float64, differentiable once in ``hidden``, the last hidden states [N,D], and the head.
    """
    return _TokenLogOdds.apply(hidden, head.weight, head.bias, labels, head)


def mean_of_rows(
    rows: RowFunction, hidden: Tensor, head: Head, other_hidden: Tensor | None = None, other_head: Head | None = None,
    labels: Tensor | None = None, change: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mean over tokens of ``DIVERGENCES[name].rows``, or of ``LOSSES[name].rows`` with their hyper-parameters given.

    Where both models have one and the same head, W (x - x') is added to the other's logits W x' instead of computing
    W x: the difference of two nearly equal rows then carries the rounding of a small number, not of a large.

    Args:
        rows: A function of the student's logits, the labels if there are any, and the other's logits if there are any.
        hidden: The student's last hidden states x [N,D].
        head: The student's.
        other_hidden: The teacher's or the base model's last hidden states x' [N,D'], a constant.
        other_head: Its head, a constant; may be ``head`` where that is not trained.
        labels: y [N].
        change: x - x' [N,D], where it is known better than by subtraction; ``other_hidden`` is then not given, and of a
            head that is trained W - W' is taken first, too.

    Returns:
        A scalar in float32 or float64, differentiable once in ``hidden`` and the student's head.
    """
    other_hidden = None if other_hidden is None else other_hidden.detach()
    if change is not None:
        other_hidden = hidden.detach().to(change.dtype) - change
    return _MeanOfRows.apply(hidden, head.weight, head.bias, rows, head, labels, other_hidden, other_head, change)


def product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices in one dtype; where that is half precision, added up and given in float32."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


def _chunks(hidden: Tensor, head: Head) -> Iterator[slice]:
    tokens, vocabulary = len(hidden), head.weight.shape[0]
    most = CHUNK_LOGITS.get(_kind.get() or hidden.device.type, CHUNK_LOGITS["cpu"]) // vocabulary
    size = max(1, min(most, max(CHUNK_ROWS, -(-tokens // CHUNKS))))
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class _Gradients:
    """Gradients in the inputs ``like`` that ``needs`` names, added up chunk by chunk from gradients in the logits.

    ``hidden`` and the head are in the dtype of the products.
    """

    def __init__(self, hidden: Tensor, head: Head, like: Any, needs: Any) -> None:
        self._hidden, self._head = hidden, head
        dtype = compute_dtype(like[1])
        self.hidden = torch.empty_like(like[0]) if needs[0] else None
        self.weight = torch.zeros_like(like[1], dtype=dtype) if needs[1] else None
        self.bias = torch.zeros_like(like[2], dtype=dtype) if needs[2] and like[2] is not None else None

    def add(self, chunk: slice, gradient: Tensor, factor: Tensor | None) -> None:
        """Add a chunk's share, from the gradient in x Wᵀ + b times ``factor``, as ``scaled_to`` gives them."""
        if self.bias is not None:
            self.bias += unscaled(gradient.sum(0, dtype=self.bias.dtype), factor)
        if self.hidden is not None:
            self.hidden[chunk] = unscaled(product_in_float32(gradient, self._head.weight), factor)
        if self.weight is not None:
            self.weight += unscaled(product_in_float32(gradient.T, self._hidden[chunk]), factor)


class _TokenLogOdds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.head, ctx.dtype, ctx.trained = head, _product_dtype(hidden), any(ctx.needs_input_grad[1:3])
        needs = (ctx.needs_input_grad[0] and not ctx.trained, False, False)
        log_odds, gradients = _log_odds((hidden, weight, bias), labels, head, ctx.dtype, needs)
        ctx.jacobian = gradients.hidden  # ∂z_t/∂x_t [N,D]: all that backward needs where the head is not trained
        return log_odds

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def]
        *inputs, labels = ctx.saved_tensors
        if not ctx.trained:
            return (upstream.unsqueeze(-1) * ctx.jacobian).to(inputs[0].dtype), None, None, None, None
        _, gradients = _log_odds(inputs, labels, ctx.head, ctx.dtype, ctx.needs_input_grad, upstream)
        return gradients.hidden, gradients.weight, gradients.bias, None, None


def _log_odds(
    inputs: Any, labels: Tensor, head: Head, dtype: torch.dtype, needs: Any, upstream: Tensor | None = None
) -> tuple[Tensor, _Gradients]:
    """Log-odds [N] of all chunks, and the gradients of their sum, or of their product with ``upstream`` [N]."""
    hidden, wanted = inputs[0], any(needs[:3])
    log_odds = hidden.new_empty(len(labels), dtype=compute_dtype(hidden))
    with _plain(hidden):
        operand, rounded = hidden.detach().to(dtype), head.rounded(dtype)
        gradients = _Gradients(operand, rounded, inputs, needs)
        for chunk in _chunks(hidden, head):
            weights = None if upstream is None else upstream[chunk].unsqueeze(-1)
            settings = weights, head.scale, head.cap, dtype, wanted
            log_odds[chunk], *gradient = _run(_log_odds_chunk, rounded.logits(operand[chunk]), labels[chunk], *settings)
            if wanted:
                gradients.add(chunk, *gradient)
    return log_odds, gradients


class _MeanOfRows(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: RowFunction, head: Head,
        labels: Tensor | None, other_hidden: Tensor | None, other_head: Head | None, change: Tensor | None,
    ) -> Tensor:  # fmt: skip
        dtype = _product_dtype(hidden)
        with _plain(hidden):
            rounded, operand = head.rounded(dtype), hidden.detach().to(dtype)
            shared = other_head is not None and _same_head(head, other_head)
            other_rounded = rounded if shared or other_head is None else other_head.rounded(dtype)
            gradients = _Gradients(operand, rounded, (hidden, weight, bias), ctx.needs_input_grad)
            total = hidden.new_zeros((), dtype=compute_dtype(hidden))
            moving = None if change is None or other_head is None else _MovingHead(head, other_head, dtype)
            for chunk in _chunks(hidden, head):
                others = [] if labels is None else [labels[chunk]]
                if other_hidden is not None and moving is None:
                    others.append(other_rounded.logits(other_hidden[chunk].to(dtype)))
                if other_hidden is not None and moving is not None and change is not None:
                    logits, other_logits = moving.logits(change[chunk], other_hidden[chunk])
                    others.append(other_logits)
                elif shared and other_hidden is not None:
                    difference = hidden[chunk].to(total.dtype) - other_hidden[chunk].to(total.dtype)
                    moved, factor = scaled_to(difference, dtype)
                    logits = unscaled(product_in_float32(moved, rounded.weight.T), factor)
                    logits = logits.mul_(head.scale).add_(others[-1])
                else:
                    logits = rounded.logits(operand[chunk])
                value, *gradient = _run(_rows_chunk, logits, rows, head.scale, head.cap, dtype, *others)
                total += value
                if any(ctx.needs_input_grad[:3]):
                    gradients.add(chunk, *gradient)
        ctx.gradients, ctx.tokens = (gradients.hidden, gradients.weight, gradients.bias), len(hidden)
        return total / ctx.tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def]
        factor = upstream / ctx.tokens
        scaled = (None if gradient is None else gradient * factor.to(gradient.dtype) for gradient in ctx.gradients)
        return *scaled, None, None, None, None, None, None


class _MovingHead:
    """A head and another model's of the same shape, whose logits differ by little: the difference is computed first."""

    def __init__(self, head: Head, other: Head, dtype: torch.dtype) -> None:
        self._head, self._other = head.rounded(dtype), other.rounded(dtype)
        self._weight = None if head.weight is other.weight else scaled_to((head.weight - other.weight).detach(), dtype)
        same_bias = head.bias is None or other.bias is None or head.bias is other.bias
        self._bias = None if same_bias else (head.bias - other.bias).detach()  # type: ignore[operator]

    def logits(self, change: Tensor, other_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of both [n,V] from x - x' and x' [n,D]: scale (W (x - x') + (W - W') x' + b - b') is their difference
        before the cap."""
        dtype = self._head.weight.dtype
        moved, factor = scaled_to(change, dtype)
        raw = unscaled(product_in_float32(moved, self._head.weight.T), factor)
        if self._weight is not None:
            matrix, factor = self._weight
            raw += unscaled(product_in_float32(other_hidden.to(dtype), matrix.T), factor)
        if self._bias is not None:
            raw += self._bias.to(raw.dtype)
        other_raw = self._other.raw(other_hidden.to(dtype))
        return self._head.capped(raw.mul_(self._head.scale).add_(other_raw)), self._other.capped(other_raw)


def _log_odds_chunk(
    logits: Tensor, labels: Tensor, upstream: Tensor | None, scale: float, cap: float | None, dtype: torch.dtype,
    wanted: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Log-odds [n] of a chunk, and the gradient [n,V] in x Wᵀ + b of ``upstream`` [n,1] (None: 1) times them, rounded.

    Overwrites ``logits``.
    """
    index = labels.unsqueeze(-1)
    given = logits.clone() if cap is not None and wanted else logits
    own = logits.gather(-1, index)
    logits.scatter_(-1, index, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    log_odds = (own - peak - total.log()).squeeze(-1)
    if not wanted:
        return log_odds, None, None
    one = torch.ones_like(total) if upstream is None else upstream.to(total.dtype)
    gradient = weights.mul_(-one / total).scatter_(-1, index, one)  # upstream · (e_y - softmax_{j≠y})
    return log_odds, *scaled_to(_before_cap(gradient, given, scale, cap), dtype)


def _rows_chunk(
    logits: Tensor, rows: RowFunction, scale: float, cap: float | None, dtype: torch.dtype, *others: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum of a row function over a chunk, and the gradient [n,V] of that sum in x Wᵀ + b, rounded."""
    value, gradient = rows(logits, *others)
    return value.sum(), *scaled_to(_before_cap(gradient, logits, scale, cap), dtype)


def _before_cap(gradient: Tensor, logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Gradient in x Wᵀ + b from the gradient in the logits, both [n,V]; may overwrite ``gradient``."""
    if cap is not None:
        gradient = gradient * (1 - (logits / cap).square())
    return gradient if scale == 1.0 else gradient.mul_(scale)


def scaled_to(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Values in ``dtype`` and the power of two that they were multiplied by, which suits float16's narrow range."""
    if dtype != torch.float16:
        return values.to(dtype), None
    largest = values.abs().amax().clamp(min=1e-30)
    factor = torch.exp2(14 - largest.log2().floor())  # the largest becomes 2¹⁴ to 2¹⁵; float16 goes up to 2¹⁶
    return (values * factor).to(dtype), factor


def unscaled(values: Tensor, factor: Tensor | None) -> Tensor:
    """Values divided by the power of two that ``scaled_to`` gave, in place."""
    return values if factor is None else values.div_(factor)


_compiled = functools.cache(torch.compile)


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a chunk function, compiled inside ``fused_rows``, for any number of rows."""
    if not _fused.get():
        return function(*arguments)
    for argument in arguments:
        if isinstance(argument, Tensor):
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    return _compiled(function)(*arguments)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """What the products are computed in: autocast's dtype, or that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _plain(hidden: Tensor) -> Any:
    """No autocast inside: the dtypes are chosen here."""
    return torch.autocast(hidden.device.type, enabled=False)


def _same_head(head: Head, other: Head) -> bool:
    """Whether both give scale (W x + b) with the very same weights, without a cap."""
    return head.weight is other.weight and head.bias is other.bias and head.scale == other.scale and not head.cap
