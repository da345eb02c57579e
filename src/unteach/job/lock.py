"""Who may write into a run folder: one process at a time, in a folder that is new or the run's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unteach.errors import InputError
from unteach.models.distributed import from_first_rank, is_first_rank

try:
    import fcntl
except ImportError:  # not on Windows: there two runs in one folder are not kept apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["clear_litter", "free_problem", "holding", "is_new", "made_folder", "remove_made"]

_BEGINNING = {"start.json", "documents.jsonl", "receipt.salt"}
"""What a run writes before its ``config.yaml``: with nothing else there, no run has begun."""
_OURS = {"config.yaml", "run.log", "evaluations", "checkpoints", *_BEGINNING}
"""What a run has written before its first step."""


def is_new(out: Path) -> bool:
    """Whether a run may begin in a folder: it is not there or empty, or holds no more than one that was killed before
    its beginning has left."""
    if not out.exists():
        return True
    if not out.is_dir():
        return False
    names = {entry.name for entry in out.iterdir() if not entry.name.endswith(".part")}
    return not names or ("start.json" in names and names <= _BEGINNING)


def free_problem(out: Path) -> str:
    """Why no folder of that name can be made or written; empty if it can."""
    try:
        if "\0" in str(out):
            raise ValueError("there is a NUL in it")
        existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        if not existing.is_dir():
            return f"{str(existing)!r} is a file: name a folder that is below none"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{str(existing)!r} cannot be written: name a folder that can be"
        if out.is_symlink() and not out.exists():
            return "it is a link to nothing: name a folder"
        longest = os.pathconf(existing, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
        if any(len(os.fsencode(part)) > longest - 32 for part in out.parts):  # names beside it are a little longer
            return f"a name in it has more than {longest - 32} bytes: give a shorter one"
        str(out).encode()
    except UnicodeEncodeError:
        return "it is not UTF-8, in which a run's settings are written: name another folder"
    except (OSError, ValueError) as error:  # too long, or a NUL in it
        return f"{getattr(error, 'strerror', None) or error}: name another folder"
    return ""


@contextmanager
def holding(out: Path) -> Iterator[None]:
    """Keep other processes out of a folder inside the block; an ``InputError`` where one is in it.

    The lock is the system's, on the folder itself: a process that dies does not hold it.
    """
    descriptor, busy = -1, False
    if is_first_rank() and fcntl:
        descriptor = os.open(out, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = True
        except OSError:
            pass  # a file system without locks
    try:
        if from_first_rank(busy):
            raise InputError(f"out is {str(out)!r}: another process works on this run: wait for it, or end it first")
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def made_folder(out: Path) -> Path | None:
    """Make a folder; the outermost that was not there before, None: all were."""
    if not is_first_rank():
        return None
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    return missing[-1] if missing else None


def remove_made(out: Path, outermost: Path | None) -> None:
    """Remove what a run has written that was refused before its first step, and the folders that were made for it."""
    for name in _OURS:
        path = out / name
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    clear_litter(out)
    if outermost is not None:
        for folder in (out, *out.parents):
            with suppress(OSError):
                folder.rmdir()
            if folder == outermost:
                break


def clear_litter(out: Path) -> None:
    """Remove what a killed process has left half-written in a run folder."""
    if not is_first_rank():
        return
    for folder in (out, out / "evaluations", out / "checkpoints"):
        for left_over in folder.glob("*.part") if folder.is_dir() else ():
            with suppress(OSError):
                shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    shutil.rmtree(out / ".model.partial", ignore_errors=True)
    if (old := out / ".model.old").exists():
        if (out / "model").exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out / "model")
