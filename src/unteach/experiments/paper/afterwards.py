"""What becomes of a model after it has forgotten: finetuned, taught a part again, or asked to forget more.

``recovery`` finetunes unlearned models on unrelated instructions. Each run of ``methods`` is made again, with as many
steps as it took (its cell is measured first where it is missing). The retrained model is a control: what it gains it
cannot have remembered. On the embedded benchmark a second table asks what a tenth of the forgotten documents brings
back: models learn those about a tenth of the people, drawn by the seed, again, and are asked about all other people.

``sequential`` makes four disjoint forget requests one after the other. Twice: as in the paper, without a stop rule and
with nothing tuned anew, every request with the steps and numbers that the method had for all documents in ``methods``;
and as ``unteach forget`` would do it, each request until its documents are recited no better than by the retrained
model, the mean teacher's numbers measured anew.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import Method
from unteach.corpora import Question, micro
from unteach.data import Documents, ForgetBatches, tokenise
from unteach.errors import InputError
from unteach.evaluation.metrics import columns
from unteach.experiments import paper
from unteach.experiments.cells import Cell, CellFolder, differing
from unteach.experiments.paper import Content, Experiment, deep, methods
from unteach.experiments.setups import Setup
from unteach.models import context_length, load_tokenizer
from unteach.report.style import Figure
from unteach.training.finetune import add_nll_gradient, finetune, text_optimizer
from unteach.writing import markdown_table

__all__ = ["EXPERIMENTS", "RecoverySettings", "RelearningSettings"]

FINETUNED = ("mt-nlul-qkl-star", "mt-nlul-qkl", "adamw-npo-kl", "retrained")
"""On the embedded benchmark without the second: the first says the same, and everything should take half an hour."""
MICRO: dict[str, Any] = {"lr": 1e-4, "steps": 75, "batch": 32}
"""For the embedded model: four passes over the 600 instructions. At 1e-3 it forgets everything else."""
RELEARNED = ("deep", "mt-nlul-kl", "retrained")
"""Models that learn a tenth of the forgotten documents again: deep forgetting, the paper's method, and the control."""
RELEARNING = """Models that learned the documents about a tenth of the forgotten people again (with each seed another
tenth), by steps. One whose answers about the others rise more than the retrained model's had kept something of them."""
ASKED_AGAIN = ("mt-nlul-qkl", "adamw-npo-kl")
"""Methods of ``sequential``."""
METRICS = ("verbmem_f", "knowmem_f", "knowmem_r", "privleak", "mmlu_val", "nll_general", "degenerate")


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


@dataclass(frozen=True, kw_only=True)
class RelearningSettings:
    """How a tenth of the forgotten documents is learned again: AdamW on all weights."""

    lr: float = 1e-4
    """Learning rate. On the embedded benchmark the retrained model then knows the tenth after 20 to 80 steps."""
    steps: tuple[int, ...] = (0, 5, 10, 20, 40, 80)
    """After so many steps questions are asked."""
    batch: int = 24
    """Documents per step."""


def _learn(setup: Setup, model: Any, texts: Documents, settings: Any, seed: int, **given: Any) -> list[float]:
    """Train all weights on texts, in place, ``given`` what ``finetune`` takes; returns the NLL of each step."""
    precision = "bf16" if next(model.parameters()).device.type == "cuda" else "fp32"
    most = min(context_length(model), getattr(settings, "max_tokens", context_length(model)))
    tokens = tokenise(texts, load_tokenizer(setup.config.model), mode="truncate", max_tokens=most)
    batches, optimizer = ForgetBatches(tokens, seed), text_optimizer(model.parameters(), settings.lr)
    model.requires_grad_(True)

    def add_gradient(step: int) -> float:
        return add_nll_gradient(model, batches.batch(step, settings.batch), settings.batch, precision)

    return finetune(model.parameters(), optimizer, add_gradient, **given)


