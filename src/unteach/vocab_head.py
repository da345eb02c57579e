"""Losses and divergences straight from last hidden states, through the LM head in chunks, never the full logits.

The [B,T,V] logits of a batch are the largest tensor of a language-model step. Nothing here needs them: the log-odds of
the label (``losses.py``) and the divergences (``divergences.py``) have closed-form gradients in a row of logits, so
rows are made, used and dropped a chunk at a time, in the forward and in the backward pass.

Shapes: N real tokens, D hidden width, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unteach.divergences import RowFunction, compute_dtype

__all__ = ["Head", "mean_divergence", "token_log_odds"]

CHUNK_LOGITS = 2**24
"""Logits held at once (64 MB in float32): rows per chunk are this divided by V."""


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
        raw = hidden @ self.weight.to(hidden.dtype).T
        raw = raw.to(compute_dtype(raw))
        if self.bias is not None:
            raw = raw + self.bias.to(raw.dtype)
        if self.scale != 1.0:
            raw = raw * self.scale
        return raw if self.cap is None else self.cap * torch.tanh(raw / self.cap)

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Gradient in x Wᵀ + b from the gradient in the logits, both [n,V]; may overwrite ``gradient``."""
        if self.cap is not None:
            gradient = gradient * (1 - (logits / self.cap).square())
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)

    def detached(self) -> Head:
        """The head's present values, copied if they will change under it."""
        bias = None if self.bias is None else self.bias.detach().clone()
        weight = self.weight.detach().clone() if self.weight.requires_grad else self.weight
        return Head(weight=weight, bias=bias, scale=self.scale, cap=self.cap)


def token_log_odds(hidden: Tensor, labels: Tensor, head: Head) -> Tensor:
    """Log-odds of the labels, as ``losses.token_log_odds`` of the logits: all that LL, NPO and NLUL need.

    Args:
        hidden: Last hidden states [N,D] of the positions that predict ``labels``.
        labels: y [N].
        head: The LM head.

    Returns:
        z [N] in float32 or float64, differentiable once in ``hidden`` and the head.
    """
    return _TokenLogOdds.apply(hidden, head.weight, head.bias, labels, head)


def mean_divergence(
    rows: RowFunction, hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher_head: Head
) -> Tensor:
    """Mean over tokens of a divergence's ``rows`` between the two heads' logits.

    Args:
        rows: ``DIVERGENCES[name].rows``.
        hidden: The student's last hidden states [N,D].
        head: The student's LM head.
        teacher_hidden: The teacher's last hidden states [N,D'], a constant.
        teacher_head: The teacher's LM head, a constant; may be ``head`` where the head is not trained.

    Returns:
        A scalar in float32 or float64, differentiable once in ``hidden`` and the student's head.
    """
    return _MeanDivergence.apply(hidden, head.weight, head.bias, rows, head, teacher_hidden.detach(), teacher_head)


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class _Gradients:
    """Gradients in hidden states, weight and bias, added up chunk by chunk from gradients in the logits."""

    def __init__(self, hidden: Tensor, head: Head, needs: tuple[bool, ...]) -> None:
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        dtype = compute_dtype(head.weight)
        self.weight = torch.zeros_like(head.weight, dtype=dtype) if needs[1] else None
        self.bias = torch.zeros_like(head.bias, dtype=dtype) if needs[2] and head.bias is not None else None

    def add(self, chunk: slice, hidden: Tensor, head: Head, gradient: Tensor, logits: Tensor) -> None:
        gradient = head.backward(gradient, logits)
        if self.bias is not None:
            self.bias += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if self.hidden is not None:
            torch.mm(gradient, head.weight.to(hidden.dtype), out=self.hidden[chunk])
        if self.weight is not None:
            self.weight += gradient.T @ hidden[chunk]

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return tuple(None if g is None else g * factor.to(g.dtype) for g in (self.hidden, self.weight, self.bias))  # type: ignore[return-value]


class _TokenLogOdds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight, *([] if bias is None else [bias]), labels)
        ctx.head = head
        log_odds = hidden.new_empty(len(labels), dtype=compute_dtype(hidden))
        for chunk in _chunks(*_sizes(hidden, head)):
            log_odds[chunk] = _log_odds(head.logits(hidden[chunk]), labels[chunk])[0]
        return log_odds

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def]
        hidden, *_, labels = ctx.saved_tensors
        gradients = _Gradients(hidden, ctx.head, ctx.needs_input_grad)
        for chunk in _chunks(*_sizes(hidden, ctx.head)):
            logits = ctx.head.logits(hidden[chunk])
            others = _log_odds(logits.clone() if ctx.head.cap else logits, labels[chunk])[1]
            gradient = others.mul_(-upstream[chunk].unsqueeze(-1))  # upstream · (e_y - softmax_{j≠y})
            gradient.scatter_(-1, labels[chunk].unsqueeze(-1), upstream[chunk].unsqueeze(-1))
            gradients.add(chunk, hidden, ctx.head, gradient, logits)
        return gradients.hidden, gradients.weight, gradients.bias, None, None


class _MeanDivergence(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: RowFunction,
        head: Head,
        teacher_hidden: Tensor,
        teacher_head: Head,
    ) -> Tensor:
        ctx.gradients = _Gradients(hidden, head, ctx.needs_input_grad)
        total = hidden.new_zeros((), dtype=compute_dtype(hidden))
        for chunk in _chunks(*_sizes(hidden, head)):
            logits = head.logits(hidden[chunk])
            value, gradient = rows(logits, teacher_head.logits(teacher_hidden[chunk]).to(logits.dtype))
            total += value.sum()
            if any(ctx.needs_input_grad[:3]):
                ctx.gradients.add(chunk, hidden, head, gradient, logits)
        ctx.tokens = len(hidden)
        return total / ctx.tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def]
        return *ctx.gradients.scaled(upstream / ctx.tokens), None, None, None, None


def _sizes(hidden: Tensor, head: Head) -> tuple[int, int]:
    return len(hidden), head.weight.shape[0]


def _log_odds(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-odds [n] and softmax_{j≠y} [n,V] (zero at y), overwriting ``logits``."""
    index = labels.unsqueeze(-1)
    own = logits.gather(-1, index)
    logits.scatter_(-1, index, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    return (own - peak - total.log()).squeeze(-1), weights.div_(total)
