"""The one finetuning loop, to teach models texts: gradient descent on whatever the caller adds to the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from unteach.method.vocab_head import Head, token_log_odds
from unteach.models.precision import precision_of_pass
from unteach.training.passes import computing, hidden_states, in_micro_batches

__all__ = ["add_nll_gradient", "finetune", "text_optimizer"]

CLIP = 1.0
"""Largest norm of a step's gradient."""


def finetune(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, add_gradient: Callable[[int], Any], *,
    steps: int, learning_rate: Callable[[int], float], after_step: Callable[[int], bool] | None = None,
) -> list[Any]:  # fmt: skip
    """Take at most so many steps with clipped gradients, in place; returns what ``add_gradient`` returned at each.

    Args:
        parameters: What is trained.
        optimizer: Of these parameters.
        add_gradient: step → what is to be kept of it; it adds the step's gradient to the parameters' ``grad``.
        steps: How many at most.
        learning_rate: step, from 0 → its learning rate, for all groups of the optimizer.
        after_step: Number of steps taken → whether that is enough; None: all of them are taken.
    """
    trained, kept = list(parameters), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        kept.append(add_gradient(step))
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        if after_step is not None and after_step(step + 1):
            break
    return kept


def text_optimizer(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    """AdamW as it is used to learn texts: without weight decay."""
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def add_nll_gradient(
    model: Any, batch: Sequence[Sequence[int]], micro_batch: int, precision: str, *, compiled: bool = False
) -> float:
    """Add the gradient of a batch's mean NLL per token, ``micro_batch`` sequences at a time; returns that NLL.

    ``compiled``: with compiled decoder blocks, which pays in long runs on a GPU.
    """
    device = next(model.parameters()).device
    total, nll = sum(len(sequence) - 1 for sequence in batch), torch.zeros((), device=device)
    for part in in_micro_batches(batch, micro_batch):
        with computing(model, precision, compiled=True) if compiled else precision_of_pass(precision, device):
            hidden, labels, _ = hidden_states(model, part)
            loss = torch.nn.functional.softplus(-token_log_odds(hidden, labels, Head.of(model))).sum() / total
            loss.backward()
        nll += loss.detach()
    return float(nll)
