"""The recovery table: finetune unlearned models on unrelated instructions, all metrics before and after.

Each run of ``methods`` is made again, with as many steps as it took (its cell is measured first where it is missing).
The retrained model is finetuned the same way, as a control: what it gains it cannot have remembered.

On the embedded benchmark a second table asks what a tenth of the forgotten documents brings back of the others: models
learn those about a tenth of the people, drawn by the seed, again, and are asked about all other people.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig
from unteach.corpora import Benchmark, Question
from unteach.data import Documents, ForgetBatches, tokenise
from unteach.errors import InputError
from unteach.evaluation.metrics import columns
from unteach.experiments.cells import Cell, CellFolder, by_name, differing, mean_and_std, result_table
from unteach.experiments.paper import Experiment, deep, methods, tradeoff
from unteach.experiments.setups import Setup
from unteach.models import context_length, load_model, load_tokenizer
from unteach.report.plots import curve_figure
from unteach.report.style import Figure, look
from unteach.training.finetune import add_nll_gradient, finetune, text_optimizer
from unteach.writing import markdown_table

__all__ = ["EXPERIMENT", "RecoverySettings", "RelearningSettings", "learn_instructions", "relearn"]

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


RELEARNED = ("deep", "mt-nlul-kl", "retrained")
"""Models that learn a tenth of the forgotten documents again: deep forgetting, the paper's method, and the control."""
TENTH = 10
RELEARNING = """Models that learned the documents about a tenth of the forgotten people again, by steps. One whose \
answers about the
others rise more than the retrained model's had kept something of them."""


@dataclass(frozen=True, kw_only=True)
class RelearningSettings:
    """How a tenth of the forgotten documents is learned again: AdamW on all weights."""

    lr: float = 1e-4
    """Learning rate. On the embedded benchmark the retrained model then knows the tenth after 20 to 80 steps."""
    steps: tuple[int, ...] = (0, 5, 10, 20, 40, 80)
    """After so many steps questions are asked."""
    batch: int = 24
    """Documents per step."""


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
    found = [_cell(setup, settings, name, seed, folder) for name in [*names, *controls] for seed in seeds]
    if setup.embedded:
        again = setup.own_settings("relearning", RelearningSettings)
        found += [_relearning_cell(setup, again, name, seed) for name in RELEARNED for seed in seeds]
    return found


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


def relearn(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    settings: RelearningSettings,
    seed: int,
    look_at: Callable[[int], None],
) -> None:
    """Train all weights on documents, in place.

    Args:
        model: A Hugging Face causal language model.
        tokenizer: Its tokenizer.
        texts: The documents.
        settings: Learning rate, batch, and after how many steps to look.
        seed: Of the batches.
        look_at: Called with a number of steps at each of ``settings.steps``.
    """
    precision = "bf16" if next(model.parameters()).device.type == "cuda" else "fp32"
    tokens = tokenise(Documents("again", list(texts)), tokenizer, mode="truncate", max_tokens=context_length(model))
    batches = ForgetBatches(tokens, seed)
    for parameter in model.parameters():
        parameter.requires_grad_(True)

    def after_step(step: int) -> bool:
        if step in settings.steps:
            look_at(step)
        return False

    after_step(0)
    finetune(
        model.parameters(),
        text_optimizer(model.parameters(), settings.lr),
        lambda step: add_nll_gradient(model, batches.batch(step, settings.batch), settings.batch, precision),
        steps=max(settings.steps),
        learning_rate=lambda step: settings.lr,
        after_step=after_step,
    )


