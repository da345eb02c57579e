"""Losses of given texts: can one tell from them which texts a model was trained on, and is general text as likely?"""

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from unteach.data.documents import encode
from unteach.evaluation.formulas import bootstrap_ratio, membership_auc, membership_interval, min_k, privleak
from unteach.evaluation.inference import token_logprobs
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


def score_texts(
    evaluation: "Evaluation", texts: Mapping[str, Sequence[str]], *, lower: bool = True
) -> tuple[dict[str, list[dict[str, float]]], int]:
    """All membership scores of sets of texts, and how many texts were longer than what was scored.

    Each text is read as it is and (`lower`) in lower case.
    """
    context = context_length(evaluation.model)
    most = min(evaluation.benchmark.settings.membership_tokens or context, context)
    sequences: list[list[int]] = []
    cut = 0
    for name, group in texts.items():
        for number, text in enumerate(group):
            forms = [encode(evaluation.tokenizer, form) for form in ((text, text.lower()) if lower else (text,))]
            shortest = min(map(len, forms))
            if shortest < 2:
                raise ValueError(
                    f"membership text {number} of {name} is {text!r}, {shortest} token(s): at least 2 are needed, "
                    "since the first has nothing before it; leave the text out"
                )
            sequences += [ids[:most] for ids in forms]
            cut += len(forms[0]) > most
    batching = evaluation.batches("membership", len(sequences))
    logprobs = iter(token_logprobs(evaluation.model, sequences, batching=batching))
    scores = {
        name: [text_scores(text, next(logprobs), next(logprobs) if lower else None) for text in group]
        for name, group in texts.items()
    }
    return scores, cut


def measure_membership(evaluation: "Evaluation", *, for_stop_rule: bool = False) -> None:
    """Add the membership AUCs, the losses they compare, and PrivLeak where there is a reference.

    A stop rule gets the two AUCs that it looks at and the losses, without intervals and lower-cased texts.
    """
    parts = ("forget", "retain", "holdout")
    texts = {part: group for part in parts if (group := getattr(evaluation.benchmark, f"membership_{part}"))}
    scores, cut = score_texts(evaluation, texts, lower=not for_stop_rule)

    def column(part: str, score: str) -> list[float]:
        return [text[score] for text in scores[part]]

    compared = {"forget": ("min_40", "ppl")} if for_stop_rule else {"forget": SCORES, "retain": ("min_40",)}
    if not for_stop_rule:
        evaluation.records["membership"] = [
            {"set": part, "text": shortened(text), "scores": values}
            for part, group in texts.items()
            for text, values in zip(group, scores[part], strict=True)
        ]
        if cut:
            total = sum(map(len, texts.values()))
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
            interval = (None, None) if for_stop_rule else membership_interval(pair, seed=evaluation.seed)
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
        retrained, reference_auc = (forget, holdout), membership_auc(forget, holdout)
    if reference_auc == 0:
        evaluation.notes.append("privleak is not reported: the reference model's AUC is 0, and it divides by it")
        return
    auc = membership_auc(*scores)
    interval = membership_interval(scores, retrained, evaluation.seed)
    evaluation.add("privleak", privleak(auc, reference_auc), interval, sum(map(len, scores)))
    if auc <= SATURATED or auc >= 1 - SATURATED:
        bound = privleak(1.0, reference_auc) if auc > 0.5 else -100.0
        evaluation.notes.append(
            f"privleak is saturated: the AUC is {auc:.4f} and the value can go no further than {bound:+.1f}; it "
            "says on which side the model is, not how far"
        )


def measure_kept_text(evaluation: "Evaluation", name: str) -> None:
    """Add the loss of the retain texts, as membership has it."""
    scores, _ = score_texts(evaluation, {"retain": evaluation.benchmark.membership_retain}, lower=False)
    losses = [text["ppl"] for text in scores["retain"]]
    evaluation.add(name, float(np.mean(losses)), (None, None), len(losses))


def measure_general_text(evaluation: "Evaluation", name: str) -> None:
    """Add the loss per token on general text."""
    texts = evaluation.benchmark.general_texts
    most = min(evaluation.benchmark.settings.general_tokens, context_length(evaluation.model))
    sequences = [encode(evaluation.tokenizer, text)[:most] for text in texts]
    logprobs = token_logprobs(evaluation.model, sequences, batching=evaluation.batches(name, len(texts)))
    losses, counts = [float(-values.sum()) for values in logprobs], [float(len(values)) for values in logprobs]
    interval = bootstrap_ratio(losses, counts, seed=evaluation.seed)
    evaluation.add(name, float(np.sum(losses) / np.sum(counts)), interval, len(texts))
    evaluation.records[name] = [
        {"text": shortened(text), "tokens": int(count), "score": loss / count}
        for text, loss, count in zip(texts, losses, counts, strict=True)
    ]


def shortened(text: str) -> str:
    """A text as its record shows it."""
    return text if len(text) <= 200 else text[:200] + "…"
