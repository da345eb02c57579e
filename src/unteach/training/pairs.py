"""Losses of pairs, a document and the text to be said in its place, as two pulls that need not stay together.

Such a loss is a function of two numbers, by how much likelier each text is than before the run, R and R'. Its gradient
is therefore that of ∂ℓ/∂R log π(document) + ∂ℓ/∂R' log π(alternate) with both slopes held constant: once R and R' are
known, by a pass without gradients, each text is pulled by a weight of its own in whatever micro-batch or rank it lands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unteach.method.losses import LOSSES
from unteach.training.passes import Parts, Pull

__all__ = ["pulls_of_pairs"]


def pulls_of_pairs(
    pull: Pull, alternates: Sequence[Sequence[int]], parts: Parts, now: Sequence[Tensor], before: Sequence[Tensor]
) -> list[Pull]:
    """The pull on documents with its weights, and that on their alternates: together the loss of the pairs.

    Args:
        pull: What is known of the documents: their sequences and micro-batches, the loss and its options.
        alternates: Of each document.
        parts: This rank's micro-batches of them.
        now: Log-odds of the documents' tokens and then of the alternates' in the model as it is, for each text.
        before: The same before the run.
    """
    differences = [logsigmoid(own) - logsigmoid(known) for own, known in zip(now, before, strict=True)]
    log_ratios = torch.stack([each.sum(dtype=torch.float64) for each in differences]).view(2, -1).requires_grad_()
    with torch.enable_grad():
        values = LOSSES[pull.loss].function(*log_ratios, **pull.options)
        (slopes,) = torch.autograd.grad(values.sum(), log_ratios)
    documents = dataclasses.replace(pull, weights=slopes[0], values=values.detach())
    others = dataclasses.replace(pull, sequences=alternates, parts=parts)
    share = others.tokens / documents.tokens  # a pull is divided by its own tokens: by the documents', as the loss is
    return [documents, dataclasses.replace(others, weights=share * slopes[1], values=torch.zeros_like(slopes[1]))]