def _relearning_cell(setup: Setup, settings: RelearningSettings, name: str, seed: int) -> Cell:
    from unteach.corpora import micro

    config = None
    if name != "retrained":
        config = deep.configured(setup, name, seed) if name == "deep" else setup.configured(name, seed)
    stories = micro.stories("forget")
    chosen = set(random.Random(seed).sample(range(len(stories)), len(stories) // TENTH))
    asked: dict[str, tuple[Question, ...]] = {"others": (), "learned": ()}
    texts: list[str] = []
    for number, story in enumerate(stories):
        asked["learned" if number in chosen else "others"] += story.questions
        texts += story.documents if number in chosen else ()

    def run() -> dict[str, Any]:
        model, tokenizer = _unlearned(setup, config), load_tokenizer(setup.config.model)
        curve: dict[str, list[float]] = {"step": [], "others": [], "learned": []}

        def look_at(step: int) -> None:
            curve["step"].append(step)
            for part, questions in asked.items():
                curve[part].append(round(_answered(setup, model, tokenizer, questions[: setup.limit], seed), 4))

        relearn(model, tokenizer, texts, settings, seed, look_at)
        return {"metrics": {}, "relearning": curve}

    settings_of_model = setup.fixed(config) if config else setup.fixed(setup.config)["inputs"]["reference"]
    documents = Documents("again", texts)
    fixed = {"from": settings_of_model, "relearning": differing(settings), "documents": documents.sha256[:16]}
    return Cell(name=f"relearn-{name}", seed=seed, settings=fixed, run=run)


def _unlearned(setup: Setup, config: ForgetConfig | None) -> Any:
    """The model that a run ends with; without settings, the retrained one."""
    from unteach.job import run_forget

    if config is None:
        return load_model(str(setup.config.reference), device=setup.config.resolved_device())[0]
    with tempfile.TemporaryDirectory() as work:
        made = dataclasses.replace(config, out=str(Path(work) / "run"))
        return run_forget(made, say=setup.say, measurements=["nll_general"]).model


def _answered(setup: Setup, model: Any, tokenizer: Any, questions: tuple[Question, ...], seed: int) -> float:
    from unteach.evaluation import evaluate

    examples = setup.final.knowledge_forget_examples
    asked = Benchmark("relearning", knowledge_forget=questions, knowledge_forget_examples=examples)
    asked = dataclasses.replace(asked, settings=setup.final.settings)
    return evaluate(model, tokenizer, asked, measurements=["knowmem_f"], seed=seed)["knowmem_f"]


def table(contents: Sequence[dict[str, Any]]) -> str:
    """Two rows for each model: before and after finetuning; and a row for each that learned a tenth again."""
    rows = {name: [content["metrics"] for content in group] for name, group in by_name(_both(contents)).items()}
    parts = [result_table(rows, columns())] if rows else []
    if groups := by_name(content for content in contents if "relearning" in content):
        parts += [RELEARNING, _relearning_table(groups)]
    return "\n\n".join(parts)


def _relearning_table(groups: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    steps = next(iter(groups.values()))[0]["relearning"]["step"]
    rows = []
    for name, group in groups.items():
        curves = [content["relearning"] for content in group if content["relearning"]["step"] == steps]
        others = [mean_and_std([curve["others"][place] for curve in curves]) for place in range(len(steps))]
        rows.append([name.removeprefix("relearn-"), *others, mean_and_std([curve["learned"][-1] for curve in curves])])
    titles = [f"after {step}" for step in steps]
    return markdown_table(["knowmem_f of the other people", *titles, f"of the learned, after {steps[-1]}"], rows)


def figures(benchmark: str, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """Utility against what is recited and known, before and after; and what a tenth brings back of the rest."""
    drawn = tradeoff.panels("recovery", benchmark, _both(contents), ("verbmem_f", "knowmem_f"))
    lines = []
    for place, (name, group) in enumerate(by_name(c for c in contents if "relearning" in c).items()):
        style = look("retrained" if name.endswith("retrained") else "method", place)
        for content in group:
            curve = content["relearning"]
            points = list(zip(curve["step"], curve["others"], strict=True))
            lines.append((name.removeprefix("relearn-"), style, content["seed"], points))
    if lines:
        keys = list({label: style for label, style, _, _ in lines}.items())
        title = "Answers about the other nine tenths"
        drawn.append(curve_figure(f"relearn-knowmem_f-{benchmark}", title, "knowmem_f ↓", lines, keys, False))
    return drawn


def _both(contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each model as it was before and as it is after finetuning, in turn."""
    both = []
    for name, group in by_name(content for content in contents if "before" in content).items():
        short = name.removeprefix("recovery-")
        both += [{"name": short, "seed": c["seed"], "metrics": c["before"]["metrics"]} for c in group]
        both += [{"name": f"{short}, finetuned", "seed": c["seed"], "metrics": c["metrics"]} for c in group]
    return both


EXPERIMENT = Experiment(
    title="the recovery table: unrelated finetuning after unlearning",
    see="What comes back shows as verbmem_f and knowmem_f that are higher in the second row of a model than in the "
    "first; as much as the retrained model gains is not memory.",
    cells=cells,
    shows=lambda name: name.startswith(("recovery-", "relearn-")),
    table=table,
    figures=figures,
)
