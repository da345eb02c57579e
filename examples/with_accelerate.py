"""Unlearn in a loop of your own with Accelerate, on one device or several.

accelerate launch examples/with_accelerate.py
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import unteach
from unteach.data import read_documents
from unteach.models import load_model, trainable_parameters

ALPHA, TOKENS, BATCH = 0.05, 64, 8


def chunks(tokenizer: Any, source: str) -> torch.Tensor:
    """The beginnings of documents, all of one length [N,T]."""
    encoded = [tokenizer(text).input_ids[:TOKENS] for text in read_documents(source).texts[:64]]
    return torch.tensor([tokens for tokens in encoded if len(tokens) == TOKENS])


def losses(model: Any, *texts: torch.Tensor) -> list[float]:
    """The model's mean loss per token on each."""
    with torch.no_grad():
        return [float(model(input_ids=tokens, labels=tokens).loss) for tokens in texts]


def main(steps: int = 30) -> tuple[list[float], list[float]]:
    """Unlearn; the losses on forget documents and general text before and after."""
    accelerator = Accelerator()
    model, tokenizer = load_model("micro:target", device="cpu")
    texts = [chunks(tokenizer, "micro:forget"), chunks(tokenizer, "micro:general")]
    before = losses(model, *texts)
    optimizer = unteach.MeanTeacher(
        trainable_parameters(model, "blocks").values(), lr=0.02, momentum=0.9, teacher_rate=5.0, damping=0.1
    )
    loaders = [DataLoader(tokens, BATCH, shuffle=True, drop_last=True) for tokens in texts]
    model, wrapped, *loaders = accelerator.prepare(model, optimizer, *loaders)
    everywhere = torch.ones(BATCH, TOKENS, dtype=torch.bool, device=accelerator.device)
    batches = zip(*(itertools.cycle(loader) for loader in loaders), strict=True)
    for forget, general in itertools.islice(batches, steps):
        with optimizer.teacher_weights():  # before the student reads anything
            teacher = model(input_ids=general).logits
        pull = unteach.forget_loss("nlul", model(input_ids=forget).logits[:, :-1], forget[:, 1:], everywhere[:, 1:])
        hold = unteach.divergence("kl", model(input_ids=general).logits, teacher, everywhere)
        accelerator.backward(ALPHA * pull + hold)
        wrapped.step()
        wrapped.zero_grad()
    return before, losses(model, *(tokens.to(accelerator.device) for tokens in texts))


if __name__ == "__main__":
    before, after = main()
    print(f"forget documents: {before[0]:.2f} -> {after[0]:.2f}, general text: {before[1]:.2f} -> {after[1]:.2f}")
