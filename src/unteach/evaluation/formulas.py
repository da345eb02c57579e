"""The measuring formulas as plain functions, without a model: of a generated text, of losses, and of many items.

*Texts.* ROUGE-L is written out because the stop rule of a training run needs it where nothing can be installed, and
because the `rouge-score` package sees no letter outside a-z; without stemmer the two give the same number (a test). A
model broken by unlearning often says one phrase over and over: its ROUGE-L is near zero, which looks like perfect
forgetting, and the share of degenerate output tells the two apart.

*Membership.* The definitions are MUSE's. A text's score is a loss: low for a text the model has seen. AUC compares two
sets of texts, PrivLeak compares the AUC with that of a model retrained without the forget set.

*Intervals.* Each is the percentile bootstrap over items: drawn with replacement `RESAMPLES` times from a generator of
their own with a fixed seed; the 2.5th and 97.5th percentile of the recomputed value are the bounds.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from unteach.data.documents import Words

RESAMPLES, _BLOCK = 2000, 4_000_000
Interval = tuple[float | None, float | None]
MINIMUM_UNITS, MINIMUM_CHARACTERS, MINIMUM_TRIGRAMS = 4, 24, 16
FEW = 64
"""Fewer items than this are few: noise is then allowed for, and said."""
COPIES, LOOP_SHARE, DISTINCT_SHARE = 3, 1 / 3, 0.5
"""What counts as repetition, see `is_degenerate`."""


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


def rouge_l(expected: str, output: str, *, words: "Words" = "latin") -> float:
    """ROUGE-L F-measure, no stemmer: 2PR / (P + R) with P = LCS / |output|, R = LCS / |expected|.

    LCS is the longest common subsequence of words; lengths are counted in words. This is the score of MUSE's
    `verbmem` and `knowmem`: between 0 (nothing in common, or one of the two has no words) and 1 (the same words).
    """
    from unteach.data.documents import split_words  # late: it comes with torch, which a report does not need

    expected_words, output_words = split_words(expected, words), split_words(output, words)
    common = longest_common_subsequence(expected_words, output_words)
    if not common:
        return 0.0
    precision, recall = common / len(output_words), common / len(expected_words)
    return 2 * precision * recall / (precision + recall)


def is_degenerate(text: str) -> bool:
    """Whether a text is mostly repetition.

    Its units are words (runs of letters and digits, lower-cased) and single punctuation marks. One of these holds:

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
    units = re.findall(r"\w+|[^\w\s]", text.lower())
    numbers = np.unique(units, return_inverse=True)[1]  # equal ones for equal units
    characters = np.frombuffer(" ".join(text.split()).encode("utf-32-le"), dtype=np.uint32)
    for sequence, minimum in ((numbers, MINIMUM_UNITS), (characters, MINIMUM_CHARACTERS)):
        if longest_loop(sequence, COPIES, minimum)[2] / len(sequence) >= LOOP_SHARE:
            return True
    trigrams = list(zip(units, units[1:], units[2:], strict=False))
    return len(trigrams) >= MINIMUM_TRIGRAMS and len(set(trigrams)) / len(trigrams) < DISTINCT_SHARE


def longest_loop(sequence: NDArray, copies: int, minimum: int) -> tuple[int, int, int]:
    """The longest stretch of one phrase repeated without a break: its start, period and length, or three zeros.

    A stretch of period p is a maximal run where every element equals the one p before it, plus those first p.
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


def min_k(token_logprobs: ArrayLike, fraction: float = 0.4) -> float:
    """Min-k % score: minus the mean of the lowest log-probabilities, -(1/k) Σ of the k smallest log p.

    k = ⌊n · fraction⌋, at least 1, of n tokens; all tokens of the text count, each given those before it. A loss:
    low for text the model knows, never negative.

    Differs from MUSE's code: there a text with n · fraction < 1 gives NaN.
    """
    values = checked(token_logprobs, "token_logprobs")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}: a number above 0 and at most 1 is needed")
    lowest = max(1, int(len(values) * fraction))
    return float(-np.sort(values)[:lowest].mean())


def membership_auc(forget_scores: ArrayLike, holdout_scores: ArrayLike) -> float:
    """AUC = P(a holdout text looks more like a member than a forget text); ties count one half.

    Scores are losses, so this is P(holdout < forget) + ½ P(holdout = forget), MUSE's `forget_holdout` AUC.
    A memorised forget set gives 0, a model that never saw either set about 0.5, and a forget set that looks
    less likely than unseen text gives up to 1. All scores equal: 0.5.
    """
    forget = checked(forget_scores, "forget_scores")
    holdout = np.sort(checked(holdout_scores, "holdout_scores"))
    below = np.searchsorted(holdout, forget, side="left")
    not_above = np.searchsorted(holdout, forget, side="right")
    return float((below.sum() + not_above.sum()) / (2 * len(forget) * len(holdout)))


def privleak(auc: float, auc_retrained: float) -> float:
    """PrivLeak = 100 · (AUC - AUC_retrained) / AUC_retrained, in percent.

    0: as private as retraining. -100: the forget set is still recognised in full. Positive: over-unlearned,
    the forget set stands out as unusually unlikely; at most `privleak(1, auc_retrained)`.
    """
    for name, value in (("auc", auc), ("auc_retrained", auc_retrained)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}: an AUC between 0 and 1 is needed")
    if auc_retrained == 0:
        raise ValueError("auc_retrained is 0: PrivLeak divides by it; is the reference the target model itself?")
    return 100 * (auc - auc_retrained) / auc_retrained


@dataclass(frozen=True)
class Metric:
    """One measured value."""

    value: float
    low: float | None
    high: float | None
    """Bounds of the 95 % bootstrap interval; None where fewer than two items were measured."""
    count: int
    """How many items the value is made of."""
    higher_is_better: bool | None
    unit: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dictionary."""
        return dataclasses.asdict(self)


