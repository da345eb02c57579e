"""Deep forgetting and what it rests on: not recited, not known, not detectable, and the neighbours untouched.

``deep`` is what ``unteach forget`` does where a base model, keep documents and holdout documents are given. All other
rows change one thing and run until a membership test finds as little as in the retrained model (PrivLeak 0 on the stop
rule's texts), so that they can be compared: one that forgets more also loses more.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig, Method, Stop
from unteach.corpora import Benchmark, Question
from unteach.errors import InputError
from unteach.evaluation.formulas import privleak
from unteach.evaluation.metrics import METRICS, RAW_AUC
from unteach.experiments.cells import Cell, CellFolder, by_name, mean_and_std, result_table
from unteach.experiments.paper import Experiment
from unteach.experiments.presets import DEEP
from unteach.experiments.setups import Setup
from unteach.report.plots import curve_figure
from unteach.report.style import Figure, look

__all__ = ["EXPERIMENT", "DeepSettings", "configured"]

PREFIX = "deep-"
MATCH = DEEP.chosen(keep=True, base=True)
"""What the program chooses by itself where everything is given, by name: so that one thing can be changed."""
MEAN_TEACHER = dataclasses.replace(MATCH, optimizer="mean_teacher")
COLUMNS = (
    "verbmem_f", "knowmem_f", "knowmem_r", "knowmem_r_kept", "knowmem_r_others", "knowmem_pretraining", "privleak",
    "nll_general", "degenerate", "tofu_forget_quality", "tofu_model_utility",
)  # fmt: skip
DRAWN = ("knowmem_r", "knowmem_f")


@dataclass(frozen=True, kw_only=True)
class DeepSettings:
    """What this experiment adds to the benchmark's settings."""

    max_steps: int = 200
    """Longest run."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method of the table: how it differs from ``deep``."""

    method: Method = DEEP
    changes: Callable[[Setup], dict[str, Any]] = lambda setup: {}
    """Other inputs."""
    alpha: float | None = None
    """Times the α of ``deep``."""
    matched: bool = True
    """Whether it runs until PrivLeak 0, not until a rule of its own."""
    embedded: bool = False
    """Whether only the embedded benchmark has what it needs."""


ROWS: dict[str, Row] = {
    "deep": Row(matched=False),
    "deep-matched": Row(),
    "deep-softplus": Row(method=dataclasses.replace(MATCH, loss_options={"pull": "softplus"})),
    "deep-without-keep": Row(method=MATCH, changes=lambda setup: {"keep": None}),
    "deep-without-base": Row(changes=lambda setup: {"base": None}),
    "deep-half-kept": Row(changes=lambda setup: {"keep": setup.keep_half}, embedded=True),
    "deep-small-base": Row(changes=lambda setup: {"base": "micro:small"}, embedded=True),
    "deep-mean-teacher-anchor": Row(method=dataclasses.replace(MEAN_TEACHER, anchor=1.0)),
    "deep-mean-teacher": Row(method=MEAN_TEACHER),
    "deep-alpha-0.4": Row(alpha=0.4),
    "deep-alpha-2.5": Row(alpha=2.5),
    "deep-alpha-grows": Row(method=dataclasses.replace(DEEP, alpha_growth=0.05)),
    "deep-paper": Row(
        method=Method(optimizer="mean_teacher", loss="nlul"), changes=lambda setup: {"keep": None, "base": None}
    ),
}
"""By the names of their cells."""


def configured(setup: Setup, name: str, seed: int) -> ForgetConfig:
    """The settings of a row's run; α is left to be measured."""
    row, settings = ROWS[name], setup.own_settings("deep", DeepSettings)
    given: dict[str, Any] = {
        "keep": setup.keep,
        "base": setup.base,
        "holdout": setup.holdout,
        "questions": setup.questions,
        "keep_questions": setup.keep_questions,
        "max_steps": settings.max_steps,
    }
    given |= {"stop": _until_parity(setup)} if row.matched else {"reference": None}
    return setup.configured(row.method, seed, **(given | row.changes(setup)))


def _until_parity(setup: Setup) -> Stop:
    """Until the membership test finds as little as in the retrained model; questions are asked along the way.

    Without holdout documents there is nothing to match on, and the run has a rule of its own.
    """
    if not setup.holdout:
        return setup.config.stop
    watched = [f"{RAW_AUC} >= {'reference' if setup.config.reference else 0.5}"]
    has_its_own = setup.embedded and not setup.limit
    if setup.questions or has_its_own:
        watched.append("knowmem_f <= 100")  # always so
    if setup.keep_questions or has_its_own:
        watched.append("knowmem_r >= 0")
    return dataclasses.replace(setup.config.stop, metric=" and ".join(watched))


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """The two models to compare with, once, and every row with every seed."""
    missing = [option for option in ("base", "keep") if not getattr(setup, option)]
    if missing:
        raise InputError([f"{option} is missing: deep forgetting needs it; give --{option}" for option in missing])
    found = [_measured(setup, "target", setup.config.model)]
    if setup.config.reference:
        found.append(_measured(setup, "retrained", setup.config.reference))
    names = [name for name, row in ROWS.items() if setup.embedded or not row.embedded]
    return found + [_cell(setup, name, seed, folder) for name in names for seed in seeds]


