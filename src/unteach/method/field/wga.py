"""WGA: Wang et al., "Rethinking LLM unlearning objectives: a gradient perspective and go beyond" (2025)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method.registry import register, token_log_odds


@register("wga", "mean_t p_y^β log p_y, the weight held constant")
def wga(logits: Tensor, labels: Tensor, mask: Tensor, *, beta: float = 1.0) -> Tensor:
    """Weighted gradient ascent: p_y^β log p_y, the weight held constant, so that the gradient is that of p_y^β/β.

    It neither explodes (p_y → 0, where LL's does not fade) nor pulls where the text is memorised: with β = 1 it is
    p_y (1 - p_y) (e_y - softmax_{j≠y}), NLUL's times 1 - p_y. β = 0 is LL.
    """
    if not beta >= 0:
        raise ValueError(f"beta is {beta}: it must be zero or positive")
    log_p = logsigmoid(token_log_odds(logits[mask], labels[mask]))
    return ((beta * log_p).exp().detach() * log_p).mean()
