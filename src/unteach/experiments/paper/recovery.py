"""The recovery table: finetune unlearned models on unrelated instructions, all metrics before and after.

Each run of ``methods`` is made again, with as many steps as it took (its cell is measured first where it is missing).
The retrained model is finetuned the same way, as a control: what it gains it cannot have remembered.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.data import Documents, ForgetBatches, tokenise
from unteach.errors import InputError
from unteach.evaluation.metrics import columns
from unteach.experiments.cells import Cell, CellFolder, by_name, differing, result_table
from unteach.experiments.paper import Experiment, methods, tradeoff
from unteach.experiments.setups import Setup
from unteach.models import context_length, load_model, load_tokenizer
from unteach.report.style import Figure
from unteach.training.finetune import add_nll_gradient, finetune, text_optimizer

__all__ = ["EXPERIMENT", "RecoverySettings", "learn_instructions"]

UNLEARNED = ("mt-nlul-qkl-star", "mt-nlul-qkl", "adamw-npo-kl")
"""On the embedded benchmark without the second: the first says the same, and everything should take half an hour."""


@dataclass(frozen=True, kw_only=True)
class RecoverySettings:
    """How the instructions are learned: AdamW on all weights."""

    lr: float = 1e-4
    """Learning rate, constant after a tenth of the steps."""
    steps: int = 100
    batch: int = 16
    """Instructions per step."""
    max_tokens: int = 512
    """Longer instructions are cut."""


MICRO: dict[str, Any] = {"lr": 1e-4, "steps": 75, "batch": 32}
"""For the embedded model: four passes over the 600 instructions. At 1e-3 it forgets everything else."""


def learn_instructions(
    model: Any, tokenizer: Any, texts: Sequence[str], settings: RecoverySettings, seed: int
) -> list[float]:
    """Train all weights on instructions with responses, in place, with AdamW; returns the NLL of every step's batch."""
    precision = "bf16" if next(model.parameters()).device.type == "cuda" else "fp32"
    most = min(settings.max_tokens, context_length(model))
    tokens = tokenise(Documents("instructions", list(texts)), tokenizer, mode="truncate", max_tokens=most)
    batches = ForgetBatches(tokens, seed)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    warmup = max(1, settings.steps // 10)
    return finetune(
        model.parameters(),
        text_optimizer(model.parameters(), settings.lr),
        lambda step: add_nll_gradient(model, batches.batch(step, settings.batch), settings.batch, precision),
        steps=settings.steps,
        learning_rate=lambda step: settings.lr * min(1.0, (step + 1) / warmup),
    )


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Each unlearned model and, as a control, the retrained one."""
    if setup.instruct is None:
        raise InputError("instruct is missing: name a file of instructions with the columns instruction and output")
    settings = setup.own_settings("recovery", RecoverySettings, **(MICRO if setup.embedded else {}))
    available = methods.rows(setup)
    names = [n for n in UNLEARNED if n in available and not (setup.embedded and n == "mt-nlul-qkl")]
    controls = ["retrained"] if setup.config.reference else []
    return [_cell(setup, settings, name, seed, folder) for name in [*names, *controls] for seed in seeds]


def _cell(setup: Setup, settings: RecoverySettings, name: str, seed: int, folder: CellFolder) -> Cell:
    unlearned = methods.cell(setup, name, 0 if name == "retrained" else seed)  # a model that is given has no seed
    texts = Documents("instructions", list(setup.instruct or ()))
    fixed = {"from": dict(unlearned.settings), "recovery": differing(settings), "instruct": texts.sha256[:16]}

    def run() -> dict[str, Any]:
        if name == "retrained":
            model = load_model(str(setup.config.reference), device=setup.config.resolved_device())[0]
            before: dict[str, Any] = folder.get(unlearned)
            before = {key: before[key] for key in ("metrics", "notes", "examples") if key in before}
        else:
            with tempfile.TemporaryDirectory() as work:
                steps = folder.get(unlearned)["steps"]
                unlearning, out = name.removesuffix(methods.STAR), str(Path(work) / "run")
                result, before = setup.forget(setup.configured_for_steps(unlearning, seed, steps, out=out))
            model = result.model
        losses = learn_instructions(model, load_tokenizer(setup.config.model), texts.texts, settings, seed)
        after = setup.kept(setup.measure(model, seed))
        return {
            "before": {key: value for key, value in before.items() if key != "curve"},
            **after,
            "instruction_nll": [round(losses[0], 4), round(losses[-1], 4)],
        }

    return Cell(name=f"recovery-{name}", seed=seed, settings=fixed, run=run, needs=(unlearned,))


def table(contents: Sequence[dict[str, Any]]) -> str:
    """Two rows for each model: before and after finetuning."""
    rows = {name: [content["metrics"] for content in group] for name, group in by_name(_both(contents)).items()}
    return result_table(rows, columns())


def figures(benchmark: str, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """Utility against what is recited and known, before and after."""
    return tradeoff.panels("recovery", benchmark, _both(contents), ("verbmem_f", "knowmem_f"))


def _both(contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each model as it was before and as it is after finetuning, in turn."""
    both = []
    for name, group in by_name(contents).items():
        short = name.removeprefix("recovery-")
        both += [{"name": short, "seed": c["seed"], "metrics": c["before"]["metrics"]} for c in group]
        both += [{"name": f"{short}, finetuned", "seed": c["seed"], "metrics": c["metrics"]} for c in group]
    return both


EXPERIMENT = Experiment(
    title="the recovery table: unrelated finetuning after unlearning",
    see="What comes back shows as verbmem_f and knowmem_f that are higher in the second row of a model than in the "
    "first; as much as the retrained model gains is not memory.",
    cells=cells,
    shows=lambda name: name.startswith("recovery-"),
    table=table,
    figures=figures,
)
