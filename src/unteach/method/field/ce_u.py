"""CE-U: Yang, "CE-U: cross entropy unlearning" (2025)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method.divergences import entropy_rows
from unteach.method.registry import log_odds_parts, register


@register("ce_u", "mean_t -Σ_j q_j log p_j,  q = softmax_{j≠y} held constant", reads="logits", closed_form=True)
def ce_u(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the model's own distribution with the true token's logit at -∞, held constant.

    It is NLUL under another name: -Σ q log p = H(q) + KL(q ‖ p), KL(q ‖ p) = -log(1 - p_y), and with q held constant
    the gradient is p - q = p_y (e_y - q), NLUL's, exactly. Only the value that is shown has H(q) on top.

    Differs from the published code: that leaves out the first token of every answer.
    """
    own, others = log_odds_parts(logits, labels)
    weights = others.exp()
    total = weights.sum(-1, keepdim=True)
    log_odds = own - total.squeeze(-1).log()
    value, p_y = entropy_rows(others)[0] - logsigmoid(-log_odds), log_odds.sigmoid().unsqueeze(-1)
    return value, (weights * (-p_y / total)).scatter_add(-1, labels.unsqueeze(-1), p_y)
