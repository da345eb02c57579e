"""Whole runs beside each other: what each method has kept where as much is forgotten, not only where it stops.

Every run takes its steps whatever it reaches, unless general text breaks, and is looked at again and again on the
passages, questions and texts of a stop rule. Methods are then compared where they are alike: at the same recital, and
at the same loss on the forgotten documents, each half-way to the retrained model's and there.

``authors`` is the paper's method with the numbers of its authors' runs, which were made for 7B models and, once
something is forgotten, clip nearly every step. A small model they hardly move, so ``authors-x10`` has ten times their
α. Two more rows say which part of it forgets: ``authors-x10-unclipped`` is the slow natural gradient alone,
``authors-descent`` clipped descent alone: α is a thousand times theirs, so that nothing but the forget loss is left in
the direction of a step, whose length the clip gives.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unteach.config import ForgetConfig, Method
from unteach.evaluation.metrics import RAW_AUC, describe
from unteach.experiments import paper
from unteach.experiments.cells import Cell, CellFolder
from unteach.experiments.paper import Content, Experiment
from unteach.experiments.setups import NEVER, Setup
from unteach.job.presets import preset
from unteach.report.style import Figure
from unteach.settings import from_values
from unteach.writing import markdown_table

__all__ = ["EXPERIMENTS", "TrajectoriesSettings", "configured", "matched"]

PREFIX = "trajectory-"
METHODS = ("mt-nlul-kl-paper", "mt-nlul-qkl", "adamw-nlul-kl", "adamw-ll-kl", "adamw-npo-kl")
AUTHORS: dict[str, dict[str, Any]] = {
    "authors": {},
    "authors-x10": {"alpha": 0.5},
    "authors-x10-unclipped": {"alpha": 0.5, "clip": None},
    "authors-descent": {"alpha": 50.0},
}
"""What each changes of the authors' method."""
SLOW = {"authors": 1, "authors-x10": 2, "authors-x10-unclipped": 2}
"""Rows that take ``slow_steps``, divided by this."""
MATCHED = {"verbmem_f": "recital", "nll_forget": "loss on the forgotten documents"}
"""By what runs are matched."""
SHARES = {"half-way to": 0.5, "at": 1.0}
"""Of the way from the model before to the retrained one."""
FARTHEST = 1.1
"""Figures end where a run has gone so many times the way to the retrained model."""
DIFFERENCE, PRIVLEAK = "nll_general_rise", "privleak"
COLUMNS = (DIFFERENCE, "knowmem_r", "nll_retain", "knowmem_f", PRIVLEAK, "nll_holdout", "degenerate")


@dataclass(frozen=True, kw_only=True)
class TrajectoriesSettings:
    """What this experiment adds to the benchmark's settings."""

    steps: int = 80
    """Of every run but the slow ones."""
    every: int = 4
    """Steps between two looks at it."""
    slow_steps: int = 800
    """Of the authors' numbers; half of that with ten times their α."""
    slow_every: int = 40


def authors(name: str) -> Method:
    """The paper's method as its authors ran it, or with what a row changes of it."""
    method: Method = from_values(Method, preset("paper-mt-nlul-kl")["method"] | AUTHORS[name], "")
    return method


def configured(setup: Setup, name: str, seed: int) -> ForgetConfig:
    """The settings of a run, whose rule is never met and has everything looked at."""
    settings: TrajectoriesSettings = setup.own_settings("trajectories", TrajectoriesSettings)
    steps, every = settings.steps, settings.every
    if name in SLOW:
        steps, every = settings.slow_steps // SLOW[name], settings.slow_every // SLOW[name]
    rule = setup.watching(NEVER, *([f"{RAW_AUC} >= 0"] if setup.holdout else []))
    return setup.configured(
        authors(name) if name in AUTHORS else name,
        seed,
        stop=dataclasses.replace(rule, refine=False),
        max_steps=steps,
        evaluate_every=every,
        **{part: getattr(setup, part) for part in ("holdout", "questions", "keep_questions")},
    )


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Every method with every seed; its metrics are of the model with the least recital."""
    names = itertools.product((*METHODS, *AUTHORS), seeds)
    return [setup.cell(f"{PREFIX}{name}", configured(setup, name, seed)) for name, seed in names]


def _looks(content: Content) -> list[dict[str, float]]:
    """What was measured along a run, with by how much general text rose."""
    looks = paper.looks(content)
    return [look | {DIFFERENCE: look["nll_general"] - looks[0]["nll_general"]} for look in looks]


def matched(content: Content, by: str, level: float) -> dict[str, float] | None:
    """A run where a metric first has a level, in a straight line between the looks before and after; None: nowhere."""
    looks = [look for look in _looks(content) if by in look]
    for earlier, later in itertools.pairwise(looks):
        start, end = earlier[by] - level, later[by] - level
        if start * end <= 0 and start != end:
            share = start / (start - end)
            return {name: earlier[name] + share * (later[name] - earlier[name]) for name in earlier if name in later}
    return None


def _level(content: Content, by: str, share: float) -> float | None:
    """Such a share of the way from the model before a run to the retrained one, on the passages of its seed."""
    before, goal = content["stop_scores"][0].get(by), content["stop_reference"].get(by)
    return None if before is None or goal is None else before + share * (goal - before)


def table(contents: Sequence[Content]) -> str:
    """A table for every matched point: mean (std) over the seeds that came there, and how many did."""
    runs = [content for content in paper.renamed(contents, PREFIX) if "stop_reference" in content]
    parts = []
    for (by, what), (where, share) in itertools.product(MATCHED.items(), SHARES.items()):
        levels = [level for content in runs if (level := _level(content, by, share)) is not None]
        if not levels:
            continue
        rows = [_retrained(runs), *(_row(name, group, by, share) for name, group in paper.by_name(runs).items())]
        shown = markdown_table(["", "came there", "step", *COLUMNS, "clipped"], rows)
        level = statistics.fmean(levels)
        parts.append(f"The same {what}, {where} the retrained model's ({by} {level:.3g}):\n\n{shown}")
    return "\n\n".join(parts)


def _retrained(runs: Sequence[Content]) -> list[str]:
    """The retrained model itself, on the passages of each seed: what its general text costs more than the target's."""
    own = list[dict[str, float]]()
    for content in {content["seed"]: content for content in runs}.values():
        scores = paper.looks({**content, "stop_scores": [content["stop_reference"]]})[0]
        before, after = content["stop_scores"][0].get("nll_general"), scores.get("nll_general")
        rise = {} if before is None or after is None else {DIFFERENCE: after - before}
        own.append(scores | rise)
    return ["retrained", "–", "–", *_values(own), "–"]


