"""`unteach reproduce NAME`: the paper's tables and figures by name.

Several cells are measured at once, each worker a process of its own with a part of the cores: small models use several
cores badly, and two cells side by side take less time than one after the other with twice the threads.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import signal
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unteach.errors import InputError, Interrupted, first_line
from unteach.experiments import METHODS
from unteach.method.tensors import resolved_device
from unteach.models.threads import usable_cores
from unteach.settings import nearest_name
from unteach.writing import write_whole

if TYPE_CHECKING:
    from unteach.experiments.cells import Cell, CellFolder
    from unteach.experiments.paper import Experiment
    from unteach.experiments.setups import Setup

__all__ = ["ReproduceOptions", "number_of_jobs", "run", "write_readme"]

README, ABOUT = "README.md", "ABOUT.md"
"""Written beside the cells; and what a person has to say on top of it, if there is such a file."""
MOST_JOBS = 8
"""Without asking: each takes about a GB of memory."""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """What the command takes."""

    name: str = ""
    """Which experiment: audits, deep, field, losses, methods, recovery, retain-or-general, sequential, theorem,
    tradeoff or trajectories."""
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
    deep, field, trajectories."""
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
    runs: Path | None = None
    """Keep the model of every run in this folder, and take it from there where another cell needs the same run."""
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

    Returns ``cells`` (name, seed, state, metrics of each that is done), ``missing``, ``table`` and ``figures`` (paths).
    """
    from unteach.experiments.cells import CellFolder
    from unteach.experiments.paper import experiments
    from unteach.experiments.sources import build

    known = experiments()
    if options.name not in known:
        allowed = f"{', '.join(known)}{nearest_name(options.name, known)}"
        raise InputError(f"name is {options.name!r}: it must be one of {allowed}")
    chosen, seeds = known[options.name], _seeds(options)
    folder = CellFolder(options.out / options.benchmark, _say, fresh=options.fresh)
    if options.tables:
        return _write(options, chosen, folder, [c for c in _ordered(folder) if chosen.shows(c["name"])], [])
    with tempfile.TemporaryDirectory() as work:
        try:
            setup = build(options, Path(work), lambda line: _say(f"    {line}"))
            cells = _only(chosen.cells(setup, seeds, folder), options.only)
            jobs = number_of_jobs(options, sum(not folder.is_usable(cell) for cell in cells))
            if options.list or not chosen.measures:
                _say(folder.states(cells))
            elif jobs > 1:
                _run_side_by_side(options, cells, jobs, Path(work), folder)
            else:
                folder.complete(cells)
        except (Interrupted, KeyboardInterrupt):
            _say("stopped; the same command goes on with the missing cells")
            raise KeyboardInterrupt from None
        return _write(options, chosen, folder, folder.finished(cells), cells)


def _write(
    options: ReproduceOptions, chosen: Experiment, folder: CellFolder, contents: list[dict[str, Any]], cells: list[Cell]
) -> dict[str, Any]:
    """Write tables and figures; returns the result of the command."""
    figures = []
    if importlib.util.find_spec("matplotlib") is None:
        _say("matplotlib is not installed: no figures; run the same command where it is")
    else:
        for figure in chosen.figures(options.benchmark, contents):
            figures.append((options.images or folder.folder) / f"{figure.name}.svg")
            write_whole(figures[-1], figure.files[".svg"])
    readme = write_readme(folder) if contents else folder.folder / README
    if not options.json:
        print(f"\n{chosen.table(contents)}" if contents else "nothing is done yet")
        print("\n".join([*(f"figure: {path}" for path in figures), *([f"tables: {readme}"] if contents else [])]))
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
        "figures": [str(path) for path in figures],
    }


def write_readme(folder: CellFolder) -> Path:
    """Write the tables of all experiments that have cells in a folder beside them, from the cells alone."""
    from unteach.experiments.paper import by_name, experiments

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
    for name, entry in experiments().items():
        mine = [content for content in contents if entry.shows(content["name"])]
        if {content["name"] for content in mine} <= shown:  # another experiment's cells, without any of its own
            continue
        shown |= {content["name"] for content in mine}
        parts += [f"## {name}: {entry.title}", textwrap.fill(entry.see, 120), entry.table(mine)]
        for row, group in by_name(mine).items():
            fixed = [{key: value for key, value in c["settings"].items() if key not in entry.drawn} for c in group]
            if any(settings != fixed[0] for settings in fixed):
                parts.append(f"The seeds of {row} have different settings.")
    write_whole(folder.folder / README, "\n\n".join(parts) + "\n")
    return folder.folder / README


def _ordered(folder: CellFolder) -> list[dict[str, Any]]:
    """The contents of all cells in a folder, methods in the order of the presets."""
    known = ["target", "retrained", *METHODS]

    def place(content: dict[str, Any]) -> tuple[int, str]:
        inside = [name for name in known if name in content["name"]]
        return (known.index(max(inside, key=len)) if inside else len(known)), content["name"]

    return sorted(folder.read_all(), key=place)


def _seeds(options: ReproduceOptions) -> list[int]:
    parts = [part.strip() for part in options.seeds.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise InputError(f"seeds is {options.seeds!r}: it must be different whole numbers, none below 0, such as 0,1,2")
    return [int(part) for part in parts]


def _only(cells: list[Cell], only: str) -> list[Cell]:
    """The cells of the names that the option gives: all where it gives none."""
    wanted, known = only.split(",") if only else [], {cell.name for cell in cells}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        allowed = ", ".join(sorted(known))
        raise InputError([f"only is {n!r}: it must be one of {allowed}{nearest_name(n, known)}" for n in unknown])
    return [cell for cell in cells if not only or cell.name in wanted]


def _say(line: str) -> None:
    """A line for people, on stderr; in one write, so that those of several workers do not mix."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def number_of_jobs(options: ReproduceOptions, missing: int) -> int:
    """How many cells to measure at once, of so many that are ``missing``, see ``ReproduceOptions.jobs``."""
    if options.jobs < 0:
        raise InputError(f"jobs is {options.jobs}: it must be at least 1, or 0 to leave it to the program")
    device = resolved_device(options.device)  # refused where there is no such device
    tiny = options.benchmark == "micro" and device.type == "cpu"
    return max(1, min(missing, options.jobs or (min(usable_cores(), MOST_JOBS) if tiny else 1)))


