"""Membership: can one tell from a model's probabilities which texts it was trained on?

The definitions are MUSE's. A text's *score* is a loss: low for a text the model has seen. AUC compares two
sets of texts, PrivLeak compares the AUC with that of a model retrained without the forget set.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unteach.data.documents import encode
from unteach.evaluation.inference import TEXTS_TOGETHER, Batching, token_logprobs
from unteach.evaluation.statistics import RESAMPLES, Interval, checked, percentiles
from unteach.models import context_length

if TYPE_CHECKING:
    from unteach.evaluation.metrics import Evaluation

FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""The fractions MUSE computes Min-k with."""
SCORES = ("ppl", "ppl_lower", "ppl_zlib", *(f"min_{round(100 * fraction)}" for fraction in FRACTIONS))
"""Names of the scores of one text: its mean log-loss, that divided by the loss of the lower-cased text, that
divided by the length of the zlib-compressed text, and Min-k for every fraction."""
SATURATED = 0.01
"""An AUC this near to 0 or 1 is called saturated: PrivLeak then says which side, not how far."""


def min_k(token_logprobs: ArrayLike, fraction: float = 0.4) -> float:
    """Min-k % score: minus the mean of the lowest log-probabilities, -(1/k) Σ of the k smallest log p.

    k = ⌊n · fraction⌋, at least 1, of n tokens. All tokens of the text count.

    Differs from MUSE's code: there a text with n · fraction < 1 gives NaN.

    Args:
        token_logprobs: log-probability of each token of one text given those before it.
        fraction: the share of tokens, above 0 and at most 1.

    Returns:
        A loss: low for text the model knows, never negative.

    Raises:
        ValueError: for an empty list, NaN, or a fraction out of range.
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

    Raises:
        ValueError: for an empty list or NaN.
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

    Raises:
        ValueError: if one is not between 0 and 1, or the retrained model's is 0.
    """
    for name, value in (("auc", auc), ("auc_retrained", auc_retrained)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}: an AUC between 0 and 1 is needed")
    if auc_retrained == 0:
        raise ValueError("auc_retrained is 0: PrivLeak divides by it; is the reference the target model itself?")
    return 100 * (auc - auc_retrained) / auc_retrained


def text_scores(text: str, logprobs: ArrayLike, lower_logprobs: ArrayLike | None = None) -> dict[str, float]:
    """All membership scores of one text, keyed as in `SCORES`."""
    loss = min_k(logprobs, 1.0)
    scores = {"ppl": loss}
    if lower_logprobs is not None:
        scores["ppl_lower"] = loss / max(min_k(lower_logprobs, 1.0), 1e-12)
    scores["ppl_zlib"] = loss / len(zlib.compress(text.encode("utf-8")))
    for fraction in FRACTIONS:
        scores[f"min_{round(100 * fraction)}"] = min_k(logprobs, fraction)
    return scores


def resampled_aucs(forget_scores: ArrayLike, holdout_scores: ArrayLike, seed: int = 0) -> NDArray[np.float64]:
    """AUCs of `RESAMPLES` resamplings of both sets: [RESAMPLES].

    The same seed and set sizes draw the same texts, so resamplings of two models are paired.
    """
    forget, holdout = checked(forget_scores, "forget_scores"), checked(holdout_scores, "holdout_scores")
    wins = (holdout < forget[:, None]) + 0.5 * (holdout == forget[:, None])  # [forget, holdout]
    generator = np.random.default_rng(seed)
    forget_counts = _draw_counts(len(forget), generator)
    holdout_counts = _draw_counts(len(holdout), generator)
    return ((forget_counts @ wins) * holdout_counts).sum(1) / wins.size


def auc_interval(forget_scores: ArrayLike, holdout_scores: ArrayLike, seed: int = 0) -> Interval:
    """95 % bootstrap interval of `membership_auc`, both resampled; (None, None) for a set of one text."""
    if min(np.size(forget_scores), np.size(holdout_scores)) < 2:
        return None, None
    return percentiles(resampled_aucs(forget_scores, holdout_scores, seed))


def privleak_interval(
    scores: tuple[ArrayLike, ArrayLike], retrained: tuple[ArrayLike, ArrayLike] | float, seed: int = 0
) -> Interval:
    """95 % bootstrap interval of `privleak`; the retrained model's texts are resampled too, its AUC alone is exact."""
    if min(np.size(part) for part in scores) < 2:
        return None, None
    aucs = resampled_aucs(*scores, seed)
    if isinstance(retrained, float):
        return percentiles(100 * (aucs - retrained) / retrained)
    references = resampled_aucs(*retrained, seed)
    usable = references > 0
    return percentiles(100 * (aucs[usable] - references[usable]) / references[usable])


