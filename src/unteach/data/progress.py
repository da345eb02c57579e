"""A progress bar on a terminal for what takes long before the first step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["counted"]

LONG = 2**24
"""Texts of fewer characters show no bar."""
Block = TypeVar("Block", bound=tuple[Sequence[int], Sequence[str]])


def counted(blocks: Iterable[Block], texts: Sequence[str], what: str) -> Iterator[Block]:
    """The same blocks (see `encoding.in_blocks`) of texts; a bar says how much of them has been taken."""
    from rich.console import Console
    from rich.progress import Progress

    console, total = Console(stderr=True), sum(map(len, texts))
    hidden = not console.is_terminal or total < LONG or os.environ.get("RANK", "0") != "0"
    with Progress(console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        for block in blocks:
            yield block
            progress.advance(task, sum(map(len, block[1])))
