"""The paper's tables and figures: what an experiment is, and how cells are shown in a table or a figure.

To add an experiment, add it to the ``EXPERIMENTS`` of a file here, or add a file; ``unteach reproduce NAME`` finds it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unteach.evaluation.formulas import Metric, privleak
from unteach.evaluation.metrics import METRICS, RAW_AUC, describe
from unteach.evaluation.scores import Scores
from unteach.report.load import Published
from unteach.report.plots import curve_figure, tradeoff_figure
from unteach.report.style import Figure, look
from unteach.report.tables import Member, MethodRow, role_of
from unteach.writing import format_number, markdown_table

if TYPE_CHECKING:
    from unteach.experiments.cells import Cell, CellFolder

__all__ = [
    "RUN_COLUMNS", "Column", "Content", "Experiment", "by_name", "curves", "experiments", "looks", "mean_and_std",
    "panels", "renamed", "result_table",
]  # fmt: skip

Content = dict[str, Any]
"""What the file of a cell holds."""
UTILITIES = {"knowmem_r": "", "nll_general": "-nll", "tofu_model_utility": "-utility"}
"""Drawn upwards, and what the figure's name gets. A small model may know too little for the first to say anything."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure of the paper, made of cells."""

    title: str
    """What it is in the paper, and what is compared."""
    see: str
    """What to see in its table, in a sentence or two."""
    cells: Callable[[Any, Sequence[int], CellFolder], list[Cell]]
    """Its cells, from the benchmark's ``Setup``, the seeds, and the folder of those that are done."""
    shows: Callable[[str], bool]
    """Whether its table shows cells of that name: so it can be made from a folder alone."""
    table: Callable[[Sequence[Content]], str]
    """Its Markdown table."""
    figures: Callable[[str, Sequence[Content]], list[Figure]] = lambda benchmark, contents: []
    """Its figures; the benchmark's name is part of theirs."""
    measures: bool = True
    """False: it shows what another experiment has measured."""
    drawn: Sequence[str] = ()
    """Settings that every seed draws anew, as its table says; others are to be the same for all seeds of a row."""


@functools.cache
def experiments() -> dict[str, Experiment]:
    """All experiments by name."""
    found: dict[str, Experiment] = {}
    for module in pkgutil.iter_modules(__path__):
        found |= importlib.import_module(f"{__name__}.{module.name}").EXPERIMENTS
    return dict(sorted(found.items()))


def by_name(contents: Iterable[Content]) -> dict[str, list[Content]]:
    """Contents of cells grouped by name, in their order: the seeds of each."""
    groups: dict[str, list[Content]] = {}
    for content in contents:
        groups.setdefault(content["name"], []).append(content)
    return groups


def renamed(contents: Iterable[Content], prefix: str) -> list[Content]:
    """The same without a beginning of their names."""
    return [content | {"name": content["name"].removeprefix(prefix)} for content in contents]


def looks(content: Content) -> list[dict[str, float]]:
    """What a run's stop rule measured, look by look, with ``privleak`` where the retrained model's AUC is known."""
    goal = content.get("stop_reference", {}).get(RAW_AUC)
    return [
        look | ({"privleak": privleak(look[RAW_AUC], goal)} if goal and RAW_AUC in look else {})
        for look in content["stop_scores"]
    ]


def mean_and_std(values: Iterable[float | None], decimals: int = 1) -> str:
    """``mean (std)`` over seeds, as in the paper's tables; the mean alone for one seed, a dash for none."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    text = format_number(statistics.fmean(known), decimals)
    return text if len(known) < 2 else f"{text} ({format_number(statistics.stdev(known), decimals)})"


Column = Callable[[Sequence[Content]], str]
RUN_COLUMNS: dict[str, Column] = {
    "steps": lambda group: mean_and_std((content.get("steps") for content in group), 0),
    "ended by": lambda group: ", ".join(sorted({c["stop"]["rule"] for c in group if "stop" in c})) or "–",
}
"""Steps needed, and how the runs ended: ``extra`` columns of a ``result_table``."""


def result_table(contents: Iterable[Content], metrics: Sequence[str], extra: Mapping[str, Column] = {}) -> str:
    """A Markdown table: a row per name, mean (std) over seeds of each metric that any row has.

    Args:
        contents: Of cells: ``name`` and ``metrics``, ``{"verbmem_f": {"value": ...}, ...}``.
        metrics: Columns in their order.
        extra: Further columns: title → a row's text from the contents of its seeds.
    """
    groups = by_name(contents)
    shown = [m for m in metrics if any(m in content["metrics"] for group in groups.values() for content in group)]
    titles = [f"{m} {METRICS[m].arrow}".strip() if m in METRICS else m for m in shown]
    rows = []
    for name, group in groups.items():
        found = {m: [content["metrics"].get(m, {}).get("value") for content in group] for m in shown}
        texts = [mean_and_std(values, describe(m).decimals) for m, values in found.items()]
        rows.append([name, *texts, *(column(group) for column in extra.values())])
    return markdown_table(["", *titles, *extra], rows)


def panels(
    start: str, benchmark: str, contents: Iterable[Content], against: Sequence[str], points: Sequence[Published] = ()
) -> list[Figure]:
    """Utility against each of some metrics, a figure for each pair that was measured; ``points`` are others'."""
    rows = [_method(name, group, place) for place, (name, group) in enumerate(by_name(contents).items())]
    drawn = []
    for utility, ending in UTILITIES.items():
        for metric in against:
            shown = [row for row in rows if row.cell(metric).mean is not None and row.cell(utility).mean is not None]
            if shown:
                name = f"{start}-{metric}{ending}-{benchmark}"
                drawn.append(tradeoff_figure(benchmark, metric, shown, points, name, utility))
    return drawn


def _method(name: str, group: Sequence[Content], place: int) -> MethodRow:
    """A row of the report from cells."""
    members = []
    for content in group:
        metrics = {key: Metric(m["value"], m["low"], m["high"], 0, None, "") for key, m in content["metrics"].items()}
        members.append(Member(content["seed"], Scores("", metrics, {}, name=name, seed=content["seed"])))
    return MethodRow(name, role_of(name), tuple(members), place)


def curves(
    start: str,
    benchmark: str,
    contents: Sequence[Content],
    titles: Mapping[str, tuple[str, str]],
    points: Callable[[Content, str], list[tuple[float, float]]],
    *,
    logarithmic: bool = False,
    over: str = "step",
) -> list[Figure]:
    """For each metric, with its title and unit, a figure with a line of ``points`` for each cell that has any."""
    drawn = []
    for metric, (title, unit) in titles.items():
        lines = []
        for place, (label, group) in enumerate(by_name(contents).items()):
            style = look("retrained" if label == "retrained" else "method", place)
            lines += [(label, style, content["seed"], found) for content in group if (found := points(content, metric))]
        keys = list({label: style for label, style, _, _ in lines}.items())
        if lines:
            name = f"{start}-{metric}-{benchmark}"
            drawn.append(curve_figure(name, title, unit, lines, keys, logarithmic, over))
    return drawn
