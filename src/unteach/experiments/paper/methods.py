"""Table 1, the table of epochs and Table 2: every method, run until the stop rule, with all metrics and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from unteach.evaluation.metrics import columns
from unteach.experiments.cells import Cell, CellFolder, by_name, mean_and_std, result_table
from unteach.experiments.paper import Experiment
from unteach.experiments.setups import Setup

__all__ = ["EXPERIMENT", "STAR", "cell", "rows", "table"]

STAR = "-star"
"""Ending of the row that is run until ``knowmem_f`` is no higher than the retrained model's."""
STARRED = "mt-nlul-qkl"
COLUMNS = (
    *columns("main"), "verbmem_f_tables", *columns("beside"), "nll_forget", "nll_holdout",
    "tofu_forget_quality", "tofu_model_utility", "tofu_forget_rouge", "tofu_retain_rouge",
)  # fmt: skip
OTHERS = ("deep", "loss-", "recovery-", "relearn-", "sequential-", "theorem")
"""Beginnings of the names of other experiments' cells."""


def cell(setup: Setup, name: str, seed: int) -> Cell:
    """One method with one seed; the names ``target`` and ``retrained`` are models that are only measured."""
    if name in ("target", "retrained"):
        model = setup.config.model if name == "target" else str(setup.config.reference)
        settings = setup.fixed(setup.config)
        kept = ("model", "reference") if name == "target" else ("reference",)
        inputs = {part: value for part, value in settings["inputs"].items() if part in kept}

        def measure() -> dict[str, Any]:
            return setup.kept(setup.measure_named(model, seed))

        return Cell(name=name, seed=seed, settings={"inputs": inputs, "measured": settings["measured"]}, run=measure)

    if not name.endswith(STAR):
        return setup.cell(name, setup.configured(name, seed))
    config = setup.configured(name.removesuffix(STAR), seed, questions=setup.questions)

    def run() -> dict[str, Any]:
        return setup.forget_in_passing(dataclasses.replace(config, stop=setup.star_stop(seed)))

    fixed = setup.fixed(config) | {"stop": "knowmem_f <= the retrained model's"}
    return Cell(name=name, seed=seed, settings=fixed, run=run)


def rows(setup: Setup) -> list[str]:
    """The names of all rows: the two references, then the methods, the star row behind its method."""
    names = ["target", *(["retrained"] if setup.config.reference else [])]
    for name, method in setup.methods.items():
        if method.loss != "it" or setup.incompetent:
            names.append(name)
        if name == STARRED and setup.config.reference and (setup.embedded or setup.questions):
            names.append(name + STAR)
    return names


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """All cells; target and retrained, where no seed matters, once."""
    found = []
    for name in rows(setup):
        found += [cell(setup, name, seed) for seed in ([0] if name in ("target", "retrained") else seeds)]
    return found


def shows(name: str) -> bool:
    """Whatever is no other experiment's."""
    return not name.startswith(OTHERS) and not name.endswith("-on-retain")


def table(contents: Sequence[dict[str, Any]]) -> str:
    """Mean (std) over seeds, steps needed, and how the runs ended."""
    groups = by_name(contents)
    metrics = {name: [content["metrics"] for content in group] for name, group in groups.items()}
    steps = [mean_and_std([content.get("steps") for content in group], 0) for group in groups.values()]
    ends = [
        ", ".join(sorted({content["stop"]["rule"] for content in group if "stop" in content})) or "–"
        for group in groups.values()
    ]
    return result_table(metrics, COLUMNS, {"steps": steps, "ended by": ends})


EXPERIMENT = Experiment(
    title="Table 1, the table of epochs and Table 2: every method, all metrics",
    see="A method has forgotten what it was asked to where verbmem_f and knowmem_f are no higher than the retrained "
    "model's, and has kept the rest where knowmem_r and nll_general are as the target's. The last column says whether "
    "the stop rule was met (stop), the steps ran out (max_steps), or general text became too dear (utility_floor).",
    cells=cells,
    shows=shows,
    table=table,
)
