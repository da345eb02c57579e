"""Unlearn with adapters (PEFT): the optimizer moves the adapter's weights alone, and so does its teacher.

pip install peft && python examples/with_peft.py
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import unteach
from unteach.data import read_documents
from unteach.models import load_model

ALPHA, TOKENS, BATCH = 0.05, 64, 8


def chunks(tokenizer: Any, source: str) -> torch.Tensor:
    """The beginnings of documents, all of one length [N,T]."""
    encoded = [tokenizer(text).input_ids[:TOKENS] for text in read_documents(source).texts[:64]]
    return torch.tensor([tokens for tokens in encoded if len(tokens) == TOKENS])


def losses(model: Any, *texts: torch.Tensor) -> list[float]:
    """The model's mean loss per token on each."""
    with torch.no_grad():
        return [float(model(input_ids=tokens, labels=tokens).loss) for tokens in texts]


def main(steps: int = 30) -> tuple[list[float], list[float], Any]:
    """Unlearn; the losses on forget documents and general text before and after, and a model without adapters."""
    source, tokenizer = load_model("micro:target", device="cpu")
    model = get_peft_model(source, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))  # dropout stays 0
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = unteach.MeanTeacher(adapters, lr=0.05, momentum=0.9, teacher_rate=2.0, damping=0.1)
    forget, general = chunks(tokenizer, "micro:forget"), chunks(tokenizer, "micro:general")
    everywhere = torch.ones(BATCH, TOKENS, dtype=torch.bool)

    before = losses(model, forget, general)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        own, others = (texts[torch.randperm(len(texts), generator=draw)[:BATCH]] for texts in (forget, general))
        with optimizer.teacher_weights():
            teacher = model(input_ids=others).logits
        pull = unteach.forget_loss("nlul", model(input_ids=own).logits[:, :-1], own[:, 1:], everywhere[:, 1:])
        hold = unteach.divergence("kl", model(input_ids=others).logits, teacher, everywhere)
        (ALPHA * pull + hold).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, losses(model, forget, general), model.merge_and_unload()


if __name__ == "__main__":
    before, after, _ = main()
    print(f"forget documents: {before[0]:.2f} -> {after[0]:.2f}, general text: {before[1]:.2f} -> {after[1]:.2f}")
