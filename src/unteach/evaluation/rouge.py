"""ROUGE-L: how much of an expected text a model reproduces in order.

The formula is written out here, not taken from the `rouge-score` package, because the stop rule of a training
run needs it where nothing can be installed, and because that package sees no letter outside a-z. On every
text the default gives the same number as `rouge-score` without stemmer; the tests hold the two against each
other.
"""

import functools
from collections.abc import Sequence
from typing import Any

from unteach.data.documents import Words, split_words


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest sequence of words that occurs in both, in order but not necessarily side by side.

    Bit-parallel: bit i of `row` is 0 where the table of the textbook algorithm rises at word i of `first`.
    """
    where: dict[str, int] = {}
    for position, word in enumerate(first):
        where[word] = where.get(word, 0) | (1 << position)
    full = (1 << len(first)) - 1
    row = full
    for word in second:
        match = row & where.get(word, 0)
        row = ((row + match) | (row - match)) & full
    return len(first) - row.bit_count()


def rouge_l(expected: str, output: str, *, words: Words = "latin") -> float:
    """ROUGE-L F-measure, no stemmer: 2PR / (P + R) with P = LCS / |output|, R = LCS / |expected|.

    LCS is the longest common subsequence of words; lengths are counted in words. This is the score of MUSE's
    `verbmem` and `knowmem`.

    Returns:
        A number between 0 (nothing in common, or one of the two has no words) and 1 (the same words).
    """
    expected_words, output_words = split_words(expected, words), split_words(output, words)
    if not expected_words or not output_words:
        return 0.0
    common = longest_common_subsequence(expected_words, output_words)
    precision, recall = common / len(output_words), common / len(expected_words)
    return 2 * precision * recall / (precision + recall) if common else 0.0


def rouge_l_recall_stemmed(expected: str, output: str) -> float:
    """ROUGE-L recall with the Porter stemmer, the form TOFU reports (needs the `rouge-score` package)."""
    return float(_stemming_scorer().score(expected, output)["rougeL"].recall)


@functools.cache
def _stemming_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError("TOFU's scores need the stemmer of rouge-score: pip install rouge-score") from error
    return RougeScorer(["rougeL"], use_stemmer=True)
