"""Divergences that hold the student to its teacher on general text.

Each divergence is one function of two rows of logits that returns its value *and* its closed-form gradient in the
student's logits, so the full-logit form here and the chunked vocabulary head share a single definition.

Student and teacher are nearly equal networks: early in a run their divergence is 1e-5 and smaller, far below the
rounding error of ``Σ p (log p - log q)`` in float32. All rows are therefore computed from the *centred difference* of
the logits, ``d - E d`` with ``d = h - h'``, in which the large common part cancels before anything is rounded.

Shapes: B sequences, T positions, V vocabulary entries, N real tokens (the True entries of the mask).
Symbols: h ``logits`` (student), h' ``teacher_logits``, p = softmax(h), q = softmax(h'), S(h) = Diag(p) - p pᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DIVERGENCES", "HOLDS", "NLL", "Divergence", "divergence", "entropy_rows", "mean_over_rows"]

RowFunction = Callable[..., tuple[Tensor, Tensor]]
"""``(h [N,V], others...) -> (value [N], gradient in h [N,V])``; what the others are is up to who calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """One registered divergence."""

    name: str
    equation: str
    """The definition, for a token, as printed in docs and ``--help``."""
    rows: RowFunction
    """``(h [N,V], h' [N,V]) -> (value [N], gradient in h [N,V])``, float32 or float64."""
    needs_base: bool = False
    """Always False: the teacher is an argument of its own."""

    def function(self, logits: Tensor, teacher_logits: Tensor, mask: Tensor) -> Tensor:
        """The mean over real tokens, see ``divergence``."""
        check_logits(logits, mask, teacher_logits=teacher_logits)
        return mean_over_rows(self.rows, logits[mask], teacher_logits[mask])


DIVERGENCES: dict[str, Divergence] = {}


def _register(name: str, equation: str) -> Callable[[RowFunction], RowFunction]:
    def add(rows: RowFunction) -> RowFunction:
        DIVERGENCES[name] = Divergence(name=name, equation=equation, rows=rows)
        return rows

    return add


