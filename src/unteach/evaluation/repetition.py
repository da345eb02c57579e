"""Degenerate output: text that repeats itself instead of saying something.

A model broken by unlearning often answers everything with one phrase or one sign over and over. ROUGE-L is
then near zero, which looks like perfect forgetting; the share of degenerate output tells the two apart.
"""

import re

import numpy as np
from numpy.typing import NDArray

MINIMUM_UNITS = 4
MINIMUM_CHARACTERS = 24
COPIES = 3
LOOP_SHARE = 1 / 3
DISTINCT_SHARE = 0.5
MINIMUM_TRIGRAMS = 16

_UNIT = re.compile(r"\w+|[^\w\s]")


def is_degenerate(text: str) -> bool:
    """Whether a text is mostly repetition.

    A text is cut into units: words (runs of letters and digits, lower-cased) and single punctuation marks. It
    is degenerate if one of these holds:

    1. *Loop of units*: somewhere one phrase is repeated without a break, at least `COPIES` times and over at
       least `MINIMUM_UNITS` units, and this run makes up at least `LOOP_SHARE` of all units.
    2. *Loop of characters*: the same over the characters (white space collapsed), with at least
       `MINIMUM_CHARACTERS` of them: catches `aaaa…` and loops in scripts without spaces.
    3. *Few different phrases*: of at least `MINIMUM_TRIGRAMS` runs of three units, fewer than
       `DISTINCT_SHARE` are different ones.
    4. The text has at least `MINIMUM_UNITS` characters and all of them are white space.

    An empty text is not degenerate: it repeats nothing. Its ROUGE-L is 0.
    """
    if not text.strip():
        return len(text) >= MINIMUM_UNITS
    units = _UNIT.findall(text.lower())
    numbers = _number(units)
    if _loop_share(numbers, MINIMUM_UNITS) >= LOOP_SHARE:
        return True
    characters = np.frombuffer(" ".join(text.split()).encode("utf-32-le"), dtype=np.uint32)
    if _loop_share(characters, MINIMUM_CHARACTERS) >= LOOP_SHARE:
        return True
    trigrams = len(units) - 2
    if trigrams < MINIMUM_TRIGRAMS:
        return False
    distinct = len({tuple(units[start : start + 3]) for start in range(trigrams)})
    return distinct / trigrams < DISTINCT_SHARE


def _number(units: list[str]) -> NDArray[np.int64]:
    """Give equal units equal numbers."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(unit, len(known)) for unit in units], dtype=np.int64)


def _loop_share(sequence: NDArray, minimum: int) -> float:
    """Share of the sequence taken by its longest loop of at least `COPIES` copies."""
    return longest_loop(sequence, COPIES, minimum)[2] / len(sequence) if len(sequence) else 0.0


def longest_loop(sequence: NDArray, copies: int, minimum: int) -> tuple[int, int, int]:
    """The longest stretch of one phrase repeated without a break.

    A stretch of period p is a maximal run where every element equals the one p before it, plus those first p.

    Returns:
        Where it starts, its period, and its length; three zeros if there is none.
    """
    best = (0, 0, 0)
    for period in range(1, len(sequence) // copies + 1):
        same = sequence[period:] == sequence[:-period]
        breaks = np.flatnonzero(np.concatenate(([True], ~same, [True])))
        runs = np.diff(breaks)
        place = int(runs.argmax())
        stretch = int(runs[place]) - 1 + period
        if stretch >= max(minimum, copies * period) and stretch > best[2]:
            best = (int(breaks[place]), period, stretch)
    return best
