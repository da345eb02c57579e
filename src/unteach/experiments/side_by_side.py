"""Several cells of an experiment at once, each worker a process of its own with a part of the cores.

Small models use several cores badly, and a GPU as well: two cells side by side take less time than one after the other
with twice the threads.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unteach.config import resolved_device
from unteach.errors import InputError, first_line

if TYPE_CHECKING:
    from unteach.experiments.cells import Cell, CellFolder
    from unteach.experiments.reproduce import ReproduceOptions

__all__ = ["CellError", "number_of_jobs", "run_side_by_side"]

MOST_JOBS = 8
"""Without asking: each takes about a GB of memory."""
_worker: dict[str, Any] = {}
"""Of a worker: its folder of cells and its cells."""


class CellError(RuntimeError):
    """Some cells could not be measured; the others have been."""


def number_of_jobs(options: ReproduceOptions, missing: int) -> int:
    """How many cells to measure at once, of so many that are ``missing``.

    0 means one for every core, 8 at most, where the embedded benchmark (its models are tiny) runs on a CPU, and one
    cell at a time elsewhere.
    """
    if options.jobs < 0:
        raise InputError(f"jobs is {options.jobs}: it must be at least 1, or 0 to leave it to the program")
    device = resolved_device(options.device)
    tiny = options.benchmark == "micro" and device.type == "cpu"
    return max(1, min(missing, options.jobs or (min(_cores(), MOST_JOBS) if tiny else 1)))


def run_side_by_side(
    options: ReproduceOptions, seeds: list[int], cells: Sequence[Cell], jobs: int, work: Path, folder: CellFolder
) -> None:
    """Measure the cells that are missing in worker processes; every worker writes its cells' files itself.

    What several cells need is measured first, once. The table of states is shown before, and after every cell. Each
    worker builds its own setup from the options; all that it writes, besides the cells, is in the temporary folder
    ``work``.

    Raises:
        KeyboardInterrupt: The command was asked to stop; the workers have been ended.
        CellError: After all others have been measured.
    """
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        jobs,
        multiprocessing.get_context("spawn"),
        initializer=_prepare,
        initargs=(options, seeds, max(1, _cores() // jobs), work),
    )
    folder.say(folder.states(cells))
    missing = [cell for cell in cells if not folder.is_usable(cell)]
    needed = {need.key: need for cell in missing for need in cell.needs if not folder.is_usable(need)}
    failed: dict[str, BaseException] = {}
    with _terminate_as_interrupt():
        try:
            for group in (list(needed.values()), missing):
                futures = {pool.submit(_measure, cell.name, cell.seed, cell.key): cell for cell in group}
                for future in as_completed(futures):
                    error, name = future.exception(), f"{futures[future].name}, seed {futures[future].seed}"
                    if error is not None:
                        _raise_if_all_end(error)
                        failed[name] = error
                        folder.say(f"{name} failed: {first_line(error)}")
                    folder.say(folder.states(cells))
        except BaseException:
            _end(pool, others)
            raise
    pool.shutdown()
    if failed:
        name, error = next(iter(failed.items()))
        if isinstance(error, InputError):
            raise error
        more = f"; so did {len(failed) - 1} more" if len(failed) > 1 else ""
        raise CellError(f"{name} failed: {first_line(error)}{more}; the others are done") from error


def _raise_if_all_end(error: BaseException) -> None:
    from unteach.errors import Interrupted

    if isinstance(error, BrokenProcessPool):
        raise CellError("a worker was killed, most likely for lack of memory: take fewer --jobs") from error
    if isinstance(error, Interrupted) or not isinstance(error, Exception):
        raise error


def _end(pool: ProcessPoolExecutor, others: Collection[BaseProcess]) -> None:
    """End the workers at once: a cell that is not finished leaves nothing behind but files in the temporary folder.

    They are killed before the pool is shut down: one that has lost a worker sends the others SIGTERM, which they take
    as a wish to stop after this step, and holds its lock until they have ended.
    """
    for process in multiprocessing.active_children():
        if process not in others:
            process.kill()
            process.join()
    pool.shutdown(wait=False, cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM stops the command as Ctrl-C does, so that no worker is left behind."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # handlers can be set by the main thread only
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Lines(io.TextIOWrapper):
    """Stderr without progress bars: those of several workers would overwrite each other."""

    def isatty(self) -> bool:
        return False


def _prepare(options: ReproduceOptions, seeds: list[int], threads: int, work: Path) -> None:
    """In a worker, once: limit its threads and build its setup."""
    import torch

    from unteach.experiments.cells import CellFolder
    from unteach.experiments.paper import experiment
    from unteach.experiments.sources import build
    from unteach.job.run_folder import SharedScores

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which ends its workers
    torch.set_num_threads(threads)
    sys.stderr = _Lines(
        os.fdopen(os.dup(2), "wb"), encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
    )
    tempfile.tempdir = tempfile.mkdtemp(dir=work)

    def say(line: str) -> None:
        print(f"    {_worker.get('name', '')}: {line}", file=sys.stderr)

    folder = CellFolder(options.out / options.benchmark, say, fresh=options.fresh)
    setup = build(options, Path(tempfile.tempdir), say)
    setup.shared = SharedScores(work / "shared")
    cells = experiment(options.name).cells(setup, seeds, folder)
    known = [*cells, *(need for cell in cells for need in cell.needs)]
    _worker["folder"], _worker["cells"] = folder, {(cell.name, cell.seed): cell for cell in known}


def _measure(name: str, seed: int, key: str) -> None:
    """In a worker: one cell, to its file."""
    import torch

    _worker["name"] = f"{name}, seed {seed}"
    folder: CellFolder = _worker["folder"]
    cell: Cell = _worker["cells"][name, seed]
    if cell.key != key:
        raise InputError("settings, models or texts changed after the start, or can be read once only: start again")
    try:
        folder.get(cell)
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # a worker that waits for its next cell should not keep others from theirs
