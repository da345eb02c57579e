"""Text as token ids and back, and text as words: one form for training, benchmarks and measurements."""

import re
from collections.abc import Sequence
from typing import Any, Literal

__all__ = ["Words", "decode", "encode", "split_words"]

Words = Literal["latin", "unicode"]

# Thai, Lao, Burmese, Khmer, Japanese, Chinese: written without spaces between words.
_UNSPACED = r"\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u3040-\u30FF\u3400-\u9FFF\U00020000-\U0003FFFF"
_PATTERNS = {
    "latin": re.compile(r"[a-z0-9]+"),
    "unicode": re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+"),
}


def split_words(text: str, words: Words = "latin") -> list[str]:
    """Split a text into the units ROUGE compares.

    Args:
        text: any text.
        words: `"latin"`, as MUSE and `rouge-score` do: lower-case runs of a-z and 0-9, everything else is a
            separator, so a text in Greek or Chinese has **no** words and always scores 0. `"unicode"`: runs
            of letters and digits of any script; in scripts written without spaces each character is a word.

    Returns:
        The words in order.
    """
    if words not in _PATTERNS:
        raise ValueError(f"words is {words!r}: allowed are {' and '.join(map(repr, _PATTERNS))}")
    return _PATTERNS[words].findall(text.lower())


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text with the special tokens the tokenizer adds by itself; never truncated."""
    return list(tokenizer(text, add_special_tokens=True, truncation=False, verbose=False)["input_ids"])


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids without special tokens.

    Differs from MUSE's code: there spaces before punctuation are removed too, which changes no word that
    ROUGE sees except in texts written like `do n't`.
    """
    return tokenizer.decode(list(ids), skip_special_tokens=True)
