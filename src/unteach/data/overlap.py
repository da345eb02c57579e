"""Passages of the forget documents that also stand in the general text.

What the student must forget there, the divergence would hold on to: such passages are found and cut out of the general
text. Two texts share a passage where 13 words in a row are equal, upper and lower case, punctuation and white space
aside (a forget document of 6 to 12 words is looked for as a whole). Chinese and Japanese characters count as words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unteach.data.documents import Documents
from unteach.data.encoding import in_blocks
from unteach.data.progress import counted

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
_SPACE = re.compile(r"\s")
_SEPARATORS = {code: " " for code in range(128) if not chr(code).isalnum()}
_BEGINNING = 24
_REST = np.uint64(64 - _BEGINNING)
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

    Every run of n words of a forget document becomes one 64-bit number, h = Σ_k r(word_k) bᵏ mod 2⁶⁴ with the hashes r
    that Python gives words; only these are kept, sorted.

    Args:
        forget: The forget documents.
        others: The texts in which passages will be looked for, if they are known: of the runs of `PASSAGE_WORDS` words
            only those that stand there are kept, so that the memory does not grow with the forget documents.
    """

    def __init__(self, forget: Documents | Iterable[str], others: Sequence[str] | None = None) -> None:
        self.report = Overlap()
        texts = forget.texts if isinstance(forget, Documents) else list(forget)
        there = None if others is None else _Numbers(_runs_of(others, PASSAGE_WORDS))
        runs: dict[int, list[NDArray[np.uint64]]] = {}
        for words, lengths, whole in _hashed_words(texts, "comparing"):
            for size in range(SHORTEST_DOCUMENT, PASSAGE_WORDS):  # short documents are looked for as a whole
                if (starts := (np.cumsum(lengths) - lengths)[whole & (lengths == size)]).size:
                    runs.setdefault(size, []).append(_run_hashes(words, size)[starts])
            found = _runs(words, lengths, PASSAGE_WORDS)
            if there is not None:
                found = found[there.has(found)]
            if found.size:
                runs.setdefault(PASSAGE_WORDS, []).append(found)
        self._known = {size: _Numbers(parts) for size, parts in runs.items()}

    def find(self, text: str) -> list[tuple[int, int]]:
        """Shared passages as (first word, word after the last), numbered as in the text, joined where they touch."""
        words = _hashed(text)
        shared = np.zeros(len(words) + 1, dtype=np.int64)
        for size, known in self._known.items():
            if len(words) >= size:
                hits = np.flatnonzero(known.has(_run_hashes(words, size)))
                np.add.at(shared, hits, 1)
                np.add.at(shared, hits + size, -1)
        inside = np.concatenate([[0], (np.cumsum(shared) > 0).astype(np.int8)])
        edges = np.flatnonzero(np.diff(inside))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def share(self, text: str) -> float:
        """The share of a text's words that stand in shared passages."""
        return sum(end - start for start, end in self.find(text)) / max(1, len(_hashed(text)))

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
    passages = SharedPassages(forget, general.texts)
    rests = [
        (rest, label) for text, label in zip(general.texts, general.labels, strict=True) for rest in passages.cut(text)
    ]
    kept = Documents(general.name, [rest for rest, _ in rests], [label for _, label in rests], list(general.skipped))
    return passages.report, kept


class _Numbers:
    """A set of 64-bit numbers, sorted, and which beginnings of them there are: most others are told by that."""

    def __init__(self, parts: Iterable[NDArray[np.uint64]]) -> None:
        self._sorted = np.concatenate([np.zeros(0, dtype=np.uint64), *parts])
        self._sorted.sort()
        self._beginnings = np.zeros(2**_BEGINNING, dtype=bool)
        self._beginnings[self._sorted >> _REST] = True

    def has(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of some numbers are in the set."""
        found = self._beginnings[numbers >> _REST]
        perhaps = np.flatnonzero(found)
        near = np.searchsorted(self._sorted, numbers[perhaps])
        found[perhaps] = self._sorted.take(near, mode="clip") == numbers[perhaps] if self._sorted.size else False
        return found


def _run_hashes(words: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """One number for every `size` words in a row: [W] to [W - size + 1]."""
    count = max(0, len(words) - size + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for place, power in enumerate(_POWERS[:size]):
        hashes += words[place : place + count] * power
    return hashes


def _runs(words: NDArray[np.uint64], lengths: NDArray[np.int64], size: int) -> NDArray[np.uint64]:
    """The numbers of all runs of so many words that lie within one of the texts of these lengths."""
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))  # words up to the end of the text
    return _run_hashes(words, size)[left[: max(0, len(words) - size + 1)] >= size]


def _runs_of(texts: Sequence[str], size: int) -> Iterator[NDArray[np.uint64]]:
    for words, lengths, _ in _hashed_words(texts, "comparing other text"):
        yield _runs(words, lengths, size)


def _hashed_words(
    texts: Sequence[str], what: str
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.bool_]]]:
    """The hashed words of some texts at a time, how many each of them has, and whether these are all words of the text.

    A long text comes in parts, each with so many words of the one before that every run is in one of them. A progress
    bar says `what` is done.
    """
    at, read, passed = -1, 0, 0
    last = np.zeros(0, dtype=np.uint64)
    for numbers, block in counted(in_blocks(texts, _after_word), texts, what):
        parts, whole = list[NDArray[np.uint64]](), list[bool]()
        for number, text in zip(numbers, block, strict=True):
            if number != at:
                at, read, passed, last = number, 0, 0, last[:0]
            words = _hashed(text)
            read, passed = read + len(text), passed + len(words)
            parts.append(np.concatenate([last, words]) if last.size else words)
            whole.append(read == len(texts[number]) and passed == len(parts[-1]))
            last = parts[-1][-(PASSAGE_WORDS - 1) :]
        yield np.concatenate(parts), np.array([len(words) for words in parts]), np.array(whole)


def _after_word(text: str, start: int) -> int:
    space = _SPACE.search(text, start)
    return space.start() if space else len(text)


def _hashed(text: str) -> NDArray[np.uint64]:
    words = _words(text)
    return np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).view(np.uint64)


def _words(text: str) -> list[str]:
    if text.isascii():
        return text.lower().translate(_SEPARATORS).split()
    return [
        word.lower() if word.isascii() else unicodedata.normalize("NFKC", word).casefold()
        for word in _WORD.findall(text)
    ]