def recovery_cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Each unlearned model and, as a control, the retrained one."""
    if setup.instruct is None:
        raise InputError("instruct is missing: name a file of instructions with the columns instruction and output")
    settings = setup.own_settings("recovery", RecoverySettings, **(MICRO if setup.embedded else {}))
    names = [n for n in FINETUNED if n in methods.rows(setup) and not (setup.embedded and n == "mt-nlul-qkl")]
    found = [_cell(setup, settings, name, seed, folder) for name in names for seed in seeds]
    if setup.embedded:
        again = setup.own_settings("relearning", RelearningSettings)
        found += [_relearning_cell(setup, again, name, seed) for name in RELEARNED for seed in seeds]
    return found


def _cell(setup: Setup, settings: RecoverySettings, name: str, seed: int, folder: CellFolder) -> Cell:
    unlearned = methods.cell(setup, name, seed)
    texts = Documents("instructions", list(setup.instruct or ()))
    fixed = {"from": dict(unlearned.settings), "recovery": differing(settings), "instruct": texts.sha256[:16]}

    def run() -> dict[str, Any]:
        before = folder.get(unlearned)
        if name == "retrained":
            model = setup.load(str(setup.config.reference))
            before = {key: before[key] for key in ("metrics", "notes", "examples") if key in before}
        else:
            method = name.removesuffix(methods.STAR)
            model, before = setup.forget(setup.configured_for_steps(method, seed, before["steps"]))
        tenth = max(1, settings.steps // 10)
        rate = {"learning_rate": lambda step: settings.lr * min(1.0, (step + 1) / tenth)}
        losses = _learn(setup, model, texts, settings, seed, steps=settings.steps, **rate)
        return {
            "before": {key: value for key, value in before.items() if key != "curve"},
            **setup.kept(setup.measure(model, seed)),
            "instruction_nll": [round(losses[0], 4), round(losses[-1], 4)],
        }

    return Cell(name=f"recovery-{name}", seed=seed, settings=fixed, run=run, needs=(unlearned,))


def _relearning_cell(setup: Setup, settings: RelearningSettings, name: str, seed: int) -> Cell:
    config = None
    if name != "retrained":
        config = deep.configured(setup, name, seed) if name == "deep" else setup.configured(name, seed)
    stories = micro.stories("forget")
    chosen = set(random.Random(seed).sample(range(len(stories)), len(stories) // 10))
    asked: dict[str, tuple[Question, ...]] = {"others": (), "learned": ()}
    texts = Documents("again", [text for number in sorted(chosen) for text in stories[number].documents])
    for number, story in enumerate(stories):
        asked["learned" if number in chosen else "others"] += story.questions

    def run() -> dict[str, Any]:
        model = setup.forget(config)[0] if config else setup.load(str(setup.config.reference))
        curve: dict[str, list[float]] = {"step": [], "others": [], "learned": []}

        def after_step(step: int) -> bool:
            if step in settings.steps:
                curve["step"].append(step)
                for part, metric in setup.asked(model, seed, asked, "forget").items():
                    curve[part].append(metric["value"])
            return False

        after_step(0)
        rate = {"learning_rate": lambda step: settings.lr}
        _learn(setup, model, texts, settings, seed, steps=max(settings.steps), after_step=after_step, **rate)
        return {"metrics": {}, "relearning": curve}

    fixed = {
        "from": setup.fixed(config) if config else setup.fixed(setup.config)["inputs"]["reference"],
        "relearning": differing(settings),
        "documents": texts.sha256[:16],
    }
    return Cell(name=f"relearn-{name}", seed=seed, settings=fixed, run=run)


def _relearned(contents: Sequence[Content]) -> list[Content]:
    """Those that learned a tenth again, with shorter names."""
    return paper.renamed((content for content in contents if "relearning" in content), "relearn-")


def _both(contents: Sequence[Content]) -> list[Content]:
    """Each model as it was before and as it is after finetuning, in turn."""
    both = []
    for content in paper.renamed((content for content in contents if "before" in content), "recovery-"):
        both.append(content | {"metrics": content["before"]["metrics"]})
        both.append(content | {"name": f"{content['name']}, finetuned"})
    return both


def recovery_table(contents: Sequence[Content]) -> str:
    """Two rows for each model: before and after finetuning; and a row for each that learned a tenth again."""
    parts = [paper.result_table(both, columns())] if (both := _both(contents)) else []
    if again := _relearned(contents):
        steps = again[0]["relearning"]["step"]
        rows = []
        for name, group in paper.by_name(again).items():
            found = [content["relearning"] for content in group if content["relearning"]["step"] == steps]
            others = [paper.mean_and_std(curve["others"][place] for curve in found) for place in range(len(steps))]
            rows.append([name, *others, paper.mean_and_std(curve["learned"][-1] for curve in found)])
        titles = ["knowmem_f of the other people", *(f"after {step}" for step in steps)]
        parts += [RELEARNING, markdown_table([*titles, f"of the learned, after {steps[-1]}"], rows)]
    return "\n\n".join(parts)


def recovery_figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """Utility against what is recited and known, before and after; and what a tenth brings back of the rest."""

    def points(content: Content, metric: str) -> list[tuple[float, float]]:
        return list(zip(content["relearning"]["step"], content["relearning"]["others"], strict=True))

    titles = {"knowmem_f": ("Answers about the other nine tenths", "knowmem_f ↓")}
    drawn = paper.panels("recovery", benchmark, _both(contents), ("verbmem_f", "knowmem_f"))
    return drawn + paper.curves("relearn", benchmark, _relearned(contents), titles, points)


def sequential_cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Both methods with every seed, in both ways."""
    ways = (False, True) if setup.config.reference else (False,)
    return [_sequential_cell(setup, name, seed, folder, way) for way in ways for name in ASKED_AGAIN for seed in seeds]


