"""Forget losses: what pulls the student away from the documents it must forget. All are minimised.

LL, NPO and NLUL see the logits of a token only through its *log-odds* z = log p_y/(1-p_y) = h_y - logsumexp_{j≠y} h_j:
log p_y = log σ(z) and log(1 - p_y) = log σ(-z). Written so, both are exact in float32 whether p_y is 1e-30 or so close
to 1 that 1 - p_y rounds to zero, and so are their gradients; nothing overflows and no tolerance is needed.

To add a loss, write one function here with its definition in the docstring, decorate it with ``register``, and give it
a hand-computed case in ``tests/method/test_losses.py`` (a test fails without one). Names, help, configuration checks,
the command and the tests that run over all losses follow from the registry.

Shapes: B sequences, T positions, V vocabulary entries, N real tokens (the True entries of the mask).
Symbols: h ``logits``, y ``labels``, p = softmax(h), π_base given by ``base_logits``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method import divergences
from unteach.method.divergences import RowFunction, check_logits, compute_dtype, mean_over_rows

__all__ = ["LOSSES", "ForgetLoss", "forget_loss", "register", "token_log_odds"]

Reads = Literal["log_odds", "logits", "hidden"]
Base = Literal["initial", "given"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetLoss:
    """One registered forget loss; ``register`` says what its parts are."""

    name: str
    equation: str
    function: Callable[..., Tensor]
    """To a scalar, from full logits or from hidden states."""
    reads: Reads
    base: Base | None
    rows: RowFunction | None = None
    """``reads="logits"``: ``(logits [N,V], labels [N], [base_logits [N,V],] **hyper) -> (value, gradient)``."""

    @property
    def needs_base(self) -> bool:
        """Whether ``base_logits`` (or ``base_hidden``) must be given."""
        return self.base is not None

    @property
    def hyper(self) -> dict[str, Any]:
        """Hyper-parameters and their defaults, read from the signature."""
        parameters = inspect.signature(self.rows or self.function).parameters.values()
        given = ("base_logits", "base_hidden")
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}

    def unknown(self, hyper: Iterable[str]) -> list[str]:
        """A line for each name that is no hyper-parameter of this loss."""
        known = self.hyper
        line = f"forget loss {self.name!r} has no hyper-parameter {{!r}}: allowed are {', '.join(known) or 'none'}"
        return [line.format(name) for name in hyper if name not in known]

    def problems(self, hyper: Mapping[str, Any]) -> list[str]:
        """What is wrong with hyper-parameters, one line each; the loss itself is asked, with two tokens of three."""
        wrong = self.unknown(hyper)
        for name, default in self.hyper.items():
            kind = (int, float) if isinstance(default, float) else type(default)
            if name in hyper and default is not inspect.Parameter.empty and not isinstance(hyper[name], kind):
                wrong.append(f"{name} is {hyper[name]!r}: it must be of the kind of {default!r}")
            elif name not in hyper and default is inspect.Parameter.empty:
                wrong.append(f"{name} is missing: forget loss {self.name!r} needs it")
        if wrong:
            return wrong
        seen = [torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), torch.ones(1, 2).bool()]
        seen = [seen[0][0]] if self.reads == "hidden" else seen
        base = {"base_hidden" if self.reads == "hidden" else "base_logits": seen[0]} if self.base else {}
        try:
            self.function(*seen, **base, **hyper)
        except ValueError as error:
            wrong.append(str(error))
        return wrong


LOSSES: dict[str, ForgetLoss] = {}


def register(
    name: str, equation: str, *, reads: Reads = "log_odds", base: Base | None = None, closed_form: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the decorated function to ``LOSSES``: ``unteach forget --loss NAME --loss-options KEY=VALUE`` then runs it.

    Args:
        name: In the registry, the configuration and the command line.
        equation: The definition as printed in docs and ``--help``.
        reads: ``"log_odds"``: ``function(logits, labels, mask, *, [base_logits,] **hyper)`` that depends on logits
            through the labels' log-odds alone; it may look at whole sequences. ``"logits"``: a row function
            ``function(logits [N,V], labels [N], [base_logits [N,V],] *, **hyper)`` that returns the loss of each token
            [N]; the loss is its mean over tokens, computed in chunks. ``"hidden"``: ``function(hidden [N,D], *,
            [base_hidden [N,D],] layer, **hyper)`` of the hidden states behind the decoder block number ``layer``.
        base: Which other model's log-odds, logits or hidden states it needs: those of the model before unlearning
            (``"initial"``), of one that is given with ``--base`` (``"given"``), or of none.
        closed_form: The row function returns a pair, the loss of each token and its gradient in the logits [N,V]:
            faster than autograd, and exact where that is not.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        rows = None if reads != "logits" else function if closed_form else _with_gradient(function)
        whole = function if rows is None else functools.partial(_mean_loss, rows)
        LOSSES[name] = ForgetLoss(name=name, equation=equation, function=whole, reads=reads, base=base, rows=rows)
        return function

    return add


def _with_gradient(values: Callable[..., Tensor]) -> RowFunction:
    """The row function that gives the gradient too, by autograd."""

    @functools.wraps(values)
    def rows(logits: Tensor, *others: Tensor, **hyper: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            found = values(leaf, *others, **hyper)
            (gradient,) = torch.autograd.grad(found.sum(), leaf)
        return found.detach(), gradient

    return torch.compiler.disable(rows)


def _mean_loss(
    rows: RowFunction, logits: Tensor, labels: Tensor, mask: Tensor, base_logits: Tensor | None = None, **hyper: Any
) -> Tensor:
    others = [labels[mask]] if base_logits is None else [labels[mask], base_logits[mask]]
    return mean_over_rows(functools.partial(rows, **hyper), logits[mask], *others)


def forget_loss(
    name: str, logits: Tensor, labels: Tensor, mask: Tensor, *, base_logits: Tensor | None = None, **hyper: Any
) -> Tensor:
    """A forget loss of a batch, to be minimised: Eq. (2) of the paper, a mean over its real tokens.

    Args:
        name: ``ll``, ``npo``, ``it``, ``it_forward``, ``nlul`` or ``match``, the keys of ``LOSSES``.
        logits: h [B,T,V], already aligned with ``labels``: row t predicts label t.
        labels: y, the tokens to forget [B,T].
        mask: True at real tokens [B,T]; all other positions are never read, whatever they hold.
        base_logits: Logits of the fixed model that all but ``ll`` and ``nlul`` compare with [B,T,V], a constant.
        **hyper: Keyword arguments of the loss, e.g. ``beta`` and ``ratio`` of ``npo``.

    Returns:
        A scalar in float32 (float64 for float64 logits), differentiable in ``logits``.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown forget loss {name!r}: choose one of {', '.join(LOSSES)}")
    loss = LOSSES[name]
    for unknown in loss.unknown(hyper):
        raise ValueError(unknown)
    if loss.reads == "hidden":
        raise ValueError(f"forget loss {name!r} reads hidden states: call LOSSES[{name!r}].function with them")
    if loss.needs_base and base_logits is None:
        raise ValueError(f"forget loss {name!r} needs base_logits: pass the fixed model's logits for the same tokens")
    base = {"base_logits": base_logits} if loss.needs_base and base_logits is not None else {}
    check_logits(logits, mask, **base)
    _check_labels(labels, mask, logits.shape[-1])
    return loss.function(logits, labels, mask, **base, **hyper)


