"""Unlearn inside a Hugging Face ``Trainer``: a callback lets the teacher read general text before every step.

python examples/with_trainer.py
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import unteach
from unteach.data import read_documents
from unteach.models import load_model, trainable_parameters

ALPHA, TOKENS, BATCH = 0.05, 64, 8


class TeacherReads(TrainerCallback):
    """Before every step the model computes with the teacher's weights; ``loss`` holds the student to the result."""

    def __init__(self, general: Iterable[torch.Tensor]) -> None:
        self.general = itertools.cycle(general)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Exchange the weights, read, exchange them back."""
        self.model, self.texts = given["model"], next(self.general).to(args.device)
        with given["optimizer"].optimizer.teacher_weights():  # Accelerate has wrapped ours
            self.teacher = self.model(input_ids=self.texts).logits

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """α · forget loss + divergence to the teacher."""
        everywhere = torch.ones_like(labels[:, 1:], dtype=torch.bool)
        forget = unteach.forget_loss("nlul", outputs.logits[:, :-1], labels[:, 1:], everywhere)
        everywhere = torch.ones_like(self.texts, dtype=torch.bool)
        student = self.model(input_ids=self.texts).logits
        return ALPHA * forget + unteach.divergence("kl", student, self.teacher, everywhere)


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
    model, tokenizer = load_model("micro:target", device="cpu")
    forget, general = chunks(tokenizer, "micro:forget"), chunks(tokenizer, "micro:general")
    optimizer = unteach.MeanTeacher(
        trainable_parameters(model, "blocks").values(), lr=0.02, momentum=0.9, teacher_rate=5.0, damping=0.1
    )
    before = losses(model, forget, general)
    teacher = TeacherReads(general.split(BATCH))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=BATCH,
                max_grad_norm=0,  # MeanTeacher clips itself, because clipping also slows the teacher
                lr_scheduler_type="constant",
                use_cpu=True,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in forget],
            optimizers=(optimizer, None),
            callbacks=[teacher],
            compute_loss_func=teacher.loss,
        )
        trainer.train()
    return before, losses(model, forget, general)


if __name__ == "__main__":
    before, after = main()
    print(f"forget documents: {before[0]:.2f} -> {after[0]:.2f}, general text: {before[1]:.2f} -> {after[1]:.2f}")
