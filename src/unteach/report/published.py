"""Figures published by others (`published.json`), kept apart from our own rows and always named as theirs."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from unteach.report.plots import Published, curve_figure
from unteach.report.style import Figure, Look, look

BENCHMARKS = {"muse-news": "MUSE-News", "muse-books": "MUSE-Books"}
"""Benchmarks with published figures, and their titles. Only results under exactly these names are shown beside them."""


@cache
def contents() -> dict[str, Any]:
    """The parsed file."""
    return json.loads(files("unteach.report").joinpath("published.json").read_text(encoding="utf-8"))


def points(benchmark: str) -> list[Published]:
    """Points for the trade-off panels: others' methods, the paper's rows, then the paper's single runs."""
    if benchmark not in BENCHMARKS:
        return []
    named = [
        (point["name"], group["source"], point["metrics"])
        for group in contents()["others"]
        if group["benchmark"] == benchmark
        for point in group["points"]
    ]
    named += [
        (row["name"], "the paper, Table 1", {key: cell["value"] for key, cell in row["metrics"].items()})
        for row in contents()["paper"]["rows"]
        if row["benchmark"] == benchmark
    ]
    found = [Published(index + 1, *entry) for index, entry in enumerate(named)]
    return found + [
        Published(None, run["name"], f"log {run['log']}", run["metrics"])
        for run in contents()["paper_runs"]["runs"]
        if run["benchmark"] == benchmark
    ]


def rows(benchmark: str) -> list[dict[str, Any]]:
    """The paper's Table 1 for one benchmark."""
    return [row for row in contents()["paper"]["rows"] if row["benchmark"] == benchmark]


def looks(benchmark: str) -> dict[str, Look]:
    """How the paper's runs are drawn, by the name of their row."""
    runs = contents()["paper_runs"]["runs"]
    names = dict.fromkeys(run["name"] for run in runs if run["benchmark"] == benchmark)
    return {name: look("method", index) for index, name in enumerate(names)}


@cache
def curves(benchmark: str) -> tuple[Figure, ...]:
    """Loss and gradient norm of the paper's own runs over their steps."""
    runs = [run for run in contents()["paper_runs"]["runs"] if run["benchmark"] == benchmark]
    styles = looks(benchmark)
    figures = []
    for field, title, unit in (
        (
            "nll_forget",
            "The paper's runs: loss on the forget batches",
            "negative log-likelihood, nats per token",
        ),
        ("grad_norm", "The paper's runs: gradient norm", "before clipping"),
    ):
        lines = [
            (
                run["name"],
                styles[run["name"]],
                run["seed"],
                list(zip(run["curve"]["step"], run["curve"][field], strict=True)),
            )
            for run in runs
        ]
        figures.append(
            curve_figure(f"published-{field}-{benchmark}", title, unit, lines, list(styles.items()), logarithmic=True)
        )
    return tuple(figures)