@register("ll", "mean_t log p_y")
def ll(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Log-likelihood ("gradient ascent"): ℓ_LL(h; y) = log p_y.

    Its gradient (1 - p_y)(e_y - softmax_{j≠y}) vanishes where the text is memorised (p_y → 1) and never fades as
    p_y → 0, where the loss runs to -∞.
    """
    return logsigmoid(token_log_odds(logits[mask], labels[mask])).mean()


@register("npo", "Σ_s -(2/β) log σ(-β R_s) / Σ_s |s|,  R_s = Σ_t log p_y - log π_base(y)", base="initial")
def npo(
    logits: Tensor, labels: Tensor, mask: Tensor, *, base_logits: Tensor, beta: float = 0.1, ratio: str = "sum"
) -> Tensor:
    """Negative preference optimization: ℓ_NPO(s) = -(2/β) log σ(-β log π(s)/π_base(s)) for a sequence s.

    Summed over sequences and divided by the number of real tokens, so that its gradient is a token mean of
    w_s ∇ℓ_LL with w_s = 2 π^β / (π^β + π_base^β), which is 1 at the start, as for the other losses. π_base is the
    model before unlearning. A larger β fades out sooner as π(s) falls.

    ``ratio="sum"``: R_s is the log-ratio of the whole sequence, the paper's formula. ``"mean"``: R_s/|s| in its place
    and |s| in front, -(2/β) |s| log σ(-β R_s/|s|), which leaves w_s near 1, close to LL.

    Differs from the authors' code: they take ``ratio="mean"`` over the padded length; here it is over real tokens. The
    gradient displayed in the paper lacks the factor 2 that the loss gives.
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be positive")
    if ratio not in ("sum", "mean"):
        raise ValueError(f"ratio is {ratio!r}: it must be 'sum' or 'mean'")
    odds, base_odds = (token_log_odds(h[mask], labels[mask]) for h in (logits, base_logits.detach()))
    difference, lengths = logsigmoid(odds) - logsigmoid(base_odds), mask.sum(1)
    log_ratio = difference.new_zeros(len(mask)).index_add(0, mask.nonzero()[:, 0], difference)
    log_ratio, lengths = log_ratio[lengths > 0], lengths[lengths > 0].to(log_ratio.dtype)
    if ratio == "sum":
        loss = -(2 / beta) * logsigmoid(-beta * log_ratio)
    else:
        loss = -(2 / beta) * lengths * logsigmoid(-beta * log_ratio / lengths)
    return loss.sum() / lengths.sum()


@register("it", "mean_t KL(p ‖ p_base)", reads="logits", base="given", closed_form=True)
def it(logits: Tensor, labels: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Incompetent teacher: ℓ_IT(h; y) = KL(softmax(h) ‖ softmax(h_it)).

    ``base_logits`` are h_it, the logits of a smaller model that never memorised the text; ``labels`` are not used. All
    equal, they are the uniform teacher of the "mismatch" loss.
    """
    return divergences.kl_rows(logits, base_logits)


@register("it_forward", "mean_t KL(p_base ‖ p)", reads="logits", base="given", closed_form=True)
def it_forward(logits: Tensor, labels: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Incompetent teacher, the mass-covering direction: KL(softmax(h_base) ‖ softmax(h)), gradient p - p_base.

    Where the text is memorised (p_y → 1) ``it`` has no gradient left, this one still has its whole length.
    """
    return divergences.kl_reverse_rows(logits, base_logits)


@register("nlul", "mean_t -log(1 - p_y)")
def nlul(logits: Tensor, labels: Tensor, mask: Tensor, *, tolerance: float = 0.0) -> Tensor:
    """Negative log-unlikelihood: ℓ_NLUL(h; y) = -log(1 - p_y), the paper's loss.

    Its gradient p_y (e_y - softmax_{j≠y}) is largest where the text is memorised, fades out as p_y → 0 and never
    exceeds √2 p_y in norm. With a ``tolerance`` above 0, the authors' surrogate p_y/(1 + tolerance - p_y) · log p_y
    with the weight held constant, whose gradient is that of -log(1 + tolerance - p_y): it vanishes again within
    ``tolerance`` of p_y = 1.

    Differs from the authors' code: they always use the surrogate, with tolerance 0.02.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}: it must be zero or positive")
    log_odds = token_log_odds(logits[mask], labels[mask])
    if tolerance == 0:
        return -logsigmoid(-log_odds).mean()
    weight = log_odds.sigmoid() / ((-log_odds).sigmoid() + tolerance)
    return (weight.detach() * logsigmoid(log_odds)).mean()


@register("match", "mean_t φ(z - z_base) + KL(p_base ‖ p)", reads="logits", base="given", closed_form=True)
def match(
    logits: Tensor, labels: Tensor, base_logits: Tensor, *, pull: str = "softplus", margin: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Pull towards a model that never saw the text, p_base: ℓ(h; y) = φ(z - z_base - margin) + KL(p_base ‖ p).

    z is the label's log-odds. The first term is NLUL with a reference: -log(1 - p_y) = softplus(z) is the same with
    z_base = 0. Its gradient σ(z - z_base) (e_y - softmax_{j≠y}) is about 1 as long as the token is likelier than the
    reference says, at p_y → 1 *and* at p_y → 0, where NLUL's own (p_y) has vanished: names and numbers are pushed down
    to what a model gives them that never saw them. The second term, gradient p - p_base, keeps the text fluent.

    ``pull`` is φ: ``"softplus"``, log(1 + eˣ), whose pull at parity is still ½, so that its minimum lies below the
    reference; ``"gate"``, max(0, x), whose pull ends there at once; ``"parity"``, √(1 + x²) - 1, whose pull x/√(1 + x²)
    fades out there and turns back what has gone too far. It goes only down to ``margin`` nats of log-odds above the
    reference.
    """
    if pull not in ("softplus", "gate", "parity"):
        raise ValueError(f"pull is {pull!r}: it must be 'softplus', 'gate' or 'parity'")
    (own, others), (base_own, base_others) = (_log_odds_parts(h, labels) for h in (logits, base_logits))
    weights = others.exp()
    total = weights.sum(-1, keepdim=True)
    log_ratio = total.squeeze(-1).log() - base_others.exp().sum(-1).log()
    excess = (own - base_own) - log_ratio - margin  # z - z_base, without rounding either where both are large
    value, gradient = divergences.kl_reverse_rows(logits, base_logits)
    if pull == "softplus":
        value, strength = value - logsigmoid(-excess), excess.sigmoid()
    elif pull == "gate":
        value, strength = value + excess.clamp(min=0.0), (excess > 0).to(logits.dtype)
    else:
        root = torch.hypot(excess, torch.ones_like(excess))
        value, strength = value + excess * (excess / (root + 1)), excess / root  # √(1 + x²) - 1 without cancellation
    strength = strength.unsqueeze(-1)
    gradient = gradient - weights.mul_(strength / total)
    return value, gradient.scatter_add(-1, labels.unsqueeze(-1), strength)


def token_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-odds of the label, z = h_y - logsumexp_{j≠y} h_j [N], of rows of logits [N,V] and labels [N].

    Gradient: e_y - softmax_{j≠y}. All is computed relative to the largest other logit, a constant that cancels, so that
    value and gradient are as exact at logits of 1e4 as at logits of 1.
    """
    own, others = _log_odds_parts(logits.to(compute_dtype(logits)), labels)
    return own - others.exp().sum(-1).log()


def _log_odds_parts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The label's logit [N] and the others [N,V] (-∞ at the label), both relative to the largest of the others."""
    index = labels.unsqueeze(-1)
    others = logits.scatter(-1, index, -torch.inf)
    peak = others.detach().amax(-1, keepdim=True)
    return (logits.gather(-1, index) - peak).squeeze(-1), others - peak


def _check_labels(labels: Tensor, mask: Tensor, vocabulary: int) -> None:
    if labels.shape != mask.shape:
        raise ValueError(f"labels has shape {list(labels.shape)}: it must be {list(mask.shape)}, one label a position")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels has dtype {labels.dtype}: it must be torch.int64 (use labels.long())")
    real = labels[mask]
    for wrong in real[(real < 0) | (real >= vocabulary)].tolist():
        allowed = f"it must be 0 to {vocabulary - 1}; mask such positions out"
        raise ValueError(f"labels holds {wrong} at a real token: {allowed}")
