"""Faster masked attention on a CPU for models whose query heads share key heads.

With a padding mask, Transformers copies keys and values once per query head before it calls PyTorch's
attention; on a CPU that copy takes most of a decoding step. PyTorch can share them instead (`enable_gqa`).
The numbers are the same up to rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "unteach_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with shared key heads, in the form Transformers expects.

    Args:
        module: the attention layer.
        query: [B, query heads, T, width].
        key: [B, key heads, S, width].
        value: [B, key heads, S, width].
        attention_mask: [B, 1, T, S], or None for plain causal attention, which is left to Transformers.
        scaling: of the logits; by default 1/√width.
        **options: whatever else the layer passes on. Anything but defaults is left to Transformers.
    """
    special = any(options.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if attention_mask is None or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def faster_on_cpu(model: Any) -> Iterator[None]:
    """Inside the block the model uses `grouped_attention` where that pays; afterwards what it used before.

    Args:
        model: a Hugging Face model. Left alone unless it is on the CPU, uses PyTorch's attention, and has
            fewer key heads than query heads.
    """
    config = model.config.get_text_config()
    heads, key_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    shares = heads is not None and key_heads is not None and key_heads < heads
    before = getattr(config, "_attn_implementation", None)
    if model.device.type != "cpu" or before != "sdpa" or not shares:
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
