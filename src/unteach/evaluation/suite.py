"""Everything a benchmark can measure on one model, in one call."""

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from unteach.corpora import Benchmark
from unteach.data.text import encode
from unteach.evaluation.generation import BATCH_SIZE
from unteach.evaluation.knowmem import answer_questions
from unteach.evaluation.membership import (
    SATURATED,
    SCORES,
    auc_interval,
    membership_auc,
    membership_records,
    privleak,
    privleak_bound,
    privleak_interval,
    score_texts,
)
from unteach.evaluation.mmlu import answer_choices
from unteach.evaluation.progress import Bars
from unteach.evaluation.scores import Scores, library_versions
from unteach.evaluation.scoring import token_logprobs
from unteach.evaluation.statistics import Metric, bootstrap_ratio, mean_metric
from unteach.evaluation.tofu import answer_tofu, tofu_metrics
from unteach.evaluation.verbmem import recite
from unteach.models import context_length

MEASUREMENTS = (
    "verbmem_f",
    "verbmem_holdout",
    "knowmem_f",
    "knowmem_r",
    "privleak",
    "mmlu_val",
    "nll_general",
    "tofu",
)
"""What can be asked for by name. `privleak` stands for all membership metrics, `mmlu_val` for all multiple-choice
ones; `degenerate` comes with whatever is generated."""
_ABSENT = {
    "verbmem_f": "verbatim probes",
    "knowmem_f": "questions about the forget set",
    "knowmem_r": "questions about the retain set",
    "privleak": "forget and holdout texts for membership",
    "mmlu_val": "multiple-choice questions",
    "nll_general": "general texts",
}

Reference = Scores | Mapping[str, Any] | float