def _measured(setup: Setup, name: str, model: str) -> Cell:
    """A model that is only measured."""
    inputs = setup.fixed(setup.config)["inputs"]
    kept = ("model", "reference") if name == "target" else ("reference",)

    def run() -> dict[str, Any]:
        from unteach.models import load_model

        loaded = load_model(model, device=setup.config.resolved_device())[0]
        content = setup.kept(setup.measure(loaded, 0))
        content["metrics"] |= _asked(setup, loaded, 0, _groups(setup, half=False))
        return content

    settings = {
        "inputs": {part: inputs[part] for part in kept if part in inputs},
        "measured": setup.final.data_sha256,
        "asked": sorted(_groups(setup, half=False)),
    }
    return Cell(name=PREFIX + name, seed=0, settings=settings, run=run)


def _cell(setup: Setup, name: str, seed: int, folder: CellFolder) -> Cell:
    row, config = ROWS[name], configured(setup, name, seed)
    groups = _groups(setup, half=config.keep is not None and config.keep == setup.keep_half)
    fixed = setup.fixed(config) | ({"asked": sorted(groups)} if groups else {})
    needs = []
    if row.alpha is not None:
        fixed["alpha"] = f"{row.alpha} times that of deep"
        needs = [_cell(setup, "deep", seed, folder)]

    def run() -> dict[str, Any]:
        chosen = config
        if row.alpha is not None:
            alpha = row.alpha * folder.get(needs[0])["method"]["alpha"]
            chosen = dataclasses.replace(config, method=dataclasses.replace(config.method, alpha=alpha))
        with tempfile.TemporaryDirectory() as work:
            result, content = setup.forget(dataclasses.replace(chosen, out=str(Path(work) / "run")))
        content["metrics"] |= _asked(setup, result.model, seed, groups)
        return content

    return Cell(name=name, seed=seed, settings=fixed, run=run, needs=needs)


def _groups(setup: Setup, *, half: bool) -> dict[str, tuple[Question, ...]]:
    """Further questions, by the name of the metric: about people of the pretraining text; where half of the neighbours
    are kept, about these and about the others."""
    if not setup.embedded:
        return {}
    from unteach.corpora import micro

    found = {"knowmem_pretraining": micro.questions("pretraining")}
    if half:
        stories = micro.stories("retain")
        for name, chosen in (("knowmem_r_kept", stories[::2]), ("knowmem_r_others", stories[1::2])):
            found[name] = tuple(question for story in chosen for question in story.questions)
    return {name: questions[: setup.limit] for name, questions in found.items()}


def _asked(setup: Setup, model: Any, seed: int, groups: Mapping[str, tuple[Question, ...]]) -> dict[str, Any]:
    """Scores of further questions, put after the worked examples of the retain questions."""
    from unteach.evaluation import evaluate
    from unteach.models import load_tokenizer

    tokenizer, metrics = load_tokenizer(setup.config.model), {}
    for name, questions in groups.items():
        benchmark = Benchmark(
            name,
            knowledge_retain=questions,
            knowledge_retain_examples=setup.final.knowledge_retain_examples,
            settings=setup.final.settings,
        )
        scores = evaluate(model, tokenizer, benchmark, measurements=["knowmem_r"], seed=seed)
        metrics[name] = setup.kept(scores)["metrics"]["knowmem_r"]
    return metrics


def table(contents: Sequence[dict[str, Any]]) -> str:
    """Mean (std) over seeds, with the α that was used and how the runs ended."""
    groups = by_name(contents)
    metrics = {name.removeprefix(PREFIX): [c["metrics"] for c in group] for name, group in groups.items()}
    alphas = [mean_and_std([c.get("method", {}).get("alpha") for c in group], 3) for group in groups.values()]
    steps = [mean_and_std([c.get("steps") for c in group], 0) for group in groups.values()]
    ends = [", ".join(sorted({c["stop"]["rule"] for c in group if "stop" in c})) or "–" for group in groups.values()]
    return result_table(metrics, COLUMNS, {"alpha": alphas, "steps": steps, "ended by": ends})


def figures(benchmark: str, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """What is known of kept and of forgotten documents along each run, over PrivLeak on the stop rule's texts."""
    drawn = []
    runs = by_name(content for content in contents if "stop_reference" in content)
    for metric in DRAWN:
        lines = [
            (name.removeprefix(PREFIX), look("method", place), content["seed"], points)
            for place, (name, group) in enumerate(runs.items())
            for content in group
            if (points := _points(content, metric))
        ]
        keys = list({label: style for label, style, _, _ in lines}.items())
        if lines:
            title = f"{METRICS[metric].title[:1].upper()}{METRICS[metric].title[1:]}"
            name = f"deep-{metric}-{benchmark}"
            drawn.append(curve_figure(name, title, f"{metric} {METRICS[metric].arrow}", lines, keys, False, "PrivLeak"))
    return drawn


def _points(content: Mapping[str, Any], metric: str) -> list[tuple[float, float]]:
    """(PrivLeak, metric) at each evaluation of the stop rule that has both."""
    retrained = content["stop_reference"].get(RAW_AUC)
    looks = [look for look in content["stop_scores"] if RAW_AUC in look and metric in look]
    return [(privleak(look[RAW_AUC], retrained), look[metric]) for look in looks] if retrained else []


EXPERIMENT = Experiment(
    title="deep forgetting and what it rests on, matched on PrivLeak 0",
    see="Wanted are the retrained model's verbmem_f and knowmem_f with the target's knowmem_r and nll_general. The row "
    "deep ends by its own rule; every other row changes one thing of it and ends (stop) where a membership test finds "
    "as little as in the retrained model on the rule's own texts. One that ended by max_steps or utility_floor did not "
    "get there.",
    cells=cells,
    shows=lambda name: name == "deep" or name.startswith(PREFIX),
    table=table,
    figures=figures,
)
