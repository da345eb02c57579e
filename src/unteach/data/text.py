"""Text as token ids and back, and text as words: one form for training, benchmarks and measurements."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

__all__ = ["Words", "decode", "encode", "encode_texts", "special_ids", "split_words"]

Words = Literal["latin", "unicode"]
_TOGETHER = 2**20
"""Characters that are encoded at once."""

# Thai, Lao, Burmese, Khmer, Japanese, Chinese: written without spaces between words.
_UNSPACED = r"\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u3040-\u30FF\u3400-\u9FFF\U00020000-\U0003FFFF"
_PATTERNS = {"latin": re.compile(r"[a-z0-9]+"), "unicode": re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")}


def split_words(text: str, words: Words = "latin") -> list[str]:
    """Split a text into the units ROUGE compares.

    `"latin"` is as MUSE and `rouge-score` do: lower-case runs of a-z and 0-9, everything else is a separator, so a
    text in Greek or Chinese has **no** words and always scores 0. `"unicode"`: runs of letters and digits of any
    script; in scripts written without spaces each character is a word.
    """
    if words not in _PATTERNS:
        raise ValueError(f"words is {words!r}: allowed are {' and '.join(map(repr, _PATTERNS))}")
    return _PATTERNS[words].findall(text.lower())


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text with the special tokens the tokenizer adds by itself; never truncated."""
    return list(tokenizer(text, add_special_tokens=True, truncation=False, verbose=False)["input_ids"])


def special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after a text by itself, often a begin-of-text id and nothing."""
    whole = list(tokenizer("a")["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def encode_texts(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """Token ids of each text without special ids, a megabyte of text at a time."""

    def encode(part: list[str]) -> list[list[int]]:
        return tokenizer(part, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    part: list[str] = []
    characters = 0
    for text in texts:
        part.append(text)
        characters += len(text)
        if characters >= _TOGETHER:
            yield from encode(part)
            part, characters = [], 0
    if part:
        yield from encode(part)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids without special tokens.

    Differs from MUSE's code: there spaces before punctuation are removed too, which changes no word that
    ROUGE sees except in texts written like `do n't`.
    """
    return tokenizer.decode(list(ids), skip_special_tokens=True)
