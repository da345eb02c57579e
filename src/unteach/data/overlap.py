"""Passages of the forget documents that also stand in the general text.

What the student must forget there, the divergence would hold on to: such passages are found and cut out of the general
text. Two texts share a passage where 13 words in a row are equal, upper and lower case, punctuation and white space
aside (a forget document of 6 to 12 words is looked for as a whole). Chinese and Japanese characters count as words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unteach.data.documents import Documents

__all__ = ["Overlap", "SharedPassages", "overlap"]

PASSAGE_WORDS = 13
"""So many equal words in a row are a shared passage."""
SHORTEST_DOCUMENT = 6
"""Forget documents with fewer words are not looked for: they would be found everywhere."""
MARGIN = 200
"""So many words before and after a shared passage are cut out with it: they are likely about the same."""
SHORTEST_REST = 50
"""What is left of a text and has fewer words is cut out too."""
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_CHARACTERS}]|(?:[^\W_{_CHARACTERS}]|[\u0300-\u036f])+")
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(PASSAGE_WORDS, dtype=np.uint64)


@dataclass
class Overlap:
    """What the general text shared with the forget documents, and what was cut out of it."""

    documents: int = 0
    """General documents with a shared passage."""
    passages: int = 0
    """Shared passages."""
    words: int = 0
    """Words in them."""
    cut_words: int = 0
    """Words cut out: the passages, what stands around them, and rests too short to keep."""
    dropped: int = 0
    """General documents of which nothing is left."""

    def summary(self) -> str:
        """One line for people."""
        if not self.documents:
            return "no passage shared with the forget documents"
        return (
            f"{self.passages:,} passages ({self.words:,} words) in {self.documents:,} documents are shared with the"
            f" forget documents: {self.cut_words:,} words cut out, {self.dropped:,} documents dropped"
        )


class SharedPassages:
    """Finds passages of the forget documents in other texts, and cuts them out; `report` counts that.

    Every run of n words of a forget document becomes one 64-bit number, h = Σ_k r(word_k) bᵏ mod 2⁶⁴ with fixed
    random numbers r; only these are kept, sorted.
    """

    def __init__(self, forget: Documents | Iterable[str]) -> None:
        self.report = Overlap()
        self._numbers: dict[str, int] = {}
        documents = [
            np.array([self._numbers.setdefault(word, len(self._numbers) + 1) for word in words])
            for words in map(_words, forget.texts if isinstance(forget, Documents) else forget)
            if len(words) >= SHORTEST_DOCUMENT
        ]
        self._scrambled = np.random.default_rng(0).integers(2**64, size=len(self._numbers) + 1, dtype=np.uint64)
        runs: dict[int, list[NDArray[np.uint64]]] = {}
        for numbers in documents:
            size = min(PASSAGE_WORDS, len(numbers))
            runs.setdefault(size, []).append(self._run_hashes(numbers, size))
        self._hashes = {size: np.unique(np.concatenate(parts)) for size, parts in runs.items()}

    def _run_hashes(self, numbers: NDArray[np.int64], size: int) -> NDArray[np.uint64]:
        """One number for every `size` words in a row: [W] to [W - size + 1]."""
        return np.lib.stride_tricks.sliding_window_view(self._scrambled[numbers], size) @ _POWERS[:size]

    def find(self, text: str) -> list[tuple[int, int]]:
        """Shared passages as (first word, word after the last), numbered as in the text, joined where they touch."""
        numbers = np.array([self._numbers.get(word, 0) for word in _words(text)], dtype=np.int64)
        unknown = np.concatenate([[0], np.cumsum(numbers == 0)])
        shared = np.zeros(len(numbers) + 1, dtype=np.int64)
        for size, known in self._hashes.items():
            if len(numbers) < size:
                continue
            starts = np.flatnonzero(unknown[size:] == unknown[:-size])
            hashes = self._run_hashes(numbers, size)[starts]
            hits = starts[known.take(np.searchsorted(known, hashes), mode="clip") == hashes]
            np.add.at(shared, hits, 1)
            np.add.at(shared, hits + size, -1)
        inside = np.concatenate([[0], (np.cumsum(shared) > 0).astype(np.int8)])
        edges = np.flatnonzero(np.diff(inside))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def cut(self, text: str) -> list[str]:
        """What is left of a text without shared passages and what stands around them: itself, its rests, or nothing."""
        passages = self.find(text)
        if not passages:
            return [text]
        words, report = list(_WORD.finditer(text)), self.report
        report.documents += 1
        report.passages += len(passages)
        report.words += sum(end - start for start, end in passages)
        rests, kept_words, position = [], 0, 0
        for start, end in [*passages, (len(words) + MARGIN, len(words) + MARGIN)]:
            rest = words[position : max(position, start - MARGIN)]
            if len(rest) >= SHORTEST_REST:
                rests.append(text[rest[0].start() : rest[-1].end()])
                kept_words += len(rest)
            position = end + MARGIN
        report.cut_words += len(words) - kept_words
        report.dropped += not rests
        return rests


def overlap(forget: Documents | Sequence[str], general: Documents) -> tuple[Overlap, Documents]:
    """What general documents share with the forget documents, and the general documents without that."""
    passages = SharedPassages(forget)
    rests = [
        (rest, label) for text, label in zip(general.texts, general.labels, strict=True) for rest in passages.cut(text)
    ]
    kept = Documents(general.name, [rest for rest, _ in rests], [label for _, label in rests], list(general.skipped))
    return passages.report, kept


def _words(text: str) -> list[str]:
    return [
        word.lower() if word.isascii() else unicodedata.normalize("NFKC", word).casefold()
        for word in _WORD.findall(text)
    ]
