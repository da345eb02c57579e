"""How things are written: files whole or not at all, tables that read well as text, numbers for people; and how much
of it the terminal shows."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from unteach.errors import InputError

__all__ = [
    "file_sha256", "format_number", "in_words", "json_sha256", "markdown_table", "sealed", "speaks", "sync",
    "sync_folder", "under_torchrun", "unsealed", "verbosity", "write_whole",
]  # fmt: skip

WORDS = {
    "mt": "mean teacher", "mean_teacher": "mean teacher", "adamw": "AdamW", "sgd": "SGD",
    "ll": "log-likelihood loss", "npo": "NPO loss", "it": "IT loss", "it_forward": "forward IT loss",
    "nlul": "NLUL loss", "match": "matching a model that never saw the documents",
    "kl": "held by KL", "kl_reverse": "held by reverse KL", "qkl": "held by QKL", "qkl_frozen": "held by frozen QKL",
    "simnpo": "SimNPO loss", "wga": "WGA loss", "satimp": "SatImp loss", "undial": "UNDIAL loss", "ce_u": "CE-U loss",
    "clamped_entropy": "clamped-entropy loss", "jensun": "JensUn loss", "rmu": "RMU loss",
    "dpo": "DPO loss with alternates",
    "js": "held by Jensen–Shannon", "nll": "held by likelihood",
}  # fmt: skip
"""The parts of a method's name."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file (its folder is made) through another beside it: who reads sees the old content or the new, also
    after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            sync(stream)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync(stream: IO[Any]) -> None:
    """Return when all that was written to a file is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk; nothing where folders cannot be synced."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without it
            raise
    finally:
        os.close(descriptor)


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sealed(content: dict[str, Any]) -> str:
    """JSON text that carries the SHA-256 of what it says."""
    return json.dumps({"sha256": json_sha256(content)} | content)


def unsealed(text: str) -> dict[str, Any]:
    """What ``sealed`` was given; a ``ValueError`` where a byte of it is another one now."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop("sha256", None) != json_sha256(content):
        raise ValueError("its checksum does not match")
    return content


def json_sha256(content: Any) -> str:
    """SHA-256 of plain values, whatever the order of their names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that reads well as it stands, too: columns are padded, all but the first to the right."""
    widths = [max(3, *(len(row[place]) for row in [titles, *rows])) for place in range(len(titles))]

    def line(cells: Sequence[str]) -> str:
        rest = (text.rjust(width) for text, width in zip(cells[1:], widths[1:], strict=True))
        return "| " + " | ".join([cells[0].ljust(widths[0]), *rest]) + " |"

    rule = "| " + " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]) + " |"
    return "\n".join([line(titles), rule, *map(line, rows)])


def format_number(value: float | None, decimals: int = 1) -> str:
    """A number for people: at most four digits and decimals, a true minus sign, an en dash for none."""
    if value is None:
        return "–"
    if abs(value) >= 1e6:
        return f"{value:.2e}".replace("-", "−")
    whole = len(f"{abs(value):.0f}")
    text = f"{value:{',' if whole > 4 else ''}.{max(0, min(decimals, 4 - whole))}f}"
    return text.replace("-", "−") if text.strip("-0.") else text.lstrip("-")


def in_words(parts: Sequence[str]) -> str:
    """A method by its optimizer, loss and divergence, for people; empty where a part has no words."""
    return ", ".join(WORDS[part] for part in parts) if set(parts) <= set(WORDS) else ""


@contextmanager
def verbosity(arguments: Sequence[str]) -> Iterator[None]:
    """``--quiet``: of what goes to stderr only warnings are shown. ``--verbose``: also what is logged."""
    if {"--quiet", "--verbose"} <= set(arguments):
        raise InputError("--quiet and --verbose are both given: give one of them")
    logger, handler = logging.getLogger("unteach"), logging.StreamHandler()
    level = logger.level
    if "--verbose" in arguments:
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
    try:
        with redirect_stderr(_OnlyWarnings(sys.stderr)) if "--quiet" in arguments else nullcontext():
            yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


class _OnlyWarnings(io.TextIOBase):
    """Passes on the lines that warn."""

    def __init__(self, to: TextIO) -> None:
        self._to, self._line = to, ""

    def write(self, text: str) -> int:
        """Take some text."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if "warning" in line.lower():
                print(line, file=self._to, flush=True)
        return len(text)


def under_torchrun() -> bool:
    """Whether this process is one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def speaks() -> bool:
    """Whether this process prints what all ranks would say alike: the first of them does."""
    return not under_torchrun() or os.environ.get("RANK", "0") == "0"
