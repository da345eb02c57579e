"""SatImp: Yang et al., "Exploring criteria of loss reweighting to enhance LLM unlearning" (2025)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method.registry import register, token_log_odds


@register("satimp", "mean_t p_y^β₁ (1 - p_y)^β₂ log p_y, the weight held constant")
def satimp(logits: Tensor, labels: Tensor, mask: Tensor, *, beta1: float = 5.0, beta2: float = 1.0) -> Tensor:
    """Saturation (p_y^β₁: no more where it is forgotten) times importance ((1 - p_y)^β₂: more where it is hard).

    Both weights are held constant. The gradient p_y^β₁ (1 - p_y)^(β₂ + 1) (e_y - softmax_{j≠y}) vanishes at both ends:
    at p_y → 1, where a memorised text is, faster than LL's. β₂ = 0 is WGA. The defaults are open-unlearning's.
    """
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}: it must be zero or positive")
    log_odds = token_log_odds(logits[mask], labels[mask])
    log_p = logsigmoid(log_odds)
    weight = (beta1 * log_p + beta2 * logsigmoid(-log_odds)).exp()
    return (weight.detach() * log_p).mean()
