"""`unteach reproduce NAME`: the paper's tables and figures by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import nearest_name
from unteach.errors import InputError

__all__ = ["NAMES", "ReproduceOptions", "experiment_module", "read_seeds", "run"]

NAMES = {
    "methods": "Table 1, the table of epochs and Table 2: every method, all metrics",
    "losses": "Figures 1 and 2: the mean teacher with each forget loss",
    "tradeoff": "Figure 3: utility against recital, knowledge and leak, from the cells of methods",
    "recovery": "the recovery table: unrelated finetuning after unlearning",
    "sequential": "the sustainability figure: four requests one after the other",
    "retain-or-general": "baselines held on a retain split, and on general text",
    "theorem": "Theorem 1: the mean teacher beside natural-gradient descent",
}


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """What the command takes."""

    name: str = ""
    """Which experiment: methods, losses, tradeoff, recovery, sequential, retain-or-general or theorem."""
    benchmark: str = "micro"
    """micro (embedded, needs nothing else), muse-news, muse-books or tofu."""
    model: str = ""
    """The model that has learned the documents. micro has its own."""
    reference: str = ""
    """The model retrained without them: for the stop rule and PrivLeak."""
    incompetent: str = ""
    """A model with the same tokenizer that never learned them, for the loss it: smaller, or the base model."""
    data: Path | None = None
    """Folder with the benchmark's tables; by default they come from the Hugging Face hub."""
    general: str = ""
    """Text like what the model should keep, as unteach forget takes it. Default: the embedded public-domain text."""
    instruct: Path | None = None
    """recovery: a file of instructions (columns instruction, input, output)."""
    mmlu: Path | None = None
    """Folder with the MMLU validation questions, to be measured too."""
    settings: Path | None = None
    """A YAML file: config (fields of unteach forget), methods (name: fields to change), losses, recovery."""
    seeds: str = "0,1,2"
    """Seeds, with commas between them."""
    only: str = ""
    """Only the cells of these names, with commas between them."""
    limit: int | None = None
    """For a quick try: measure only the first so many items of every kind."""
    out: Path = Path("results")
    """Folder for the results: OUT/BENCHMARK/ gets a JSON file per cell, a table per experiment, and its figures."""
    images: Path | None = None
    """Write figures there instead."""
    device: str = "auto"
    """cpu, cuda, ... auto: a GPU if there is one."""
    list: bool = False
    """Only say what is done and what is missing, and write the table of what is done."""
    jobs: int = 0
    """Cells measured at once, each in its own process. 0: for micro on a CPU one for every core (at most 8), else 1."""
    fresh: bool = False
    """Measure cells again that an older version of the code has measured."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: ReproduceOptions) -> dict[str, Any]:
    """Run what is missing of an experiment, and write its table and figures.

    Returns:
        ``cells`` (name, seed, state, metrics of each that is done), ``missing``, ``table`` and ``figures`` (paths).

    Raises:
        InputError: With what is wrong with the options.
    """
    if options.name not in NAMES:
        nearest = nearest_name(options.name, NAMES)
        raise InputError(f"name is {options.name!r}: it must be one of {', '.join(NAMES)}{nearest}")
    seeds = read_seeds(options.seeds)
    from unteach.training.loop import Interrupted

    with tempfile.TemporaryDirectory() as work:
        try:
            return _run_cells(options, seeds, Path(work))
        except (Interrupted, KeyboardInterrupt):
            say("stopped; the same command goes on with the missing cells")
            raise KeyboardInterrupt from None


def experiment_module(name: str) -> Any:
    """The module of an experiment that is made of cells: it has ``cells``, ``table`` and ``figures``."""
    return importlib.import_module(f"unteach.experiments.{name.replace('-', '_')}")


def _run_cells(options: ReproduceOptions, seeds: list[int], work: Path) -> dict[str, Any]:
    from unteach.experiments.cells import Book
    from unteach.experiments.side_by_side import number_of_jobs, run_side_by_side
    from unteach.experiments.sources import build

    module = experiment_module(options.name)
    setup = None if options.name == "theorem" else build(options, work, _indented)  # it has models of its own
    folder = options.out / options.benchmark
    book = Book(folder, say, fresh=options.fresh)
    cells = _chosen(module.cells(setup, seeds, book), options.only)
    missing = [cell for cell in cells if not book.is_usable(cell)]
    jobs = number_of_jobs(options, len(missing)) if setup else 1
    if options.list or options.name == "tradeoff":
        say(book.states(cells))
    elif jobs > 1:
        say(book.states(cells))
        run_side_by_side(options, missing, jobs, work, book, lambda: say(book.states(cells)))
    else:
        book.complete(cells)
    contents = book.finished(cells)
    table, figures = module.table(setup, contents), _figures(module, setup, contents)
    file = folder / f"{options.name}.md"
    if contents and not options.only:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {options.name}: {NAMES[options.name]}\n\n{table}\n", encoding="utf-8")
    paths = [_write_figure(options.images or folder, figure) for figure in figures]
    if not options.json:
        print(f"\n{table}" if contents else "nothing is done yet")
        print("\n".join(f"figure: {path}" for path in paths))
    return {
        "name": options.name,
        "benchmark": options.benchmark,
        "cells": [
            {"name": cell.name, "seed": cell.seed, "state": book.state(cell)}
            | {"metrics": (book.read(cell) or {}).get("metrics", {}) if book.is_usable(cell) else {}}
            for cell in cells
        ],
        "missing": sum(not book.is_usable(cell) for cell in cells),
        "table": str(file),
        "figures": [str(path) for path in paths],
    }


def _figures(module: Any, setup: Any, contents: list[dict[str, Any]]) -> list[Any]:
    """The figures, where they can be drawn."""
    if importlib.util.find_spec("matplotlib") is not None:
        return module.figures(setup, contents)
    say("matplotlib is not installed: no figures; run the same command where it is")
    return []


def read_seeds(text: str) -> list[int]:
    """The seeds that the option names.

    Raises:
        InputError: They are no different whole numbers.
    """
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds is {text!r}: it must be different whole numbers, none below 0, such as 0,1,2")
    return seeds


def _chosen(cells: Sequence[Any], only: str) -> list[Any]:
    if not only:
        return list(cells)
    wanted, known = only.split(","), {cell.name for cell in cells}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        allowed = ", ".join(sorted(known))
        raise InputError([f"only is {n!r}: it must be one of {allowed}{nearest_name(n, known)}" for n in unknown])
    return [cell for cell in cells if cell.name in wanted]


def _write_figure(folder: Path, figure: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{figure.name}.svg"
    path.write_bytes(figure.files[".svg"])
    return path


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _indented(line: str) -> None:
    say(f"    {line}")
