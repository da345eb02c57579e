"""Every metric in one place: what it means, how it is printed, and how it is measured. To add one, add it here.

A *metric* is a number with a name (`METRICS`, in the order of tables): scores files, tables, the report, the model
card and the terminal take its title, direction and decimals from its entry, and a `column` puts it into the tables.
A *measurement* reads a model and adds metrics (`MEASUREMENTS`, in the order in which they are made): a function
here, marked with `measurement`, which says what it needs of a benchmark.

Nothing heavy is imported before something is measured: a report needs the names alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from unteach.evaluation.formulas import Interval, Metric, mean_metric

if TYPE_CHECKING:
    from unteach.corpora import Benchmark
    from unteach.evaluation.inference import Advance, Batching
    from unteach.evaluation.scores import Scores

RAW_AUC, LOSS_AUC = "auc_forget_holdout_min_40", "auc_forget_holdout_ppl"
PRIVLEAK_MISSING = (
    "PrivLeak is missing because it compares with a retrained model, and none was measured."
    " The raw membership AUC stands in its place."
)


@dataclass(frozen=True)
class MetricInfo:
    """How a metric is named, explained and printed."""

    title: str = ""
    explanation: str = ""
    arrow: Literal["↑", "↓", "→ 0", ""] = ""
    """The better direction."""
    decimals: int = 1
    chance: float | None = None
    """What guessing gives, or a model that knows nothing."""
    unit: str = "percent"
    """`percent` (scores between 0 and 1 times 100), `nats per token`, `fraction`, `auc` or `p-value`."""
    column: Literal["main", "beside", ""] = ""
    """`main`: a column of the paper's Table 1. `beside`: shown beside them."""
    ranked: bool = False
    """Whether the best mean is set bold, as in the paper; verbmem_f is not, because runs stop on it."""
    records: str = ""
    """Under which name its per-item records lie; by default under its own."""

    @property
    def higher_is_better(self) -> bool | None:
        """None where neither is: PrivLeak is best at zero."""
        return {"↑": True, "↓": False}.get(self.arrow)


_main, _beside = partial(MetricInfo, column="main"), partial(MetricInfo, column="beside")
_nats = partial(MetricInfo, decimals=3, unit="nats per token")
_loss = partial(_nats, records="membership")
_auc = partial(MetricInfo, decimals=3, chance=0.5, unit="auc", records="membership")
_fraction = partial(MetricInfo, decimals=3, unit="fraction")

