"""UNDIAL: Dong et al., "UNDIAL: self-distillation with adjusted logits for robust unlearning" (2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from unteach.method.divergences import entropy_rows, kl_reverse_rows
from unteach.method.registry import register


@register(
    "undial", "mean_t -Σ_j q_j log p_j,  q = softmax(h_base - β e_y)", reads="logits", base="initial", closed_form=True
)
def undial(logits: Tensor, labels: Tensor, base_logits: Tensor, *, beta: float = 10.0) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the model before unlearning with the true token's logit lowered by β; gradient p - q.

    A fixed goal, so the loss ends where the student has reached it. -Σ q log p = H(q) + KL(q ‖ p). The default β is
    open-unlearning's; where a text is memorised with log-odds far above it, the goal still recites.
    """
    lowered = base_logits.scatter_add(-1, labels.unsqueeze(-1), torch.full_like(base_logits[:, :1], -beta))
    value, gradient = kl_reverse_rows(logits, lowered)
    return value + entropy_rows(lowered)[0], gradient