def _draw_counts(count: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """How often each of `count` items is drawn, for every resampling: [RESAMPLES, count]."""
    draws = generator.integers(0, count, (RESAMPLES, count)) + count * np.arange(RESAMPLES)[:, None]
    return np.bincount(draws.ravel(), minlength=RESAMPLES * count).reshape(RESAMPLES, count).astype(float)


def score_texts(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Sequence[str]],
    *,
    tokens: int | None = None,
    lower: bool = True,
    batching: Batching = TEXTS_TOGETHER,
) -> tuple[dict[str, list[dict[str, float]]], int]:
    """All membership scores of sets of texts.

    Every text is read twice, as it is and in lower case.

    Returns:
        The scores of each text by set, and how many texts were longer than what was scored.

    Raises:
        ValueError: for a text of fewer than two tokens.
    """
    most = min(tokens or context_length(model), context_length(model))
    sequences: list[list[int]] = []
    cut = 0
    for name, group in texts.items():
        for number, text in enumerate(group):
            for form in (text, text.lower()) if lower else (text,):
                ids = encode(tokenizer, form)
                if len(ids) < 2:
                    raise ValueError(
                        f"membership text {number} of {name} is {text!r}, {len(ids)} token(s): at least 2 are needed, "
                        "since the first has nothing before it; leave the text out"
                    )
                sequences.append(ids[:most])
            cut += len(encode(tokenizer, text)) > most
    logprobs = iter(token_logprobs(model, sequences, batching=batching))
    scores = {
        name: [text_scores(text, next(logprobs), next(logprobs) if lower else None) for text in group]
        for name, group in texts.items()
    }
    return scores, cut


def measure_membership(evaluation: "Evaluation", *, for_stop_rule: bool = False) -> None:
    """Add the membership AUCs, the losses they compare, and PrivLeak where there is a reference.

    A stop rule gets the two AUCs that it looks at and the losses, without intervals and lower-cased texts.
    """
    benchmark, seed = evaluation.benchmark, evaluation.seed
    texts = {part: getattr(benchmark, f"membership_{part}") for part in ("forget", "retain", "holdout")}
    texts = {part: group for part, group in texts.items() if group}
    total = sum(map(len, texts.values()))
    scores, cut = score_texts(
        evaluation.model,
        evaluation.tokenizer,
        texts,
        tokens=benchmark.settings.membership_tokens,
        lower=not for_stop_rule,
        batching=evaluation.batches("membership", total if for_stop_rule else 2 * total),
    )

    def column(part: str, score: str) -> list[float]:
        return [text[score] for text in scores[part]]

    compared: dict[str, Sequence[str]] = {"forget": ("min_40", "ppl")}
    if not for_stop_rule:
        compared = {"forget": SCORES, "retain": ("min_40",)}
        evaluation.records["membership"] = _records(texts, scores)
        if cut:
            evaluation.notes.append(f"membership: only the beginning of {cut} of {total} texts was scored")
    for part in scores:
        losses = column(part, "ppl")
        if for_stop_rule:
            evaluation.add(f"nll_{part}", float(np.mean(losses)), (None, None), len(losses))
        else:
            evaluation.add_mean(f"nll_{part}", losses)
    if "holdout" not in scores:
        evaluation.notes.append("privleak is not measured: there are no holdout texts to compare with")
        return
    for first, names in compared.items():
        for score in names if first in scores else ():
            pair = column(first, score), column("holdout", score)
            interval = (None, None) if for_stop_rule else auc_interval(*pair, seed=seed)
            evaluation.add(f"auc_{first}_holdout_{score}", membership_auc(*pair), interval, sum(map(len, pair)))
    if not for_stop_rule:
        _add_privleak(evaluation, (column("forget", "min_40"), column("holdout", "min_40")))


def _add_privleak(evaluation: "Evaluation", scores: tuple[list[float], list[float]]) -> None:
    retrained: tuple[list[float], list[float]] | float
    if evaluation.reference is None:
        evaluation.notes.append(
            "privleak is not reported: no reference model was given; auc_forget_holdout_min_40 is its raw value"
        )
        return
    if isinstance(evaluation.reference, float):
        retrained = reference_auc = evaluation.reference
        evaluation.notes.append(f"privleak compares with a given AUC of {reference_auc}, which is taken as exact")
    else:
        records = evaluation.reference_records("membership")
        forget, holdout = (
            [record["scores"]["min_40"] for record in records if record["set"] == part]
            for part in ("forget", "holdout")
        )
        retrained = forget, holdout
        reference_auc = membership_auc(*retrained)
    if reference_auc == 0:
        evaluation.notes.append("privleak is not reported: the reference model's AUC is 0, and it divides by it")
        return
    auc = membership_auc(*scores)
    interval = privleak_interval(scores, retrained, evaluation.seed)
    evaluation.add("privleak", privleak(auc, reference_auc), interval, sum(map(len, scores)))
    if auc <= SATURATED or auc >= 1 - SATURATED:
        bound = privleak(1.0, reference_auc) if auc > 0.5 else -100.0
        evaluation.notes.append(
            f"privleak is saturated: the AUC is {auc:.4f} and the value can go no further than {bound:+.1f}; it "
            "says on which side the model is, not how far"
        )


def _records(
    texts: Mapping[str, Sequence[str]], scores: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[dict[str, Any]]:
    """One record per text: its set, its beginning, its scores."""
    return [
        {"set": name, "text": text if len(text) <= 200 else text[:200] + "…", "scores": dict(values)}
        for name, group in texts.items()
        for text, values in zip(group, scores[name], strict=True)
    ]