METRICS: dict[str, MetricInfo] = {
    "verbmem_f": _main(
        "recital of forget documents", "ROUGE-L of the continuation of a forget document with the true one", "↓"
    ),
    "knowmem_f": _main(
        "answers on forget documents", "ROUGE-L of answers to questions about the forget documents", "↓", ranked=True
    ),
    "knowmem_r": _main(
        "answers on retained documents", "ROUGE-L of answers to questions about documents to be kept", "↑", ranked=True
    ),
    "privleak": _main(
        "membership leak",
        "membership-inference AUC relative to a retrained model: below zero the documents can still be told"
        " apart, above zero they stand out as forgotten",
        "→ 0",
        ranked=True,
        records="membership",
    ),
    "mmlu_val": _main(
        "general knowledge",
        "accuracy on the MMLU validation questions, of four answers each",
        "↑",
        chance=25.0,
        ranked=True,
    ),
    "nll_general": _nats(
        "loss on general text",
        "mean negative log-likelihood per token of unrelated text, in nats",
        "↓",
        column="beside",
    ),
    "degenerate": _beside("repetitive output", "share of continuations that are mere repetition", "↓"),
    "mmlu_invalid": _beside(
        "invalid MMLU answers", "share of greedy answers that are not A, B, C or D", "↓", records="mmlu_val"
    ),
    "mmlu_greedy": MetricInfo(
        "greedy MMLU answers",
        "share of greedy answers that are the right letter",
        "↑",
        chance=25.0,
        records="mmlu_val",
    ),
    "verbmem_holdout": MetricInfo(
        "recital of texts never seen", "ROUGE-L of the continuation of documents the model was not trained on"
    ),
    "knowmem_r_kept": MetricInfo(
        "answers on kept neighbours", "knowmem_r of those retained documents that the model was held on", "↑"
    ),
    "knowmem_r_others": MetricInfo(
        "answers on other neighbours", "knowmem_r of those retained documents that it was not held on", "↑"
    ),
    "knowmem_pretraining": MetricInfo(
        "answers on pretraining text", "ROUGE-L of answers to questions about people of the pretraining text", "↑"
    ),
    "knowmem_pretraining_kept": MetricInfo(
        "answers on pretraining text held", "knowmem_pretraining of people whom the mixed general text tells of", "↑"
    ),
    "knowmem_pretraining_others": MetricInfo(
        "answers on other pretraining text", "knowmem_pretraining of people whom it does not tell of", "↑"
    ),
    "nll_news": _nats(
        "loss on pretraining news",
        "mean negative log-likelihood per token of reports of the pretraining text that no general text has, in nats",
        "↓",
    ),
    "verbmem_r": MetricInfo(
        "recital of kept documents", "ROUGE-L of the continuation of a document to be kept with the true one", "↑"
    ),
    "nll_retain": _loss(
        "loss on kept documents", "mean negative log-likelihood per token of documents to be kept, in nats", "↓"
    ),
    "nll_forget": _loss(
        "loss on forget documents", "mean negative log-likelihood per token of the forget documents, in nats"
    ),
    RAW_AUC: _auc(
        "membership AUC",
        "chance that a never-seen text looks more familiar (Min-40 %) than a forget text: 0 when memorised,"
        " about 0.5 when never seen",
    ),
    LOSS_AUC: _auc(
        "membership AUC by loss",
        "chance that a never-seen text has a lower loss than a forget text: 0 memorised, about 0.5 never seen",
    ),
    "distance": _fraction(
        "distance from the stop rule", "how far its conditions are from being met, summed: 0 where all are", "↓"
    ),
    "tofu_model_utility": _fraction(
        "what TOFU wants kept",
        "harmonic mean of probability, ROUGE-L and truth ratio on kept authors, real authors and world facts",
        "↑",
    ),
    "tofu_forget_quality": _fraction(
        "likeness to the retrained model",
        "p-value of a test whether the truth ratios on forget authors are distributed as the retrained model's",
        "↑",
        unit="p-value",
    ),
}
FAMILIES: Mapping[str, MetricInfo] = {
    "auc_forget_holdout_min_": _auc("membership AUC by few words"),
    "auc_": _auc(),
    "nll_": _loss(),
    "tofu_forget_truth_ratio": _fraction(),
    "tofu_forget_": _fraction(arrow="↓"),
    "tofu_": _fraction(arrow="↑"),
}
"""Metrics without an entry of their own, by how their names begin."""


def describe(metric: str) -> MetricInfo:
    """The entry of a metric; for one that has none that of its family, and for any other an empty one."""
    family = next((info for beginning, info in FAMILIES.items() if metric.startswith(beginning)), MetricInfo())
    return METRICS.get(metric, family)


def columns(*kinds: Literal["main", "beside"]) -> tuple[str, ...]:
    """The metrics that tables show, in their order: those of each kind, by default of both."""
    chosen = kinds or ("main", "beside")
    return tuple(name for kind in chosen for name, info in METRICS.items() if info.column == kind)


