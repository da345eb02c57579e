"""Figures published by others (`published.json`), kept apart from our own rows and always named as theirs."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from unteach.report.plots import Published, curve_figure, tradeoff_figure
from unteach.report.style import Figure, Look, look

BENCHMARKS = {"muse-news": "MUSE-News", "muse-books": "MUSE-Books"}
"""Benchmarks with published figures. Only results under exactly these names may be shown beside them."""


@dataclass(frozen=True)
class Foreign:
    """What the page shows of others' figures for one benchmark.

    `tradeoffs` is empty where our own panels already carry the points.
    """

    benchmark: str
    title: str
    tradeoffs: tuple[Figure, ...]
    curves: tuple[Figure, ...]


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


def foreign(measured: Collection[str]) -> list[Foreign]:
    """Others' figures for the benchmarks in `measured` that have some; with none, MUSE-News on its own."""
    found = [benchmark for benchmark in BENCHMARKS if benchmark in measured]
    return [
        Foreign(name, BENCHMARKS[name], () if found else _tradeoffs(name), curves(name))
        for name in found or ["muse-news"]
    ]


@cache
def _tradeoffs(benchmark: str) -> tuple[Figure, ...]:
    return tuple(
        tradeoff_figure(BENCHMARKS[benchmark], metric, (), points(benchmark), f"published-{metric}-{benchmark}")
        for metric in ("verbmem_f", "knowmem_f", "privleak")
    )


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