def evaluate(
    model: Any,
    tokenizer: Any,
    benchmark: Benchmark,
    *,
    reference_scores: Reference | None = None,
    measurements: Collection[str] | None = None,
    batch_size: int = BATCH_SIZE,
    batch_tokens: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    name: str = "",
    model_name: str = "",
    step: int | None = None,
) -> Scores:
    """Measure a model.

    Leaves the model and the random state of torch as they were: safe to call between training steps.

    Args:
        model: a Hugging Face causal language model, on any device, in any precision.
        tokenizer: its tokenizer.
        benchmark: what to measure on.
        reference_scores: for PrivLeak and TOFU's forget quality: the scores of a model retrained without the
            forget set, measured on the same benchmark; or its `auc_forget_holdout_min_40` as a number.
        measurements: names out of `MEASUREMENTS`, by default all that the benchmark has data for.
        batch_size: most prompts decoded together.
        batch_tokens: most tokens held at once, see `generation.generate`.
        seed: of the bootstrap, kept in the result.
        progress: whether to show progress bars on stderr; by default where that is a terminal.
        name: of the result, to tell several apart.
        model_name: where the model is from.
        step: after how many training steps.

    Returns:
        The scores: `scores["verbmem_f"]` is a value, see `Scores`.
    """
    wanted = _check_measurements(measurements)
    started = time.perf_counter()
    with Bars(progress) as bars:
        run = _Run(model, tokenizer, benchmark, batch_size, batch_tokens, seed, bars)
        for measurement, probes in (
            ("verbmem_f", benchmark.verbatim_forget),
            ("verbmem_holdout", benchmark.verbatim_holdout),
        ):
            if measurement in wanted and probes:
                run.verbatim(measurement, probes)
        if "knowmem_f" in wanted and benchmark.knowledge_forget:
            run.knowledge("knowmem_f", benchmark.knowledge_forget, benchmark.knowledge_forget_examples)
        if "knowmem_r" in wanted and benchmark.knowledge_retain:
            run.knowledge("knowmem_r", benchmark.knowledge_retain, benchmark.knowledge_retain_examples)
        if "privleak" in wanted and benchmark.membership_forget and benchmark.membership_holdout:
            run.membership(reference_scores)
        if "mmlu_val" in wanted and benchmark.multiple_choice:
            run.multiple_choice()
        if "nll_general" in wanted and benchmark.general_texts:
            run.general()
        if "tofu" in wanted and benchmark.tofu is not None:
            run.tofu(reference_scores)
    run.degenerate()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # decoding took much more than training will: others may share the GPU
    settings = dataclasses.asdict(benchmark.settings)
    absent = [
        f"{measurement} is not measured: the benchmark has no {what}"
        for measurement, what in _ABSENT.items()
        if measurement in wanted and not run.has(measurement)
    ]
    return Scores(
        benchmark=benchmark.name,
        metrics=run.metrics,
        records=run.records,
        notes=(*benchmark.notes, *run.notes, *absent),
        settings={key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        data_sha256=benchmark.data_sha256,
        name=name,
        model=model_name,
        step=step,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=library_versions(),
    )


def _check_measurements(measurements: Collection[str] | None) -> tuple[str, ...]:
    if measurements is None:
        return MEASUREMENTS
    unknown = sorted(set(measurements) - set(MEASUREMENTS))
    if unknown or isinstance(measurements, str):
        raise ValueError(f"measurements is {measurements!r}: allowed are {', '.join(MEASUREMENTS)}")
    return tuple(measurements)


class _Run:
    """One evaluation under way: collects metrics, records and notes."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        benchmark: Benchmark,
        batch_size: int,
        batch_tokens: int | None,
        seed: int,
        bars: Bars,
    ) -> None:
        self.model, self.tokenizer, self.benchmark = model, tokenizer, benchmark
        self.settings = benchmark.settings
        self.batches: dict[str, Any] = {"batch_size": batch_size, "batch_tokens": batch_tokens}
        self.seed, self.bars = seed, bars
        self.metrics: dict[str, Metric] = {}
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.notes: list[str] = []

    def has(self, measurement: str) -> bool:
        """Whether something was measured under this name."""
        return (measurement if measurement != "privleak" else "membership") in self.records

    def verbatim(self, name: str, probes: Sequence[Any]) -> None:
        """`verbmem_f` or `verbmem_holdout`."""
        records = recite(
            self.model,
            self.tokenizer,
            probes,
            tokens=self.settings.verbatim_tokens,
            words=self.settings.words,
            long_prompts=self.settings.long_prompts,
            advance=self.bars.start(name, len(probes)),
            **self.batches,
        )
        self._add_generated(name, records, higher_is_better=None if name == "verbmem_holdout" else False)

    def knowledge(self, name: str, questions: Sequence[Any], examples: Sequence[Any]) -> None:
        """`knowmem_f` or `knowmem_r`."""
        records = answer_questions(
            self.model,
            self.tokenizer,
            questions,
            examples,
            settings=self.settings,
            advance=self.bars.start(name, len(questions)),
            **self.batches,
        )
        self._add_generated(name, records, higher_is_better=name == "knowmem_r")

    def _add_generated(self, name: str, records: list[dict[str, Any]], higher_is_better: bool | None) -> None:
        scores = [record["score"] for record in records]
        self.metrics[name] = mean_metric(scores, higher_is_better=higher_is_better, seed=self.seed)
        self.records[name] = records
        self._note_cuts(name, records)

    def _note_cuts(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        cut = sum("cut" in record for record in records)
        if cut:
            self.notes.append(
                f"{name}: {cut} of {len(records)} prompts are longer than the model's context "
                f"({context_length(self.model)} tokens) allows; their oldest tokens were dropped"
            )

    def membership(self, reference: Reference | None) -> None:
        """The membership AUCs, the losses they compare, and PrivLeak where there is a reference."""
        parts = ("forget", "retain", "holdout")
        texts = {part: getattr(self.benchmark, f"membership_{part}") for part in parts}
        texts = {part: group for part, group in texts.items() if group}
        total = 2 * sum(map(len, texts.values()))
        scores, cut = score_texts(
            self.model,
            self.tokenizer,
            texts,
            tokens=self.settings.membership_tokens,
            batch_size=self.batches["batch_size"],
            advance=self.bars.start("membership", total),
        )
        if cut:
            self.notes.append(f"membership: only the beginning of {cut} of {total // 2} texts was scored")
        self.records["membership"] = membership_records(texts, scores)
        for part, group in scores.items():
            losses = _column(group, "ppl")
            self.metrics[f"nll_{part}"] = mean_metric(
                losses, higher_is_better=None, unit="nats per token", scale=1.0, seed=self.seed
            )
        for first, second, names in (("forget", "holdout", SCORES), ("retain", "holdout", ("min_40",))):
            for score in names if first in scores else ():
                pair = (_column(scores[first], score), _column(scores[second], score))
                low, high = auc_interval(*pair, seed=self.seed)
                count = len(pair[0]) + len(pair[1])
                name = f"auc_{first}_{second}_{score}"
                self.metrics[name] = Metric(membership_auc(*pair), low, high, count, None, "auc")
        self._privleak((_column(scores["forget"], "min_40"), _column(scores["holdout"], "min_40")), reference)

    def _privleak(self, scores: tuple[list[float], list[float]], reference: Reference | None) -> None:
        if reference is None:
            self.notes.append(
                "privleak is not reported: no reference model was given; auc_forget_holdout_min_40 is its raw value"
            )
            return
        retrained: tuple[list[float], list[float]] | float
        if isinstance(reference, int | float):
            retrained = reference_auc = float(reference)
            self.notes.append(f"privleak compares with a given AUC of {reference_auc}, which is taken as exact")
        else:
            retrained = _reference_membership(reference, self.benchmark)
            reference_auc = membership_auc(*retrained)
        if reference_auc == 0:
            self.notes.append("privleak is not reported: the reference model's AUC is 0, and it divides by it")
            return
        auc = membership_auc(*scores)
        value = privleak(auc, reference_auc)
        low, high = privleak_interval(scores, retrained, self.seed)
        self.metrics["privleak"] = Metric(value, low, high, sum(map(len, scores)), None, "percent")
        if auc <= SATURATED or auc >= 1 - SATURATED:
            bound = privleak_bound(reference_auc) if auc > 0.5 else -100.0
            self.notes.append(
                f"privleak is saturated: the AUC is {auc:.4f} and the value can go no further than {bound:+.1f}; it "
                "says on which side the model is, not how far"
            )

    def multiple_choice(self) -> None:
        """`mmlu_val`, `mmlu_greedy` and `mmlu_invalid`."""
        questions = self.benchmark.multiple_choice
        advance = self.bars.start("mmlu_val", len(questions))
        records = answer_choices(self.model, self.tokenizer, questions, advance=advance, **self.batches)
        self.records["mmlu_val"] = records
        for name, values, better in (
            ("mmlu_val", [record["score"] for record in records], True),
            ("mmlu_greedy", [record["greedy_score"] for record in records], True),
            ("mmlu_invalid", [float(not record["valid"]) for record in records], False),
        ):
            self.metrics[name] = mean_metric(values, higher_is_better=better, seed=self.seed)
        self._note_cuts("mmlu_val", records)

    def general(self) -> None:
        """`nll_general`."""
        texts = self.benchmark.general_texts
        most = min(self.settings.general_tokens, context_length(self.model))
        logprobs = token_logprobs(
            self.model,
            [encode(self.tokenizer, text)[:most] for text in texts],
            batch_size=self.batches["batch_size"],
            advance=self.bars.start("nll_general", len(texts)),
        )
        losses, counts = np.array([-values.sum() for values in logprobs]), np.array([*map(len, logprobs)], float)
        low, high = bootstrap_ratio(losses, counts, seed=self.seed)
        value = float(losses.sum() / counts.sum())
        self.metrics["nll_general"] = Metric(value, low, high, len(texts), False, "nats per token")
        self.records["nll_general"] = [
            {"text": text if len(text) <= 200 else text[:200] + "…", "tokens": int(count), "score": loss / count}
            for text, loss, count in zip(texts, losses.tolist(), counts.tolist(), strict=True)
        ]

    def tofu(self, reference: Reference | None) -> None:
        """All TOFU metrics."""
        tofu = self.benchmark.tofu
        assert tofu is not None
        groups = [getattr(tofu, part.name) for part in dataclasses.fields(tofu)]
        total = sum(3 + len(question.perturbed_answers) for group in groups for question in group)
        records = answer_tofu(
            self.model,
            self.tokenizer,
            tofu,
            settings=self.settings,
            advance=self.bars.start("tofu", total),
            **self.batches,
        )
        ratios = None
        if reference is None or isinstance(reference, int | float):
            self.notes.append("tofu_forget_quality is not reported: no scores of a reference model were given")
        else:
            ratios = [record["ratio"] for record in _reference_records(reference, self.benchmark, "tofu_forget")]
        self.metrics |= tofu_metrics(records, ratios, self.seed)
        self.records |= {f"tofu_{part}": group for part, group in records.items()}

    def degenerate(self) -> None:
        """`degenerate`, over everything that was generated."""
        flags = [float(r["degenerate"]) for group in self.records.values() for r in group if "degenerate" in r]
        if flags:
            self.metrics["degenerate"] = mean_metric(flags, higher_is_better=False, seed=self.seed)


def _column(scores: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [text[name] for text in scores]


def _reference_membership(reference: Any, benchmark: Benchmark) -> tuple[list[float], list[float]]:
    records = _reference_records(reference, benchmark, "membership")
    by_set = {
        part: [record["scores"]["min_40"] for record in records if record["set"] == part]
        for part in ("forget", "holdout")
    }
    return by_set["forget"], by_set["holdout"]


def _reference_records(reference: Any, benchmark: Benchmark, name: str) -> list[dict[str, Any]]:
    """Records of the reference model's scores, after checking that they are of the same data."""
    scores = reference if isinstance(reference, Scores) else Scores.from_dict(reference)
    if scores.data_sha256 != benchmark.data_sha256:
        raise ValueError(
            f"reference_scores were measured on {scores.benchmark!r} (data {scores.data_sha256[:12]}), but this is "
            f"{benchmark.name!r} (data {benchmark.data_sha256[:12]}): measure the reference on the same benchmark"
        )
    if name not in scores.records:
        raise ValueError(f"reference_scores has no {name} records: measure the reference on the whole benchmark")
    return scores.records[name]
