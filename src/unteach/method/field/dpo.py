"""DPO with alternate answers: Rafailov et al., "Direct preference optimization" (2023), to forget: "TOFU" (2024)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method.registry import register


@register("dpo", "Σ_s -(2/β) log σ(β (R'_s - R_s)) / Σ_s |s|,  R' as R (npo) of the alternate", reads="pairs")
def dpo(log_ratio: Tensor, alternate_log_ratio: Tensor, *, beta: float = 0.1) -> Tensor:
    """Prefer the alternate of a document: ℓ(s) = -(2/β) log σ(β (R' - R)) of each pair [S].

    R = Σ_t log π(y)/π_before(y) of the document and R' the same of its alternate, each text as a whole. The weight
    w_s = 2σ(β (R - R')), 1 at the start, pushes the document down by w_s ∇log π and draws the alternate up by as much;
    it fades as the alternate gets ahead. What both texts begin with, a question, cancels in R' - R and in the gradient,
    to the last token, so that nothing need be masked. Without an alternate (R' = 0) it is NPO.

    Differs from the published code (open-unlearning's): summed over pairs and divided by the documents' tokens, those
    of a question among them, as ``npo``, not a mean over pairs, so that α weighs alike for all losses.
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be positive")
    return -(2 / beta) * logsigmoid(beta * (alternate_log_ratio - log_ratio))
