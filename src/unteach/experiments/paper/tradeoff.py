"""Figure 3: utility against what is recited, known and leaked; drawn from the cells of ``methods``, measures nothing.

Others' published points are shown in panels of their own unless the benchmark is theirs: they are from other harnesses
and other models, and even on the same benchmark they are marked so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unteach.evaluation.formulas import Metric
from unteach.evaluation.scores import Scores
from unteach.experiments.cells import by_name, result_table
from unteach.experiments.paper import Experiment, methods
from unteach.report.load import Published, published_points
from unteach.report.plots import tradeoff_figure
from unteach.report.style import Figure
from unteach.report.tables import Member, MethodRow, Role

__all__ = ["EXPERIMENT", "panels"]

AGAINST = ("verbmem_f", "knowmem_f", "privleak")
UTILITIES = {"knowmem_r": "", "nll_general": "-nll", "tofu_model_utility": "-utility"}
"""Drawn upwards, and what the figure's name gets. A small model may know too little for the first to say anything."""


def figures(benchmark: str, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """A panel for each metric; with others' panels where ours have none of their points."""
    points = published_points(benchmark)
    drawn = panels("tradeoff", benchmark, contents, AGAINST, points)
    if not points:
        theirs = published_points("muse-news")
        drawn += [tradeoff_figure("MUSE-News", m, (), theirs, f"tradeoff-{m}-published") for m in AGAINST]
    return drawn


def panels(
    experiment: str,
    benchmark: str,
    contents: Sequence[dict[str, Any]],
    against: Sequence[str],
    points: Sequence[Published] = (),
) -> list[Figure]:
    """Utility against each of some metrics (to the right), a figure for each pair that was measured.

    ``contents`` have ``name``, ``seed`` and ``metrics`` of each cell; those of one name are seeds of one row. The
    figures' names begin with the experiment's and end with the benchmark's; ``points`` are others'.
    """
    rows = [_method(name, group, place) for place, (name, group) in enumerate(by_name(contents).items())]
    drawn = []
    for utility, ending in UTILITIES.items():
        for metric in against:
            shown = [row for row in rows if row.cell(metric).mean is not None and row.cell(utility).mean is not None]
            if shown:
                name = f"{experiment}-{metric}{ending}-{benchmark}"
                drawn.append(tradeoff_figure(benchmark, metric, shown, points, name, utility))
    return drawn


def table(contents: Sequence[dict[str, Any]]) -> str:
    """The points."""
    metrics = {name: [content["metrics"] for content in group] for name, group in by_name(contents).items()}
    return result_table(metrics, ("knowmem_r", *AGAINST, "nll_general"))


def _method(name: str, group: Sequence[dict[str, Any]], place: int) -> MethodRow:
    """A row of the report from cells."""
    role: Role = "target" if name == "target" else "retrained" if name == "retrained" else "method"
    members = []
    for content in group:
        metrics = {key: Metric(m["value"], m["low"], m["high"], 0, None, "") for key, m in content["metrics"].items()}
        members.append(Member(content["seed"], Scores("", metrics, {}, name=name, seed=content["seed"])))
    return MethodRow(name, role, tuple(members), place)


EXPERIMENT = Experiment(
    title="Figure 3: utility against recital, knowledge and leak, from the cells of methods",
    see="The better of two methods is the one that keeps more (knowmem_r higher, nll_general lower) where as much is "
    "forgotten.",
    cells=methods.cells,
    shows=methods.shows,
    table=table,
    figures=figures,
    measures=False,
)
