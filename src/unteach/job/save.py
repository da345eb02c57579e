"""Saving the unlearned model: a copy of its source with the changed weights, in the source's type or in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unteach.config import ForgetConfig
from unteach.models import rounding_loss, save_model
from unteach.models.distributed import full_tensor, is_first_rank, ranks, wait_for_all

__all__ = ["save_result"]

LARGEST_ROUNDING = 0.01
"""Share of the displacement that rounding to the source's dtype may lose before float32 is saved instead."""


def save_result(
    model: Any, parameters: Mapping[str, Any], tokenizer: Any, config: ForgetConfig, out: Path, card: str
) -> str:
    """Save the model; the first rank writes what all gather. Returns a line for people."""
    changed: dict[str, Any] | list[str] = list(parameters)
    if ranks() > 1:
        changed = {}
        for name, value in parameters.items():
            whole = full_tensor(value.detach())
            if is_first_rank():
                changed[name] = whole.to("cpu")
    line = ""
    if is_first_rank():
        save_dtype = torch.float32 if config.save_dtype == "float32" else None
        if config.save_dtype == "auto":
            lost = rounding_loss(model, config.model, changed=changed).relative
            save_dtype = torch.float32 if lost > LARGEST_ROUNDING else None
        rounding = save_model(model, tokenizer, config.model, out, changed=changed, card=card, save_dtype=save_dtype)
        line = f"model saved to {out}; {rounding.summary()}"
    wait_for_all()
    return line