@dataclass
class Evaluation:
    """One evaluation under way: the model and what to measure it on, and what was found so far."""

    model: Any
    tokenizer: Any
    benchmark: Benchmark
    reference: Scores | float | None
    """Scores of a model retrained without the forget set, or its `RAW_AUC` alone."""
    batching: Batching
    seed: int
    start_bar: Callable[[str, int], Advance]
    """Begins a progress bar with a label and a number of items."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def batches(self, label: str, total: int) -> Batching:
        """How items are read together, with a progress bar of their own."""
        return dataclasses.replace(self.batching, advance=self.start_bar(label, total))

    def add_mean(self, name: str, scores: Sequence[float]) -> None:
        """Add a metric that is the mean of one score per item, between 0 and 1 where its unit is percent."""
        info = describe(name)
        self.metrics[name] = mean_metric(scores, higher_is_better=info.higher_is_better, unit=info.unit, seed=self.seed)

    def add(self, name: str, value: float, interval: Interval, count: int) -> None:
        """Add any other metric."""
        info = describe(name)
        self.metrics[name] = Metric(value, *interval, count, info.higher_is_better, info.unit)

    def add_answers(self, name: str, records: list[dict[str, Any]]) -> None:
        """Add the mean `score` of answers to prompts, keep them, and note how many prompts were cut to fit."""
        from unteach.models import context_length

        self.add_mean(name, [record["score"] for record in records])
        self.records[name] = records
        cut = sum("cut" in record for record in records)
        if cut:
            self.notes.append(
                f"{name}: {cut} of {len(records)} prompts are longer than the model's context "
                f"({context_length(self.model)} tokens) allows; their oldest tokens were dropped"
            )

    def reference_records(self, name: str) -> list[dict[str, Any]]:
        """Records of the reference model, after checking that they are of the same data."""
        reference: Any = self.reference
        theirs, ours = reference.data_sha256, self.benchmark.data_sha256
        if theirs != ours:
            raise ValueError(
                f"reference_scores were measured on {reference.benchmark!r} (data {theirs[:12]}), but this is "
                f"{self.benchmark.name!r} (data {ours[:12]}): measure the reference on the same benchmark"
            )
        if name not in reference.records:
            raise ValueError(f"reference_scores has no {name} records: measure the reference on the whole benchmark")
        return reference.records[name]


Measure = Callable[[Evaluation, str], None]
"""Reads the model and adds to an evaluation what belongs to the measurement of that name."""


@dataclass(frozen=True)
class Measurement:
    """What can be asked for by name."""

    measure: Measure
    needs: tuple[str, ...]
    """Fields of a `Benchmark` without which it is left out."""
    absent: str
    """What a benchmark without them has not, for the note that says so; empty: no note."""
    by_default: bool
    """Whether it is made where nothing is asked for by name."""


MEASUREMENTS: dict[str, Measurement] = {}
"""By name. `privleak` stands for all membership metrics, `mmlu_val` for all multiple-choice ones; `degenerate` comes
with whatever is generated."""


def measurement(name: str, *needs: str, absent: str = "", by_default: bool = True) -> Callable[[Measure], Measure]:
    """Mark a function as a measurement; see `Measurement` for the arguments."""

    def register(measure: Measure) -> Measure:
        MEASUREMENTS[name] = Measurement(measure, needs, absent, by_default)
        return measure

    return register


@measurement("verbmem_r", "verbatim_retain")
@measurement("verbmem_holdout", "verbatim_holdout")
@measurement("verbmem_f", "verbatim_forget", absent="verbatim probes")
def _recital(evaluation: Evaluation, name: str) -> None:
    from unteach.evaluation.memory import recite

    probes = getattr(evaluation.benchmark, *MEASUREMENTS[name].needs)
    options: Any = {"settings": evaluation.benchmark.settings, "batching": evaluation.batches(name, len(probes))}
    evaluation.add_answers(name, recite(evaluation.model, evaluation.tokenizer, probes, **options))


@measurement("knowmem_r", "knowledge_retain", absent="questions about the retain set")
@measurement("knowmem_f", "knowledge_forget", absent="questions about the forget set")
def _answers(evaluation: Evaluation, name: str) -> None:
    from unteach.evaluation.memory import answer_questions

    part = MEASUREMENTS[name].needs[0]
    questions, examples = (getattr(evaluation.benchmark, field) for field in (part, f"{part}_examples"))
    options: Any = {"settings": evaluation.benchmark.settings, "batching": evaluation.batches(name, len(questions))}
    records = answer_questions(evaluation.model, evaluation.tokenizer, questions, examples, **options)
    evaluation.add_answers(name, records)


@measurement("membership", "membership_forget", "membership_holdout", by_default=False)
@measurement("privleak", "membership_forget", absent="forget and holdout texts for membership")
def _membership(evaluation: Evaluation, name: str) -> None:
    from unteach.evaluation.membership import measure_membership

    measure_membership(evaluation, for_stop_rule=name == "membership")


@measurement("nll_retain", "membership_retain", by_default=False)
def _kept_text(evaluation: Evaluation, name: str) -> None:
    from unteach.evaluation.membership import measure_kept_text

    if name not in evaluation.metrics:  # else it came with membership
        measure_kept_text(evaluation, name)


@measurement("mmlu_val", "multiple_choice", absent="multiple-choice questions")
def _multiple_choice(evaluation: Evaluation, name: str) -> None:
    from unteach.evaluation.memory import answer_choices

    questions = evaluation.benchmark.multiple_choice
    batching = evaluation.batches(name, len(questions))
    records = answer_choices(evaluation.model, evaluation.tokenizer, questions, batching=batching)
    evaluation.add_answers(name, records)
    evaluation.add_mean("mmlu_greedy", [record["greedy_score"] for record in records])
    evaluation.add_mean("mmlu_invalid", [float(not record["valid"]) for record in records])


@measurement("nll_general", "general_texts", absent="general texts")
def _general_text(evaluation: Evaluation, name: str) -> None:
    from unteach.evaluation.membership import measure_general_text

    measure_general_text(evaluation, name)


@measurement("tofu", "tofu")
def _tofu(evaluation: Evaluation, name: str) -> None:
    from unteach.evaluation.tofu import measure_tofu

    measure_tofu(evaluation, name)