def divergence(name: str, logits: Tensor, teacher_logits: Tensor, mask: Tensor) -> Tensor:
    """Mean divergence of the student from the teacher over the real tokens of a batch, Eq. (4) of the paper.

    Args:
        name: ``kl``, ``kl_reverse``, ``qkl``, ``qkl_frozen`` or ``js``, the keys of ``DIVERGENCES``.
        logits: h, the student's [B,T,V].
        teacher_logits: h', the teacher's [B,T,V]; treated as a constant.
        mask: True at real tokens [B,T]; all other positions are never read.

    The scalar is in float32 (float64 for float64 logits) and differentiable once in ``logits``.

    Differs from the authors' code: the mean runs over real tokens only; theirs divides by all positions, padding
    included.
    """
    if name not in DIVERGENCES:
        raise ValueError(f"unknown divergence {name!r}: choose one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name].function(logits, teacher_logits, mask)


@_register("kl", "KL(p ‖ q) = Σ_j p_j (log p_j - log q_j)")
def kl_rows(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(student ‖ teacher), Eq. (4) of the paper.

    Its gradient p ⊙ (log p - log q - KL) equals S(h)(h - h') = p ⊙ (d - E_p d).

    Differs from the authors' code: they run ``kl_reverse``; both have the same local quadratic.
    """
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    deviation = _centred(student - teacher, log_p)
    return _relative_entropy(log_p, log_q, deviation), log_p.exp_().mul_(deviation)


@_register("kl_reverse", "KL(q ‖ p) = Σ_j q_j (log q_j - log p_j)")
def kl_reverse_rows(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher ‖ student), the direction of the authors' runs.

    It is the Bregman divergence of log-sum-exp in the logits. Gradient: p - q, written as q (exp(u) - 1) with
    u = log p - log q = (d - E_q d) - KL where p and q are close.
    """
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    deviation = _centred(teacher - student, log_q)
    value = _relative_entropy(log_q, log_p, deviation)
    log_ratio = deviation.neg_().sub_(value.unsqueeze(-1))
    q = log_q.exp_()
    return value, torch.where(log_ratio.abs() < 0.5, q * log_ratio.expm1(), log_p.exp_() - q)


@_register("qkl", "QKL(h, h') = (h-h')ᵀ S(h) (h-h') = Var_p(d)")
def qkl_rows(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Quadratic KL as printed in Eq. (8): S at the student, no factor ½, so locally *twice* the KL quadratic.

    Gradient: p ⊙ [2 (d-m) + (d-m)² - Var_p d] with m = E_p d. Not a divergence globally: a student that becomes
    certain of any token brings S(h), and with it the penalty, to zero.

    Differs from the authors' code: they run ``qkl_frozen``.
    """
    deviation = _centred(student - teacher, student)
    p = student.softmax(-1)
    value = (p * deviation * deviation).sum(-1)
    return value, (2 * deviation + deviation * deviation - value.unsqueeze(-1)).mul_(p)


@_register("qkl_frozen", "½ (h-h')ᵀ S(h') (h-h') = ½ Var_q(d)")
def qkl_frozen_rows(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Quadratic KL with S at the teacher, held constant: the form of the authors' runs.

    Convex in h with gradient S(h')(h - h') = q ⊙ (d - E_q d).

    Differs from the authors' code: they log the value without the ½ of which they take the gradient.
    """
    deviation = _centred(student - teacher, teacher)
    gradient = teacher.softmax(-1).mul_(deviation)
    return 0.5 * (gradient * deviation).sum(-1), gradient


@_register("js", "JS(p ‖ q) = ½ KL(p ‖ m) + ½ KL(q ‖ m),  m = ½ (p + q)")
def js_rows(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Jensen–Shannon, which holds JensUn (``method/field/jensun.py``); bounded by log 2, locally a quarter of KL.

    With r = log p - log q and t = tanh(r/2), p = m (1 + t) and q = m (1 - t): the value is the sum of the positive
    ½ m [(1+t) log(1+t) + (1-t) log(1-t)]. Gradient: ½ p ⊙ (a - E_p a), a = log(p/m) = log(1 + t).
    """
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    deviation = _centred(student - teacher, log_p)
    log_ratio = deviation + _relative_entropy(log_p, log_q, deviation).unsqueeze(-1)
    t = torch.tanh(log_ratio / 2)
    squared, near = t * t, log_ratio.abs() < 0.5
    terms = 12 if t.dtype == torch.float64 else 6  # Σ_k t^2k / (2k (2k - 1)), of which tanh(¼)^26 is rounding
    series = torch.zeros_like(t)
    for k in range(terms, 0, -1):
        series = (series + 1 / (2 * k * (2 * k - 1))) * squared
    above, below = (math.log(2) - torch.nn.functional.softplus(-x) for x in (log_ratio, -log_ratio))  # log(1 ± t)
    p, q = log_p.exp(), log_q.exp()
    far = 0.5 * (p * above + q * below)
    value = torch.where(near, 0.5 * (p + q) * series, far).sum(-1)
    return value, 0.5 * p * _centred(torch.where(near, t.clamp(-0.5, 0.5).log1p(), above), log_p)


NLL = "nll"
"""Held by its own likelihood instead: -log p_y of held text, and no teacher. With the loss ``ll`` that is gradient
difference (GradDiff: Liu et al., "Continual learning and private unlearning", 2022)."""
HOLDS = (*DIVERGENCES, NLL)
"""What held text can be held by."""


def entropy_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy of softmax(h) [N], exact even where one entry is almost certain, and its gradient -p ⊙ (h - E_p h) [N,V].

    Relative to the largest logit, at a = 0, H = E_p(-a) + log(1 + Σ_{others} eᵃ) has only positive terms. Entries may
    be -∞.
    """
    peak, mode = logits.max(-1, keepdim=True)
    below = logits - peak
    weights = below.exp()
    others = weights.scatter(-1, mode, 0.0).sum(-1, keepdim=True)
    p = weights / (1 + others)
    below = below.masked_fill(below == -torch.inf, 0.0)
    mean = (p * below).sum(-1, keepdim=True)
    return (others.log1p() - mean).squeeze(-1), p * (mean - below)


def mean_over_rows(rows: RowFunction, logits: Tensor, *others: Tensor) -> Tensor:
    """Mean of a row function over its rows of ``logits`` [N,V], with its gradient; the others are constants."""
    return _MeanOverRows.apply(rows, logits, *(other.detach() for other in others))


class _MeanOverRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: RowFunction, student: Tensor, *others: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        dtype = compute_dtype(student, *others)
        value, gradient = rows(student.to(dtype), *(x.to(dtype) if x.is_floating_point() else x for x in others))
        ctx.dtype, ctx.others = student.dtype, len(others)
        ctx.save_for_backward(gradient)
        return value.mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        largest = torch.finfo(ctx.dtype).max  # QKL's gradient can pass float16's range: saturate, never infinity
        gradient = (gradient * (upstream / gradient.shape[0])).clamp_(-largest, largest)
        return None, gradient.to(ctx.dtype), *[None] * ctx.others


def _centred(difference: Tensor, log_weights: Tensor) -> Tensor:
    """``difference - E[difference]`` under softmax(log_weights), exact even where one weight is almost 1.

    Shifting by the difference at the likeliest entry first makes that entry's deviation minus the mean of the
    others, instead of a rounded zero.
    """
    mode = log_weights.argmax(-1, keepdim=True)
    shifted = difference - difference.gather(-1, mode)
    return shifted.sub_((log_weights.softmax(-1) * shifted).sum(-1, keepdim=True))


def _relative_entropy(log_p: Tensor, log_q: Tensor, deviation: Tensor) -> Tensor:
    """KL(p ‖ q) [N] from log-probabilities and the deviation x = (log p - log q) - KL, all [N,V].

    Far apart, the sum of p (log p - log q) is exact enough. Close together it cancels, and the identity
    KL = log E_p exp(-x) = log(1 + E_p[exp(-x) - 1 + x]), valid since E_p x = 0, has only positive terms.
    """
    p = log_p.exp()
    direct = (p * (log_p - log_q)).sum(-1)
    far = log_q.exp() * direct.clamp(max=1.0).exp().unsqueeze(-1) - p + p * deviation  # p exp(-x) = q exp(KL)
    excess = torch.where(deviation.abs() < 1.0, p * _exp_minus_tangent(-deviation), far).sum(-1)
    return torch.where(direct < 0.5, excess.log1p(), direct)


def _exp_minus_tangent(x: Tensor) -> Tensor:
    """``exp(x) - 1 - x`` without cancellation, for |x| ≤ 1: a Taylor polynomial near zero, expm1 elsewhere."""
    degree = 13 if x.dtype == torch.float64 else 7
    series = torch.full_like(x, 1 / math.factorial(degree))
    for power in range(degree - 1, 1, -1):
        series.mul_(x).add_(1 / math.factorial(power))
    return torch.where(x.abs() < 0.25, series.mul_(x).mul_(x), x.expm1() - x)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is, else float32: half precision is never computed in."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def check_logits(logits: Tensor, mask: Tensor, **others: Tensor) -> None:
    """Raise a ``ValueError`` that says what to change unless ``logits`` [B,T,V], ``mask`` [B,T] and the others fit."""
    if logits.dim() != 3 or not logits.is_floating_point():
        given = f"logits has shape {list(logits.shape)} and dtype {logits.dtype}"
        raise ValueError(f"{given}: give floating-point [batch, time, vocabulary]")
    if logits.shape[-1] < 2:
        raise ValueError(f"logits has a vocabulary of {logits.shape[-1]}: at least 2 entries are needed")
    if mask.shape != logits.shape[:2]:
        raise ValueError(f"mask has shape {list(mask.shape)}: it must be {list(logits.shape[:2])}, as logits[:, :, 0]")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}: it must be torch.bool (use mask.bool())")
    if not mask.any():
        raise ValueError("mask has no True entry: the batch holds no real token; leave empty batches out")
    for name, other in others.items():
        if other.shape != logits.shape or not other.is_floating_point():
            wanted = f"floating-point {list(logits.shape)}, as logits (same tokens, same vocabulary)"
            raise ValueError(f"{name} has shape {list(other.shape)} and dtype {other.dtype}: it must be {wanted}")
