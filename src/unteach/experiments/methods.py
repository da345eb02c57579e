"""Table 1, the table of epochs and Table 2: every method, run until the stop rule, with all metrics and outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unteach.evaluation.metrics import columns
from unteach.experiments.cells import Book, Cell, by_name, mean_and_std, result_table
from unteach.experiments.setups import Setup, star_stop
from unteach.report.style import Figure

__all__ = ["STAR", "cell", "cells", "figures", "rows", "table"]

STAR = "-star"
"""Ending of the row that is run until ``knowmem_f`` is no higher than the retrained model's."""
STARRED = "mt-nlul-qkl"
COLUMNS = (
    *columns("main"), "verbmem_f_tables", *columns("beside"), "tofu_forget_quality", "tofu_model_utility",
    "tofu_forget_rouge", "tofu_retain_rouge",
)  # fmt: skip


def cell(setup: Setup, name: str, seed: int) -> Cell:
    """One method with one seed; the names ``target`` and ``retrained`` are models that are only measured."""
    if name in ("target", "retrained"):
        model = setup.config.model if name == "target" else str(setup.config.reference)
        config = setup.configured(next(iter(setup.methods)), seed)
        kept = ("model", "reference") if name == "target" else ("reference",)
        fixed = setup.fixed(config)
        settings = {"inputs": {part: fixed["inputs"][part] for part in kept}, "measured": fixed["measured"]}

        def measure() -> dict[str, Any]:
            return setup.kept(setup.measure_named(model, seed))

        return Cell(name=name, seed=seed, settings=settings, run=measure)

    starred = name.endswith(STAR)
    config = setup.configured(name.removesuffix(STAR), seed)
    if starred:
        config = setup.configured(name.removesuffix(STAR), seed, questions=setup.questions)
    settings = setup.fixed(config) | ({"stop": "knowmem_f <= the retrained model's"} if starred else {})

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            changes: dict[str, Any] = {"out": str(Path(folder) / "run")}
            if starred:
                changes |= {"stop": star_stop(setup, seed), "questions": setup.questions}
            return setup.forget(setup.configured(name.removesuffix(STAR), seed, **changes))[1]

    return Cell(name=name, seed=seed, settings=settings, run=run)


def rows(setup: Setup) -> list[str]:
    """The names of all rows: the two references, then the methods, the star row behind its method."""
    names = ["target", *(["retrained"] if setup.config.reference else [])]
    for name, method in setup.methods.items():
        if method.loss != "it" or setup.incompetent:
            names.append(name)
        if name == STARRED and setup.config.reference and (setup.embedded or setup.questions):
            names.append(name + STAR)
    return names


def cells(setup: Setup, seeds: Sequence[int], book: Book) -> list[Cell]:
    """All cells; target and retrained, where no seed matters, once."""
    found = []
    for name in rows(setup):
        found += [cell(setup, name, seed) for seed in ([0] if name in ("target", "retrained") else seeds)]
    return found


def table(setup: Setup, contents: Sequence[dict[str, Any]]) -> str:
    """Mean (std) over seeds, steps needed, and how the runs ended."""
    groups = by_name(contents)
    metrics = {name: [content["metrics"] for content in group] for name, group in groups.items()}
    steps = [mean_and_std([content.get("steps") for content in group], 0) for group in groups.values()]
    ends = [
        ", ".join(sorted({content["stop"]["rule"] for content in group if "stop" in content})) or "–"
        for group in groups.values()
    ]
    return result_table(metrics, COLUMNS, {"steps": steps, "ended by": ends})


def figures(setup: Setup, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """None; see ``tradeoff``."""
    return []
