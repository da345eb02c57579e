"""Forward passes of the loop: last hidden states of real tokens, and the loss and divergence they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unteach.config import Method
from unteach.data import pad
from unteach.divergences import DIVERGENCES
from unteach.losses import LOSSES, forget_loss
from unteach.vocab_head import Head, mean_divergence, token_log_odds

__all__ = ["forget_term", "general_term", "hidden_states", "in_micro_batches", "precision_of_pass"]


def hidden_states(model: Any, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Last hidden states that predict a token, the tokens they predict, and where they are.

    Returns:
        ``hidden`` [N,D] and ``labels`` [N] of the N predicted tokens, and ``mask`` [B,T-1] that says which they are.
    """
    device = model.get_input_embeddings().weight.device
    input_ids, lengths = (tensor.to(device) for tensor in pad(sequences))
    places = torch.arange(input_ids.shape[1], device=device)
    attention_mask = places < lengths.unsqueeze(-1)
    hidden = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False
    ).last_hidden_state
    mask = attention_mask[:, 1:]
    return hidden[:, :-1][mask], input_ids[:, 1:][mask], mask


def forget_term(
    model: Any, sequences: Sequence[Sequence[int]], method: Method, base: Any = None
) -> tuple[Tensor, Tensor, int]:
    """Forget loss of a micro-batch, its mean NLL, and its number of tokens.

    Args:
        model: The student.
        sequences: Token ids.
        method: Loss and its hyper-parameters.
        base: ``npo``: the log-odds before unlearning [N] of the same tokens. ``it``: the incompetent model.
    """
    hidden, labels, mask = hidden_states(model, sequences)
    log_odds = token_log_odds(hidden, labels, Head.of(model))
    nll = -torch.nn.functional.logsigmoid(log_odds.detach()).mean()
    if not LOSSES[method.loss].log_odds_only:
        with torch.no_grad():
            base_hidden = hidden_states(base, sequences)[0]
        rows = DIVERGENCES["kl"].rows  # it: KL(student ‖ incompetent teacher)
        return mean_divergence(rows, hidden, Head.of(model), base_hidden, Head.of(base)), nll, len(labels)

    def two_words(z: Tensor) -> Tensor:  # LL, NPO and NLUL see only log-odds: those of a vocabulary of two words
        logits = z.new_zeros(*mask.shape, 2)
        logits[..., 0] = logits[..., 0].masked_scatter(mask, z)
        return logits

    extra = {"base_logits": two_words(base)} if LOSSES[method.loss].needs_base else {}
    zeros = torch.zeros_like(mask, dtype=torch.int64)
    return (
        forget_loss(method.loss, two_words(log_odds), zeros, mask, **extra, **method.loss_options()),
        nll,
        len(labels),
    )


def general_term(
    model: Any, sequences: Sequence[Sequence[int]], divergence: str, teacher_hidden: Tensor, teacher_head: Head
) -> tuple[Tensor, int]:
    """Divergence of the student from the teacher on a micro-batch, and its number of tokens."""
    hidden, labels, _ = hidden_states(model, sequences)
    rows = DIVERGENCES[divergence].rows
    return mean_divergence(rows, hidden, Head.of(model), teacher_hidden, teacher_head), len(labels)


def in_micro_batches(sequences: Sequence[Any], size: int | None) -> Iterator[Sequence[Any]]:
    """Consecutive parts of at most ``size`` sequences."""
    size = size or len(sequences)
    return (sequences[start : start + size] for start in range(0, len(sequences), size))


@contextmanager
def precision_of_pass(name: str, device: torch.device) -> Iterator[None]:
    """Compute in a precision: fp32, tf32, fp16, bf16, or auto (fp32 on CPU, tf32 elsewhere)."""
    before = torch.get_float32_matmul_precision()
    if name == "auto":
        name = "fp32" if device.type == "cpu" else "tf32"
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        if name in ("fp16", "bf16"):
            with torch.autocast(device.type, dtype=torch.float16 if name == "fp16" else torch.bfloat16):
                yield
        else:
            yield
    finally:
        torch.set_float32_matmul_precision(before)
