"""The sustainability figure: four disjoint forget requests one after the other, and what is left after each.

Twice: as in the paper, without a stop rule and with nothing tuned anew, every request taking as many steps as the
method needed for all documents in ``methods`` (that cell is measured first where it is missing), with the numbers it
ran with there; and as ``unteach forget`` would do it, each request until its documents are recited no better than by
the retrained model, the mean teacher's numbers measured anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unteach.config import Method
from unteach.experiments.cells import Cell, CellFolder, by_name, mean_and_std, result_table
from unteach.experiments.paper import Experiment, methods
from unteach.experiments.setups import Setup
from unteach.report.style import Canvas, Figure, look, make_figure

__all__ = ["EXPERIMENT"]

COMPARED = ("mt-nlul-qkl", "adamw-npo-kl")
METRICS = ("verbmem_f", "knowmem_f", "knowmem_r", "privleak", "mmlu_val", "nll_general", "degenerate")
UNTIL_FORGOTTEN = "-until-forgotten"
"""Ending of the cells whose requests stop by themselves."""
CHECKED = 4
"""Probes of the forget job's own measurement, which is not used here."""


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Both methods with every seed, in both ways."""
    ways = (False, True) if setup.config.reference else (False,)
    return [_cell(setup, name, seed, folder, way) for way in ways for name in COMPARED for seed in seeds]


def _cell(setup: Setup, name: str, seed: int, folder: CellFolder, until_forgotten: bool) -> Cell:
    whole, target = methods.cell(setup, name, seed), methods.cell(setup, "target", 0)
    folds = [setup.fixed(setup.configured(name, seed, documents=fold))["inputs"]["documents"] for fold in setup.folds]

    def run() -> dict[str, Any]:
        configured = partial(setup.configured, name, seed)
        if not until_forgotten:
            done = folder.get(whole)
            method, steps = Method(**done["method"]), done["steps"]
            configured = partial(setup.configured_for_steps, method, seed, steps, reference=None, probes=CHECKED)
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

    ending = UNTIL_FORGOTTEN if until_forgotten else ""
    fixed = {"each as" if until_forgotten else "steps and numbers as": dict(whole.settings), "requests": folds}
    needs = (target,) if until_forgotten else (whole, target)
    return Cell(name=f"sequential-{name}{ending}", seed=seed, settings=fixed, run=run, needs=needs)


def _short(content: dict[str, Any]) -> dict[str, Any]:
    """The metrics that the table shows."""
    return {"metrics": {name: content["metrics"][name] for name in METRICS if name in content["metrics"]}}


def table(contents: Sequence[dict[str, Any]]) -> str:
    """A row for each method and request."""
    groups = by_name(contents)
    rows: dict[str, list[Any]] = {}
    steps = []
    for name, group in groups.items():
        for number in range(len(group[0]["requests"])):
            label = name.removeprefix("sequential-") + (f", after {number}" if number else "")
            rows[label] = [content["requests"][number]["metrics"] for content in group]
            done = [sum(request["steps"] for request in content["requests"][1 : number + 1]) for content in group]
            steps.append(mean_and_std(done, 0))
    return result_table(rows, METRICS, {"steps": steps})


def figures(benchmark: str, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """Utility after each request."""
    groups = by_name(contents)
    return [_figure(benchmark, groups, metric) for metric in ("knowmem_r", "nll_general") if groups]


def _figure(benchmark: str, groups: dict[str, list[dict[str, Any]]], metric: str) -> Figure:
    styles = {name: look("method", place) for place, name in enumerate(groups)}

    def draw(canvas: Canvas) -> None:
        for name, group in groups.items():
            for content in group:
                values = [request["metrics"].get(metric, {}).get("value") for request in content["requests"]]
                style = styles[name]
                (line,) = canvas.axes.plot(
                    range(len(values)), values, color=style.colour, ls=style.dash, marker=style.marker, ms=4
                )
                canvas.tip(line, f"{name}, seed {content['seed']}")
        canvas.axes.margins(y=0.15)
        canvas.axes.set_xticks(range(len(values)))
        canvas.axes.set_title(metric)
        canvas.axes.set_xlabel("forget requests done")

    title = "Utility after sequential requests"
    keys = [(name.removeprefix("sequential-"), style) for name, style in styles.items()]
    ends = "; ".join(
        f"{name} " + mean_and_std([c["metrics"].get(metric, {}).get("value") for c in group], 3)
        for name, group in groups.items()
    )
    about = f"{metric} after each request; after the last: {ends}"
    return make_figure(f"sequential-{metric}-{benchmark}", title, about, draw, keys)


EXPERIMENT = Experiment(
    title="the sustainability figure: four requests one after the other",
    see="What requests cost shows in knowmem_r and nll_general from row to row: a method that can be used again and "
    "again keeps them where they were before the first request.",
    cells=cells,
    shows=lambda name: name.startswith("sequential-"),
    table=table,
    figures=figures,
)
