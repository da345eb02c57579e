"""Forget losses: what pulls the student away from the documents it must forget. All are minimised.

LL, NPO and NLUL see the logits of a token only through its *log-odds* z = log p_y/(1-p_y) = h_y - logsumexp_{j≠y} h_j:
log p_y = log σ(z) and log(1 - p_y) = log σ(-z). Written so, both are exact in float32 whether p_y is 1e-30 or so close
to 1 that 1 - p_y rounds to zero, and so are their gradients; nothing overflows and no tolerance is needed.

Here are the paper's losses and ours; those of other papers lie in the folder ``field``, one file each, and are found
there. To add a loss, write one function with its definition in the docstring, decorate it with ``register``, and give
it a hand-computed case in ``tests/method/test_losses.py`` (a test fails without one). Names, help, configuration
checks, the command and the tests that run over all losses follow from the registry.

Shapes: B sequences, T positions, V vocabulary entries, N real tokens (the True entries of the mask).
Symbols: h ``logits``, y ``labels``, p = softmax(h), π_base given by ``base_logits``.
"""

from __future__ import annotations

import importlib
import pkgutil

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method import divergences, field
from unteach.method.registry import LOSSES, ForgetLoss, forget_loss, log_odds_parts, register, token_log_odds

__all__ = ["LOSSES", "ForgetLoss", "forget_loss", "register", "token_log_odds"]


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


@register("match", "mean_t φ(z - s z_base - m) + KL(p_base ‖ p)", reads="logits", base="given", closed_form=True)
def match(
    logits: Tensor, labels: Tensor, base_logits: Tensor, *, pull: str = "softplus", margin: float = 0.0,
    slope: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Pull towards a model that never saw the text, p_base: ℓ(h; y) = φ(z - slope·z_base - margin) + KL(p_base ‖ p).

    z is the label's log-odds. The first term is NLUL with a reference: -log(1 - p_y) = softplus(z) is the same with
    z_base = 0. Its gradient σ(z - z_base) (e_y - softmax_{j≠y}) is about 1 as long as the token is likelier than the
    reference says, at p_y → 1 *and* at p_y → 0, where NLUL's own (p_y) has vanished: names and numbers are pushed down
    to what a model gives them that never saw them. The second term, gradient p - p_base, keeps the text fluent.

    ``pull`` is φ: ``"softplus"``, log(1 + eˣ), whose pull at parity is still ½, so that its minimum lies below the
    reference; ``"gate"``, max(0, x), whose pull ends there at once; ``"parity"``, √(1 + x²) - 1, whose pull x/√(1 + x²)
    fades out there and turns back what has gone too far. It goes only down to margin + slope·z_base: with a slope of 1
    to ``margin`` nats of log-odds above the reference, else to a line such as the one that never-seen text lies on
    (``training.goal.line_through``).
    """
    if pull not in ("softplus", "gate", "parity"):
        raise ValueError(f"pull is {pull!r}: it must be 'softplus', 'gate' or 'parity'")
    (own, others), (base_own, base_others) = (log_odds_parts(h, labels) for h in (logits, base_logits))
    weights = others.exp()
    total = weights.sum(-1, keepdim=True)
    base_total = base_others.exp().sum(-1)
    log_ratio = total.squeeze(-1).log() - base_total.log()
    excess = (own - base_own) - log_ratio - margin  # z - z_base, without rounding either where both are large
    if slope != 1:
        excess = excess - (slope - 1) * (base_own - base_total.log())
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


for _found in pkgutil.iter_modules(field.__path__):
    importlib.import_module(f"{field.__name__}.{_found.name}")