def mean_metric(
    scores: Sequence[float], *, higher_is_better: bool | None, unit: str = "percent", seed: int = 0
) -> Metric:
    """The mean of per-item scores, times 100 where it is a percentage, with its interval."""
    values, scale = checked(scores, "scores"), 100.0 if unit == "percent" else 1.0
    low, high = bootstrap_ratio(values * scale, np.ones_like(values), seed=seed)
    return Metric(float(values.mean() * scale), low, high, len(values), higher_is_better, unit)


def chance_level(value: float, high: float | None, items: int, few: int) -> float:
    """What the mean of a `few` items reaches by chance: `value` and `high` are a mean of many like them and its bound.

    The fewer the items, the wider the interval: as one over the root of their number.
    """
    return value if high is None else value + (high - value) * max(1.0, items / few) ** 0.5


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0) -> Interval:
    """95 % interval of Σ numerators / Σ denominators, items resampled together; (None, None) for fewer than two.

    With denominators of 1 this is the mean; with token counts it is a mean per token.
    """
    top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    count = len(top)
    if count < 2:
        return None, None
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK // count)
    ratios: list[NDArray[np.float64]] = []
    for start in range(0, RESAMPLES, block):
        draws = generator.integers(0, count, (min(block, RESAMPLES - start), count))
        ratios.append(top[draws].sum(1) / bottom[draws].sum(1))
    return percentiles(np.concatenate(ratios))


def percentiles(values: NDArray[np.float64]) -> Interval:
    """The 2.5th and 97.5th percentile of resampled values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def checked(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """A one-dimensional float array that is not empty and has no NaN, else a ValueError."""
    array = np.asarray(values, dtype=float)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: a plain list of numbers is needed")
    if not len(array):
        raise ValueError(f"{name} is empty: at least one number is needed")
    missing = np.flatnonzero(np.isnan(array))
    if len(missing):
        raise ValueError(
            f"{name} has NaN at {len(missing)} of {len(array)} positions, first at {missing[0]}: "
            "a model with broken weights cannot be scored"
        )
    return array


def resampled_aucs(forget_scores: ArrayLike, holdout_scores: ArrayLike, seed: int = 0) -> NDArray[np.float64]:
    """AUCs of `RESAMPLES` resamplings of both sets: [RESAMPLES].

    The same seed and set sizes draw the same texts, so resamplings of two models are paired.
    """
    forget, holdout = checked(forget_scores, "forget_scores"), checked(holdout_scores, "holdout_scores")
    wins = (holdout < forget[:, None]) + 0.5 * (holdout == forget[:, None])  # [forget, holdout]
    generator = np.random.default_rng(seed)
    forget_counts, holdout_counts = (_draw_counts(len(group), generator) for group in (forget, holdout))
    return ((forget_counts @ wins) * holdout_counts).sum(1) / wins.size


def membership_interval(
    scores: tuple[ArrayLike, ArrayLike], retrained: tuple[ArrayLike, ArrayLike] | float | None = None, seed: int = 0
) -> Interval:
    """95 % bootstrap interval of `membership_auc`, both sets resampled; (None, None) for a set of one text.

    With a retrained model of `privleak`: its texts are resampled too, its AUC alone is taken as exact.
    """
    if min(np.size(part) for part in scores) < 2:
        return None, None
    aucs = resampled_aucs(*scores, seed)
    if retrained is None:
        return percentiles(aucs)
    references = np.full_like(aucs, retrained) if isinstance(retrained, float) else resampled_aucs(*retrained, seed)
    usable = references > 0
    return percentiles(100 * (aucs[usable] - references[usable]) / references[usable])


def _draw_counts(count: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """How often each of `count` items is drawn, for every resampling: [RESAMPLES, count]."""
    draws = generator.integers(0, count, (RESAMPLES, count)) + count * np.arange(RESAMPLES)[:, None]
    return np.bincount(draws.ravel(), minlength=RESAMPLES * count).reshape(RESAMPLES, count).astype(float)
