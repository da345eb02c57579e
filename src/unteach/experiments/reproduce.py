"""`unteach reproduce NAME`: the paper's tables and figures by name."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from unteach.errors import InputError, Interrupted
from unteach.experiments.paper import Experiment, experiment, experiment_names
from unteach.experiments.presets import METHODS
from unteach.settings import nearest_name
from unteach.writing import write_whole

__all__ = ["ReproduceOptions", "run", "write_readme"]


README, ABOUT = "README.md", "ABOUT.md"
"""Written beside the cells; and what a person has to say on top of it, if there is such a file."""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """What the command takes."""

    name: str = ""
    """Which experiment, by the name of its file in experiments/paper: methods, losses, theorem, ..."""
    benchmark: str = "micro"
    """micro (embedded, needs nothing else), muse-news, muse-books or tofu."""
    model: str = ""
    """The model that has learned the documents. micro has its own."""
    reference: str = ""
    """The model retrained without them: for the stop rule and PrivLeak."""
    base: str = ""
    """A model with the same tokenizer that never learned them, for deep and the loss it: best the one before it learned
    them. Also accepted as incompetent. micro has its own."""
    keep: str = ""
    """deep: documents like the forgotten ones to be kept, as unteach forget takes them. Default: the retain split."""
    data: Path | None = None
    """Folder with the benchmark's tables; by default they come from the Hugging Face hub."""
    general: str = ""
    """Text like what the model should keep, as unteach forget takes it. Default: the embedded public-domain text."""
    instruct: Path | None = None
    """recovery: a file of instructions (columns instruction, input, output)."""
    mmlu: Path | None = None
    """Folder with the MMLU validation questions, to be measured too."""
    settings: Path | None = None
    """A YAML file: config (fields of unteach forget), methods (name: fields to change), losses, recovery, relearning,
    deep."""
    seeds: str = "0,1,2"
    """Seeds, with commas between them."""
    only: str = ""
    """Only the cells of these names, with commas between them."""
    limit: int | None = None
    """For a quick try: measure only the first so many items of every kind."""
    out: Path = Path("results")
    """Folder for the results: OUT/BENCHMARK/ gets a JSON file per cell, figures, and a README.md with the tables."""
    images: Path | None = None
    """Write figures there instead."""
    device: str = "auto"
    """cpu, cuda, ... auto: a GPU if there is one."""
    list: bool = False
    """Only say what is done and what is missing, and write the table of what is done."""
    tables: bool = False
    """Only write tables and figures of the cells in OUT/BENCHMARK, whatever they are; needs no models and no data."""
    jobs: int = 0
    """Cells measured at once, each in its own process. 0: for micro on a CPU one for every core (at most 8), else 1."""
    fresh: bool = False
    """Measure cells again that an older version has measured."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""
    ALIASES: ClassVar[dict[str, str]] = {"incompetent": "base"}


def run(options: ReproduceOptions) -> dict[str, Any]:
    """Run what is missing of an experiment, and write its table and figures.

    Returns:
        ``cells`` (name, seed, state, metrics of each that is done), ``missing``, ``table`` and ``figures`` (paths).

    Raises:
        InputError: With what is wrong with the options.
    """
    known = experiment_names()
    if options.name not in known:
        nearest = nearest_name(options.name, known)
        raise InputError(f"name is {options.name!r}: it must be one of {', '.join(known)}{nearest}")
    seeds = _read_seeds(options.seeds)

    with tempfile.TemporaryDirectory() as work:
        try:
            return _run_cells(options, seeds, Path(work))
        except (Interrupted, KeyboardInterrupt):
            say("stopped; the same command goes on with the missing cells")
            raise KeyboardInterrupt from None


def _run_cells(options: ReproduceOptions, seeds: list[int], work: Path) -> dict[str, Any]:
    from unteach.experiments.cells import CellFolder
    from unteach.experiments.side_by_side import number_of_jobs, run_side_by_side
    from unteach.experiments.sources import build

    chosen = experiment(options.name)
    folder = CellFolder(options.out / options.benchmark, say, fresh=options.fresh)
    if options.tables:
        return _write(options, chosen, folder, [c for c in _ordered(folder) if chosen.shows(c["name"])], [])
    setup = build(options, work, _indented) if chosen.uses_benchmark else None
    cells = _chosen(chosen.cells(setup, seeds, folder), options.only)
    jobs = number_of_jobs(options, sum(not folder.is_usable(cell) for cell in cells)) if setup else 1
    if options.list or not chosen.measures:
        say(folder.states(cells))
    elif jobs > 1:
        run_side_by_side(options, seeds, cells, jobs, work, folder)
    else:
        folder.complete(cells)
    return _write(options, chosen, folder, folder.finished(cells), cells)


def _write(
    options: ReproduceOptions, chosen: Experiment, folder: Any, contents: list[dict[str, Any]], cells: Sequence[Any]
) -> dict[str, Any]:
    """Write tables and figures; returns the result of the command."""
    table = chosen.table(contents)
    paths = [_write_figure(options.images or folder.folder, figure) for figure in _figures(options, chosen, contents)]
    readme = write_readme(folder) if contents else folder.folder / README
    if not options.json:
        print(f"\n{table}" if contents else "nothing is done yet")
        print("\n".join([*(f"figure: {path}" for path in paths), *([f"tables: {readme}"] if contents else [])]))
    done = {(content["name"], content["seed"]): content for content in contents}
    states = {(cell.name, cell.seed): folder.state(cell) for cell in cells} or dict.fromkeys(done, "done")
    return {
        "name": options.name,
        "benchmark": options.benchmark,
        "cells": [
            {"name": name, "seed": seed, "state": state, "metrics": done.get((name, seed), {}).get("metrics", {})}
            for (name, seed), state in states.items()
        ],
        "missing": sum(not folder.is_usable(cell) for cell in cells),
        "table": str(readme),
        "figures": [str(path) for path in paths],
    }


def write_readme(folder: Any) -> Path:
    """Write the tables of all experiments that have cells in a ``CellFolder`` beside them, from the cells alone."""
    contents = _ordered(folder)
    versions = sorted({content["versions"]["unteach"] for content in contents})
    parts = [
        f"# {folder.folder.name}: {len(contents)} cells",
        f"Written by `unteach reproduce` from the cells beside it, measured with unteach {', '.join(versions)}.\n"
        "Numbers are means over seeds, with the sample standard deviation in brackets where there are several.\n"
        "Arrows say which way is better.",
    ]
    if (about := folder.folder / ABOUT).exists():
        parts.append(about.read_text(encoding="utf-8").strip())
    shown: set[str] = set()
    for name in experiment_names():
        entry = experiment(name)
        mine = [content for content in contents if entry.shows(content["name"])]
        if {content["name"] for content in mine} <= shown:  # another experiment's cells, without any of its own
            continue
        shown |= {content["name"] for content in mine}
        parts += [f"## {name}: {entry.title}", textwrap.fill(entry.see, 120), entry.table(mine)]
        settings: dict[str, set[str]] = {}
        for content in mine:
            settings.setdefault(content["name"], set()).add(json.dumps(content["settings"], sort_keys=True))
        parts += [f"The seeds of {name} have different settings." for name, kinds in settings.items() if len(kinds) > 1]
    write_whole(folder.folder / README, "\n\n".join(parts) + "\n")
    return folder.folder / README


def _ordered(folder: Any) -> list[dict[str, Any]]:
    """The contents of all cells in a folder, methods in the order of the presets."""
    known = ["target", "retrained", *METHODS]

    def place(content: dict[str, Any]) -> tuple[int, str]:
        inside = [name for name in known if name in content["name"]]
        return (known.index(max(inside, key=len)) if inside else len(known)), content["name"]

    return sorted(folder.read_all(), key=place)


def _figures(options: ReproduceOptions, chosen: Experiment, contents: list[dict[str, Any]]) -> list[Any]:
    """The figures, where they can be drawn."""
    if importlib.util.find_spec("matplotlib") is not None:
        return chosen.figures(options.benchmark, contents)
    say("matplotlib is not installed: no figures; run the same command where it is")
    return []


def _read_seeds(text: str) -> list[int]:
    """The seeds that the option names."""
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
    path = folder / f"{figure.name}.svg"
    write_whole(path, figure.files[".svg"])
    return path


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _indented(line: str) -> None:
    say(f"    {line}")