def _sequential_cell(setup: Setup, name: str, seed: int, folder: CellFolder, until_forgotten: bool) -> Cell:
    whole, target = methods.cell(setup, name, seed), methods.cell(setup, "target", 0)
    folds = [setup.fixed(setup.configured(name, seed, documents=fold))["inputs"]["documents"] for fold in setup.folds]

    def run() -> dict[str, Any]:
        configured = functools.partial(setup.configured, name, seed)
        if not until_forgotten:
            done = folder.get(whole)
            given = {"method": Method(**done["method"]), "steps": done["steps"], "reference": None, "probes": 4}
            configured = functools.partial(setup.configured_for_steps, seed=seed, **given)
        requests = [{"request": 0, **_short(folder.get(target))}]
        with tempfile.TemporaryDirectory() as work:
            model = setup.config.model
            for number, fold in enumerate(setup.folds, start=1):
                out = Path(work) / f"request_{number}"
                content = setup.forget(configured(model=model, documents=fold, out=str(out), save_dtype="float32"))[1]
                kept = {key: content[key] for key in ("method", "steps", "stop", "forget_seconds")}
                requests.append({"request": number, **_short(content), **kept})
                model = str(out / "model")
        return {"requests": requests, "metrics": requests[-1]["metrics"]}

    ending = "-until-forgotten" if until_forgotten else ""
    fixed = {"each as" if until_forgotten else "steps and numbers as": dict(whole.settings), "requests": folds}
    needs = (target,) if until_forgotten else (whole, target)
    return Cell(name=f"sequential-{name}{ending}", seed=seed, settings=fixed, run=run, needs=needs)


def _short(content: Content) -> Content:
    """The metrics that the table shows."""
    return {"metrics": {name: content["metrics"][name] for name in METRICS if name in content["metrics"]}}


def sequential_table(contents: Sequence[Content]) -> str:
    """The model before the first request, then a row for each method and request, with all steps so far."""
    rows: list[Content] = []
    for content in paper.renamed(contents, "sequential-"):
        steps = 0
        for number, request in enumerate(content["requests"]):
            steps += request.get("steps", 0)
            if number or not rows:  # the target is the same for all
                name = f"{content['name']}, after {number}" if number else "target"
                rows.append({"name": name, "metrics": request["metrics"], "steps": steps})
    return paper.result_table(rows, METRICS, {"steps": paper.RUN_COLUMNS["steps"]})


def sequential_figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """Utility after each request."""

    def points(content: Content, metric: str) -> list[tuple[float, float]]:
        found = [(request["request"], request["metrics"].get(metric)) for request in content["requests"]]
        return [(number, measured["value"]) for number, measured in found if measured]

    titles = {metric: ("Utility after sequential requests", metric) for metric in ("knowmem_r", "nll_general")}
    short = paper.renamed(contents, "sequential-")
    return paper.curves("sequential", benchmark, short, titles, points, over="forget requests done")


EXPERIMENTS = {
    "recovery": Experiment(
        title="the recovery table: unrelated finetuning after unlearning",
        see="What comes back shows as verbmem_f and knowmem_f that are higher in the second row of a model than in the "
        "first; as much as the retrained model gains is not memory.",
        cells=recovery_cells,
        shows=lambda name: name.startswith(("recovery-", "relearn-")),
        table=recovery_table,
        figures=recovery_figures,
        drawn=("documents",),
    ),
    "sequential": Experiment(
        title="the sustainability figure: four requests one after the other",
        see="What requests cost shows in knowmem_r and nll_general from row to row: a method that can be used again "
        "and again keeps them where they were before the first request.",
        cells=sequential_cells,
        shows=lambda name: name.startswith("sequential-"),
        table=sequential_table,
        figures=sequential_figures,
    ),
}
