"""SimNPO: Fan et al., "Simplicity prevails: rethinking negative preference optimization for LLM unlearning" (2024)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method.registry import register, token_log_odds


@register("simnpo", "Σ_s |s| (-(2/β) log σ(-β (ℓ̄_s + δ))) / Σ_s |s|,  ℓ̄_s = Σ_t log p_y / |s|")
def simnpo(logits: Tensor, labels: Tensor, mask: Tensor, *, beta: float = 4.5, delta: float = 0.0) -> Tensor:
    """NPO without a reference, of the mean log-likelihood ℓ̄_s of a sequence: -(2/β) log σ(-β (ℓ̄_s + δ)).

    The paper writes -(2/β) log σ(-β ℓ̄_s - γ), γ = βδ; the defaults are open-unlearning's. The weight of a sequence is
    2σ(β (ℓ̄_s + δ)): 1 at δ = 0 where it is memorised (ℓ̄ = 0), fading as it becomes unlikely; that of a token is
    the weight times LL's gradient, which vanishes where p_y → 1.

    Differs from the published code: sequences count by their lengths, not alike, so that the gradient is a mean over
    tokens as for all losses here, whatever the micro-batch.
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be positive")
    log_p, lengths = logsigmoid(token_log_odds(logits[mask], labels[mask])), mask.sum(1)
    sums = log_p.new_zeros(len(mask)).index_add(0, mask.nonzero()[:, 0], log_p)
    sums, lengths = sums[lengths > 0], lengths[lengths > 0].to(log_p.dtype)
    loss = -(2 / beta) * lengths * logsigmoid(-beta * (sums / lengths + delta))
    return loss.sum() / lengths.sum()
