"""Do baselines improve with pretraining data? The same baselines held on a retain split, and on general text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unteach.errors import InputError
from unteach.experiments.cells import Cell, CellFolder
from unteach.experiments.paper import Experiment, methods, tradeoff
from unteach.experiments.setups import Setup
from unteach.report.style import Figure

__all__ = ["EXPERIMENT"]

BASELINES = ("adamw-npo-kl", "adamw-ll-kl")
ENDING = "-on-retain"


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Each baseline on general text (the cell of ``methods``) and on the retain split."""
    if setup.retain is None:
        raise InputError("data has no retain split: this experiment needs one")
    found = []
    for name in BASELINES:
        found += [methods.cell(setup, name, seed) for seed in seeds]
        held = [setup.configured(name, seed, general=setup.retain) for seed in seeds]
        found += [setup.cell(f"{name}{ENDING}", config) for config in held]
    return found


def figures(benchmark: str, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """Utility against recital: which text keeps more where as much is forgotten."""
    return tradeoff.panels("retain-or-general", benchmark, contents, ("verbmem_f",))


EXPERIMENT = Experiment(
    title="baselines held on a retain split, and on general text",
    see="Of two rows of one baseline, the better text is the one whose knowmem_r and nll_general are nearer to the "
    "target's where verbmem_f is as low; a row that ended by max_steps or utility_floor has not forgotten enough.",
    cells=cells,
    shows=lambda name: name.removesuffix(ENDING) in BASELINES,
    table=methods.table,
    figures=figures,
)
