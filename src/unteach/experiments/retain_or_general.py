"""Do baselines improve with pretraining data? The same baselines held on a retain split, and on general text."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unteach.errors import InputError
from unteach.experiments import methods, tradeoff
from unteach.experiments.cells import Book, Cell
from unteach.experiments.setups import Setup
from unteach.report.style import Figure

__all__ = ["cells", "figures", "table"]

BASELINES = ("adamw-npo-kl", "adamw-ll-kl")


def cells(setup: Setup, seeds: Sequence[int], book: Book) -> list[Cell]:
    """Each baseline on general text (the cell of ``methods``) and on the retain split."""
    if setup.retain is None:
        raise InputError("data has no retain split: this experiment needs one")
    found = []
    for name in BASELINES:
        found += [methods.cell(setup, name, seed) for seed in seeds]
        found += [_on_retain(setup, name, seed) for seed in seeds]
    return found


def _on_retain(setup: Setup, name: str, seed: int) -> Cell:
    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "run")
            return setup.forget(setup.configured(name, seed, general=setup.retain, out=out))[1]

    fixed = setup.fixed(setup.configured(name, seed, general=setup.retain))
    return Cell(name=f"{name}-on-retain", seed=seed, settings=fixed, run=run)


def table(setup: Setup, contents: Sequence[dict[str, Any]]) -> str:
    """The same columns as in ``methods``."""
    return methods.table(setup, contents)


def figures(setup: Setup, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """Utility against recital: which text keeps more where as much is forgotten."""
    return tradeoff.panels("retain-or-general", setup.benchmark, contents, ("verbmem_f",))
