"""The metrics a report knows by name: what they mean, which way is better, how they are printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricInfo:
    """How a metric is named, explained and printed."""

    title: str
    explanation: str
    arrow: str = ""
    decimals: int = 1
    unit: str = ""


METRICS: Mapping[str, MetricInfo] = {
    "verbmem_f": MetricInfo(
        "recital of forget documents",
        "ROUGE-L of the continuation of a forget document with the true one",
        "↓",
    ),
    "knowmem_f": MetricInfo(
        "answers on forget documents", "ROUGE-L of answers to questions about the forget documents", "↓"
    ),
    "knowmem_r": MetricInfo(
        "answers on retained documents", "ROUGE-L of answers to questions about documents to be kept", "↑"
    ),
    "privleak": MetricInfo(
        "membership leak",
        "membership-inference AUC relative to a retrained model: below zero the documents can still be told"
        " apart, above zero they stand out as forgotten",
        "→ 0",
    ),
    "mmlu_val": MetricInfo("general knowledge", "accuracy on the MMLU validation questions", "↑"),
    "nll_general": MetricInfo(
        "loss on general text", "mean negative log-likelihood per token of unrelated text, in nats", "↓", 3
    ),
    "degenerate": MetricInfo("repetitive output", "share of continuations that are mere repetition", "↓"),
    "mmlu_invalid": MetricInfo("invalid MMLU answers", "share of greedy answers that are not A, B, C or D", "↓"),
    "verbmem_holdout": MetricInfo(
        "recital of texts never seen", "ROUGE-L of the continuation of documents the model was not trained on"
    ),
    "auc_forget_holdout_min_40": MetricInfo(
        "raw membership AUC",
        "chance that a never-seen text looks more familiar (Min-40 %) than a forget text: 0 when memorised,"
        " about 0.5 when never seen",
        "",
        3,
    ),
    "tofu_model_utility": MetricInfo(
        "what TOFU wants kept",
        "harmonic mean of probability, ROUGE-L and truth ratio on kept authors, real authors and world facts",
        "↑",
        3,
    ),
    "tofu_forget_quality": MetricInfo(
        "likeness to the retrained model",
        "p-value of a test whether the truth ratios on forget authors are distributed as the retrained model's",
        "↑",
        3,
    ),
}
MAIN = ("verbmem_f", "knowmem_f", "knowmem_r", "privleak", "mmlu_val")
"""The columns of the paper's Table 1."""
BESIDE = ("nll_general", "degenerate", "mmlu_invalid")
"""Columns beside them: general text, and what gives a broken model away."""
RAW_AUC = "auc_forget_holdout_min_40"
PRIVLEAK_MISSING = (
    "PrivLeak is missing because it compares with a retrained model, and none was measured."
    " The raw membership AUC stands in its place."
)
RANKED = ("knowmem_f", "knowmem_r", "privleak", "mmlu_val")
"""Columns whose best mean is set bold, as in the paper: verbmem_f is not, because runs stop on it."""


def decimals_of(metric: str) -> int:
    """How many decimals a metric is printed with, also one without an entry above."""
    return METRICS[metric].decimals if metric in METRICS else 3 if metric.startswith(("auc_", "nll_", "tofu_")) else 1
