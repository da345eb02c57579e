"""The paper's tables and figures: one file each, whose name is the experiment's name (``_`` written ``-``).

To add an experiment, add a file here with an ``EXPERIMENT``; ``unteach reproduce NAME`` finds it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unteach.experiments.cells import Cell, CellFolder
    from unteach.report.style import Figure

__all__ = ["Experiment", "experiment", "experiment_names"]

Contents = Sequence[dict[str, Any]]
"""What the files of cells hold."""


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
    table: Callable[[Contents], str]
    """Its Markdown table."""
    figures: Callable[[str, Contents], list[Figure]] = lambda benchmark, contents: []
    """Its figures; the benchmark's name is part of theirs."""
    measures: bool = True
    """False: it shows what another experiment has measured."""
    uses_benchmark: bool = True
    """False: it has models of its own and gets no ``Setup``."""


def experiment_names() -> list[str]:
    """The names of all experiments; nothing is imported."""
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)]


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").EXPERIMENT