def _values(points: Sequence[dict[str, float]]) -> list[str]:
    return [paper.mean_and_std((p.get(metric) for p in points), describe(metric).decimals) for metric in COLUMNS]


def _row(name: str, group: Sequence[Content], by: str, share: float) -> list[str]:
    levels = [_level(content, by, share) for content in group]
    found = [matched(content, by, level) for content, level in zip(group, levels, strict=True) if level is not None]
    points = [point for point in found if point is not None]
    step = paper.mean_and_std((point["step"] for point in points), 0)
    clipped = paper.mean_and_std((_clipped(content) for content in group), 0)
    return [name, f"{len(points)} of {len(group)}", step, *_values(points), clipped]


def _clipped(content: Content) -> float | None:
    """Percent of the steps, of those that the curve has, at which the gradient was longer than the clip."""
    clip, norms = content["method"]["clip"], content["curve"]["grad_norm"]
    return None if clip is None else 100 * sum(norm > clip for norm in norms) / len(norms)


def figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """What is kept, known and detectable over what is forgotten; and the norm of the gradient over the steps."""
    runs = [content for content in paper.renamed(contents, PREFIX) if "stop_reference" in content]
    titles = {
        DIFFERENCE: ("General text", "nats per token more than before ↓"),
        "knowmem_r": ("Answers about kept documents", "knowmem_r ↑"),
        "knowmem_f": ("Answers about forgotten documents", "knowmem_f ↓"),
        PRIVLEAK: ("Membership", "PrivLeak → 0"),
    }
    drawn = []
    for by in MATCHED:
        points = functools.partial(_points, by=by)
        drawn += paper.curves(f"trajectories-by-{by}", benchmark, runs, titles, points, over=by)
    slow = [content for content in runs if content["name"] in AUTHORS]
    norm = {"grad_norm": ("Gradient norm with the authors' numbers", "before clipping at 1")}
    return drawn + paper.curves("trajectories", benchmark, slow, norm, _curve, logarithmic=True)


def _points(content: Content, metric: str, by: str) -> list[tuple[float, float]]:
    """(forgotten, metric) of each look, to the first that has gone too far to be compared."""
    start, goal = _level(content, by, 0.0), _level(content, by, 1.0)
    points = []
    for look in _looks(content):
        if by in look and metric in look:
            points.append((look[by], look[metric]))
            if start is not None and goal is not None and abs(look[by] - start) > FARTHEST * abs(goal - start):
                break
    return points


def _curve(content: Content, field: str) -> list[tuple[float, float]]:
    return list(zip(content["curve"]["step"], content["curve"][field], strict=True))


EXPERIMENTS: dict[str, Any] = {
    "trajectories": Experiment(
        title="whole runs, compared where as much is forgotten",
        see="Of two methods in one table the better one has kept more: general text costs less, kept answers are more, "
        "kept documents (nll_retain, where they are known) and never-seen ones (nll_holdout) are as likely as before. "
        "nll_general_rise is over the target's, to be read beside the retrained model's own; below zero is overfitting "
        "undone, not more kept. All is measured on the passages, questions and texts of a stop rule; clipped is the "
        "share of steps whose gradient was shortened.",
        cells=cells,
        shows=lambda name: name.startswith(PREFIX),
        table=table,
        figures=figures,
    )
}
