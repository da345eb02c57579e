"""Texts to token ids: word by word where that gives the same ids, else text by text; kept as 32-bit numbers.

A tokenizer that cuts a text into words before it looks for tokens finds the same tokens in a word wherever it stands.
Each word is then encoded once and looked up after that, which takes a fifth of the time, and a text of any length takes
no more memory than its ids. `encodes_word_by_word` says for which tokenizers that holds, and why.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from unteach.data.progress import counted

__all__ = ["IdLists", "TokenIds", "encode_texts", "encodes_word_by_word", "in_blocks", "lengths_of"]

BLOCK = 2**20
"""Characters that are encoded at once."""
CHECKED = 2**14
"""Of so many characters, the first of each source, the ids are compared with those of the whole texts."""
MOST_WORDS = 2**17
"""So many words are remembered; after that it begins anew."""
MOST_WIDE = 8
"""With more tokens that see across spaces a tokenizer is not used word by word."""
_WORD = re.compile(r"\s*+\S++(?:[^\S ]\s*+\S*+)*+|\s++")
"""Up to a space that comes after something else, with which the next one begins."""
_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",  # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",  # Qwen 2
)
_CUT = re.compile(r"(?<=\S) ")
_OPTIONS = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}


class IdLists(Sequence[list[int]]):
    """Lists of ids that are made when they are asked for."""

    lengths: NDArray[np.int64]
    """How long each is."""

    def list_of(self, number: int) -> list[int]:
        """The list of that number, counted from 0."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, number: int) -> list[int]: ...
    @overload
    def __getitem__(self, number: slice) -> list[list[int]]: ...
    def __getitem__(self, number: int | slice) -> list[int] | list[list[int]]:
        if isinstance(number, slice):
            return [self.list_of(n) for n in range(*number.indices(len(self)))]
        return self.list_of(range(len(self))[number])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class TokenIds(IdLists):
    """Token ids of texts, one after the other as 32-bit numbers."""

    def __init__(self, ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        self.ids, self.lengths = ids, lengths
        self._ends = np.cumsum(lengths)

    def array(self, number: int) -> NDArray[np.int32]:
        """The ids of a text, not copied."""
        return self.ids[self._ends[number] - self.lengths[number] : self._ends[number]]

    def list_of(self, number: int) -> list[int]:
        """The ids of a text."""
        return self.array(number).tolist()


def lengths_of(sequences: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """How long lists of ids are, without making any that are not there."""
    known = sequences.lengths if isinstance(sequences, IdLists) else list(map(len, sequences))
    return np.asarray(known, dtype=np.int64)


def encode_texts(tokenizer: Any, texts: Sequence[str], what: str = "tokenising") -> TokenIds:
    """Token ids of each text without special ids; on a terminal a progress bar says `what` is done."""
    ids, lengths = array("i"), np.zeros(len(texts), dtype=np.int64)
    words = _Words(tokenizer) if texts and encodes_word_by_word(tokenizer) else None
    first = _beginning(texts)
    if words and first:
        (found, counts), (right, each) = words.encode(first), _whole(tokenizer, first)
        words = words if np.array_equal(found, right) and np.array_equal(counts, each) else None
    for numbers, block in counted(in_blocks(texts, words.cut if words else None), texts, what):
        found, counts = words.encode(block) if words else _whole(tokenizer, block)
        ids.frombytes(found.tobytes())
        np.add.at(lengths, numbers, counts)
    return TokenIds(np.frombuffer(ids, dtype=np.int32), lengths)


def encodes_word_by_word(tokenizer: Any) -> bool:
    r"""Whether a tokenizer's ids of a text are those of its words, cut before every space that follows a non-space.

    It holds for byte-level BPE. There added tokens are found first, then the text between them is cut by regular
    expressions that are matched from left to right without looking back; a match never goes on from a non-space to a
    space, so one ends before each such space, and what comes after is matched as if nothing stood before. Merges stay
    within a match. NFC never joins a space to what stands before it. Other normalizers, expressions and models are
    refused, and random merges (dropout). A part of a text with an added token that can see across a space is not cut.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE" or backend.model.dropout is not None:
        return False
    if backend.normalizer is not None and type(backend.normalizer).__name__ != "NFC":
        return False
    if backend.pre_tokenizer is None or len(_wide_tokens(tokenizer)) > MOST_WIDE:
        return False
    cutter = json.loads(backend.pre_tokenizer.__getstate__())
    cutters = cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
    return all(map(_cuts_before_spaces, cutters)) and any(each["type"] != "Digits" for each in cutters)


def _wide_tokens(tokenizer: Any) -> list[str]:
    """Added tokens that have a space in them, take those around them, or look at what stands beside them."""
    added = tokenizer.added_tokens_decoder.values()
    return [t.content for t in added if t.lstrip or t.rstrip or t.single_word or re.search(r"\s", t.content)]


def _cuts_before_spaces(cutter: dict[str, Any]) -> bool:
    """Whether a part of a pre-tokenizer sees nothing across a space that follows a non-space."""
    if cutter["type"] == "Split":
        known = cutter["pattern"].get("Regex") in _SPLITS
        return known and cutter["behavior"] == "Isolated" and not cutter["invert"]
    return cutter["type"] in ("ByteLevel", "Digits")


class _Words:
    """Encodes words when they are first seen, and remembers them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._wide = tokenizer, _wide_tokens(tokenizer)
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids, self._lengths = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of texts, one after the other, and how many each has."""
        if len(self._numbers) > MOST_WORDS:
            self._forget()
        words = [[text] if self._is_wide(text) else _WORD.findall(text) or [""] for text in texts]
        counts = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        flat = list(itertools.chain.from_iterable(words))
        numbers = list(map(self._numbers.get, flat))
        if None in numbers:
            self._learn([word for word, number in zip(flat, numbers, strict=True) if number is None])
            numbers = list(map(self._numbers.get, flat))
        places = np.array(numbers, dtype=np.int64)
        starts, lengths = (np.cumsum(self._lengths) - self._lengths)[places], self._lengths[places]
        ends = np.cumsum(lengths)
        ids = self._ids[np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)]
        return ids, np.diff(ends[np.cumsum(counts) - 1], prepend=0)

    def _is_wide(self, text: str) -> bool:
        return any(token in text for token in self._wide)

    def cut(self, text: str, start: int) -> int:
        """A place from `start` on where a text can be cut, its end perhaps."""
        width = max(map(len, self._wide), default=0)
        for space in _CUT.finditer(text, start):
            if not self._is_wide(text[max(0, space.start() - width) : space.start() + width]):
                return space.start()
        return len(text)

    def _learn(self, words: Iterable[str]) -> None:
        new = list(dict.fromkeys(words))
        ids, lengths = _whole(self._tokenizer, new)
        self._numbers |= zip(new, range(len(self._numbers), len(self._numbers) + len(new)), strict=True)
        self._ids, self._lengths = np.concatenate([self._ids, ids]), np.concatenate([self._lengths, lengths])


def _whole(tokenizer: Any, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The ids of texts as the tokenizer gives them, one after the other, and how many each has."""
    ids = tokenizer(list(texts), **_OPTIONS)["input_ids"]
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum())), lengths


def in_blocks(texts: Iterable[str], cut: Callable[[str, int], int] | None) -> Iterator[tuple[list[int], list[str]]]:
    """Texts with their numbers, about `BLOCK` characters at a time; longer texts in parts, from one `cut` to the next.

    `cut` takes a text and a place, and gives the next place where the text can be cut.
    """
    numbers, block, size = list[int](), list[str](), 0
    for number, text in enumerate(texts):
        start = 0
        while start < len(text) or not start:
            end = cut(text, start + BLOCK) if cut and len(text) - start > BLOCK else len(text)
            numbers.append(number)
            block.append(text[start:end])
            size += end - start
            if size >= BLOCK:
                yield numbers, block
                numbers, block, size = [], [], 0
            start = end or 1
    if block:
        yield numbers, block


def _beginning(texts: Sequence[str]) -> list[str]:
    """The first texts, or as much of them as is compared."""
    first, size = list[str](), 0
    for text in texts:
        if size >= CHECKED:
            break
        first.append(text[: CHECKED - size])
        size += len(text)
    return first
