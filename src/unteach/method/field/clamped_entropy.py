"""Clamped entropy: the forget loss of BLADE, a fork of open-unlearning (tzpranto, 2025)."""

from __future__ import annotations

import math

from torch import Tensor

from unteach.method.divergences import entropy_rows
from unteach.method.registry import register


@register("clamped_entropy", "mean_t max(0, τ log V - H(p))", reads="logits", closed_form=True)
def clamped_entropy(logits: Tensor, labels: Tensor, *, threshold: float = 0.5) -> tuple[Tensor, Tensor]:
    """Raise the entropy H of every next-token distribution to a share τ (``threshold``) of its largest, log V; no more.

    The labels play no part. Gradient where H is below: p ⊙ (h - E_p h), which vanishes where p is certain.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}: it must be above 0 and at most 1")
    entropy, gradient = entropy_rows(logits)
    missing = threshold * math.log(logits.shape[-1]) - entropy
    return missing.clamp(min=0.0), -gradient * (missing > 0).to(logits.dtype).unsqueeze(-1)
