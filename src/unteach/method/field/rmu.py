"""RMU: Li et al., "The WMDP benchmark: measuring and reducing malicious use with unlearning" (2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from unteach.method.registry import register


@register("rmu", "mean_t ‖a_t - c u‖²/D,  u a random unit vector, a behind block `layer`", reads="hidden")
def rmu(hidden: Tensor, *, layer: int, coefficient: float = 20.0, seed: int = 0) -> Tensor:
    """Pull the hidden states behind one decoder block to one random direction (``seed``), of length c.

    u has entries that are uniform on [0, 1), normalised, as published; the mean is over tokens and dimensions. Blocks
    above ``layer`` have no part in it.

    Differs from the published code: what is kept is held by the divergence of the method, not by the distance of hidden
    states, and which weights move is ``trainable``'s business.
    """
    draws = torch.rand(hidden.shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    goal = (coefficient * draws / draws.norm()).to(hidden.device, torch.promote_types(hidden.dtype, torch.float32))
    return (hidden.to(goal.dtype) - goal).square().mean()
