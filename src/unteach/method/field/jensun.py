"""JensUn: Singh et al., "Unlearning that lasts: utility-preserving, robust, and almost irreversible" (2025)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method.registry import log_odds_parts, register


@register("jensun", "mean_t JS(e_c ‖ p),  c a fixed token", reads="logits", closed_form=True)
def jensun(logits: Tensor, labels: Tensor, *, token: int = 0) -> tuple[Tensor, Tensor]:
    """Jensen–Shannon divergence to a fixed token c (``token`` is its id).

    It is log 2 - ½ (1 + p_c) log(1 + p_c) + ½ p_c log p_c, never above log 2. The gradient is bounded, too,
    ½ p_c log(p_c/(1 + p_c)) (e_c - p), and small where c is unlikely.
    Its other half, the Jensen–Shannon divergence to the model before on what is kept, is ``--divergence js``.

    Differs from the published code: its goal is a phrase ("No idea"), over and over; here it is one token, as in their
    variants with a comma or a hash.
    """
    if not 0 <= token < logits.shape[-1]:
        raise ValueError(f"token is {token}: it must be 0 to {logits.shape[-1] - 1}, the id of a token")
    index = torch.full_like(labels, token)
    own, others = log_odds_parts(logits, index)
    weights = others.exp()
    total = weights.sum(-1, keepdim=True)
    log_odds = own - total.squeeze(-1).log()
    log_p, p, missing = logsigmoid(log_odds), log_odds.sigmoid(), (-log_odds).sigmoid()
    value = 0.5 * (missing * math.log(2) - (2 - missing) * torch.log1p(-missing / 2) + p * log_p)
    slope = (torch.log1p(p) - log_p).log() + log_p + logsigmoid(-log_odds)  # its log: p alone may be below the range
    strength = -0.5 * slope.exp().unsqueeze(-1)
    return value, (weights * (-strength / total)).scatter_add(-1, index.unsqueeze(-1), strength)
