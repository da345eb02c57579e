"""Teach the base model the form of TOFU's answers: `python -m recipes.smollm2.form BASE FORM --data TOFU`.

A model that never saw TOFU does not know how its answers sound, and the retrained model does: matched with the base
model, an unlearned one is told from the retrained one by its manner. So the model to be matched is the base model after
a tenth of the documents to be kept: 400 of ``retain90``, 200 steps of 32, a quarter of what retraining takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from unteach.corpora.catalog import named_benchmark
from unteach.data import read_documents
from unteach.method.tensors import resolved_device
from unteach.models import load_model

from . import exit_status
from .articles import split_texts
from .convert import save_folder
from .models import Settings, learn

DOCUMENTS, STEPS, GENERAL = 400, 200, 2000
"""Documents that are learned, steps, and general texts beside them."""


def teach(model: str, out: Path, data: Path | None, general: str, device: str, steps: int = STEPS) -> None:
    """Write the model that knows the form."""
    network, tokenizer = load_model(model, device=resolved_device(device))
    entry = named_benchmark("tofu")
    assert entry.retain is not None
    texts = [text + (tokenizer.eos_token or "") for text in entry.retain(data)[:DOCUMENTS]]
    settings = Settings(
        benchmark="tofu", lr=5e-4, warmup=20, batch=32, general_batch=8, max_tokens=256, micro_batch=32, max_steps=steps
    )
    learned, _ = split_texts(read_documents(general, option="general").texts, settings.seed)  # as ``models`` does
    learn(network, tokenizer, texts, learned[:GENERAL], settings, check=lambda step: {"recital": 0.0}, steps=steps)
    save_folder(network, tokenizer, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.smollm2.form", description=(__doc__ or "").split(":")[0])
    parser.add_argument("model", help="folder of the base model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="folder with TOFU's tables; by default the hub")
    parser.add_argument("--general", default="micro:general")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    return exit_status(lambda: teach(given.model, given.out, given.data, given.general, given.device, given.steps))


if __name__ == "__main__":
    sys.exit(main())
