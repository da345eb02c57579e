"""Several cells of an experiment at once, each worker a process of its own with a part of the cores.

Small models use one core, or one GPU, badly: two cells side by side take less time than one after the other on twice
the threads.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unteach.errors import InputError

if TYPE_CHECKING:
    from unteach.experiments.cells import Book, Cell
    from unteach.experiments.reproduce import ReproduceOptions

__all__ = ["number_of_jobs", "run_side_by_side"]

_worker: dict[str, Any] = {}
"""Of a worker: its book and its cells."""


def number_of_jobs(options: ReproduceOptions, missing: int) -> int:
    """How many cells to measure at once.

    Args:
        options: ``jobs`` as given; 0 means one for every core on the embedded benchmark, whose models are tiny, and
            one cell at a time elsewhere.
        missing: Cells to be measured.

    Raises:
        InputError: ``jobs`` is negative.
    """
    if options.jobs < 0:
        raise InputError(f"jobs is {options.jobs}: it must be at least 1, or 0 to leave it to the program")
    tiny = options.benchmark == "micro" and options.device in ("auto", "cpu")
    return max(1, min(missing, options.jobs or (_cores() if tiny else 1)))


def run_side_by_side(
    options: ReproduceOptions, cells: Sequence[Cell], jobs: int, work: Path, finished: Callable[[], None]
) -> None:
    """Measure cells in worker processes; every worker writes its cells' files itself.

    Args:
        options: Of the command; each worker builds its own setup from them.
        cells: What is to be measured.
        jobs: Number of workers.
        work: A temporary folder, whose owner removes it: all that the workers write, besides the cells, is in it.
        finished: Called after every cell.

    Raises:
        KeyboardInterrupt: The command was asked to stop; the workers have been ended.
        Exception: That of the first cell that failed, after all others have been measured.
    """
    from unteach.unlearn import Interrupted

    failed: list[Exception] = []
    threads = max(1, _cores() // jobs)
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(options, threads, work)
    )
    with _terminate_as_interrupt():
        try:
            for future in as_completed([pool.submit(_measure, cell.name, cell.seed, cell.key) for cell in cells]):
                error = future.exception()
                if isinstance(error, Interrupted):
                    raise error
                failed += [error] if isinstance(error, Exception) else []
                finished()
        except BaseException:
            workers = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in workers:
                process.kill()  # a cell that is not finished leaves nothing behind
                process.join()
            raise
    pool.shutdown()
    if failed:
        raise failed[0]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM stops the command as Ctrl-C does, so that no worker is left behind."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Lines(io.TextIOWrapper):
    """Stderr without progress bars: those of several workers would overwrite each other."""

    def isatty(self) -> bool:
        return False


def _prepare(options: ReproduceOptions, threads: int, work: Path) -> None:
    """In a worker, once: limit its threads and build its setup."""
    import torch

    from unteach.experiments.cells import Book
    from unteach.experiments.reproduce import experiment_module
    from unteach.experiments.sources import build

    torch.set_num_threads(threads)
    sys.stderr = _Lines(os.fdopen(os.dup(2), "wb"), line_buffering=True)
    tempfile.tempdir = tempfile.mkdtemp(dir=work)

    def say(line: str) -> None:
        print(f"    {_worker.get('name', '')}: {line}", file=sys.stderr)

    book = Book(options.out / options.benchmark, say, fresh=options.fresh)
    setup = build(options, Path(tempfile.tempdir), say)
    seeds = [int(part) for part in options.seeds.split(",")]
    cells = experiment_module(options.name).cells(setup, seeds, book)
    _worker["book"], _worker["cells"] = book, {(cell.name, cell.seed): cell for cell in cells}


def _measure(name: str, seed: int, key: str) -> None:
    """In a worker: one cell, to its file."""
    _worker["name"] = f"{name}, seed {seed}"
    book: Book = _worker["book"]
    cell: Cell = _worker["cells"][name, seed]
    if cell.key != key:
        raise InputError("settings, models or texts changed after the start, or can be read once only: start again")
    book.get(cell)