def _run_side_by_side(
    options: ReproduceOptions, cells: Sequence[Cell], jobs: int, work: Path, folder: CellFolder
) -> None:
    """Measure the cells that are missing in worker processes, first what several of them need, once.

    Workers write their cells' files themselves, and all else to the temporary folder ``work``. Ctrl-C and SIGTERM end
    them at once. Where cells fail, there is a ``RuntimeError`` after all others have been measured.
    """
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder.say(folder.states(cells))
    missing = [cell for cell in cells if not folder.is_usable(cell)]
    needed = {need.key: need for cell in missing for need in cell.needs if not folder.is_usable(need)}
    failed: list[tuple[Cell, BaseException]] = []
    try:
        for group in (needed.values(), missing):
            futures = {pool.submit(_measure, str(cell), cell.key, options, jobs, work): cell for cell in group}
            for future in as_completed(futures):
                cell, error = futures[future], future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise RuntimeError("a worker was killed, most likely for lack of memory: take fewer --jobs")
                if error is not None:
                    failed.append((cell, error))
                    folder.say(f"{cell} failed: {first_line(error)}")
                folder.say(folder.states(cells))
    except BaseException:
        for process in [*pool._processes.values()]:  # which take SIGTERM as a wish to stop after this step
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before)
    if failed:
        cell, error = failed[0]
        if isinstance(error, InputError):
            raise error
        more = f"; so did {len(failed) - 1} more" if len(failed) > 1 else ""
        raise RuntimeError(f"{cell} failed: {first_line(error)}{more}; the others are done") from error


def _measure(name: str, key: str, options: ReproduceOptions, jobs: int, work: Path) -> None:
    """In a worker: one cell, to its file."""
    setup, folder, cells = _prepared(options, jobs, work)
    setup.say = folder.say = lambda line: _say(f"    {name}: {line}")
    if key not in cells:
        raise InputError("settings, models or texts changed after the start, or can be read once only: start again")
    folder.get(cells[key])


@functools.cache
def _prepared(options: ReproduceOptions, jobs: int, work: Path) -> tuple[Setup, CellFolder, dict[str, Cell]]:
    """In a worker, once: limit its threads and build its setup; returns that, its folder, and its cells by key."""
    import torch

    from unteach.experiments.cells import CellFolder
    from unteach.experiments.paper import experiments
    from unteach.experiments.sources import build
    from unteach.job.run_folder import SharedScores

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which ends its workers
    torch.set_num_threads(max(1, usable_cores() // jobs))
    sys.stderr.isatty = lambda: False  # type: ignore[method-assign]  # no progress bars: they would mix
    tempfile.tempdir = str(work)
    folder = CellFolder(options.out / options.benchmark, _say, fresh=options.fresh)
    setup = build(options, Path(tempfile.mkdtemp()), _say)
    setup.shared = SharedScores(work / "shared")
    cells = experiments()[options.name].cells(setup, _seeds(options), folder)
    return setup, folder, {cell.key: cell for known in cells for cell in (known, *known.needs)}
