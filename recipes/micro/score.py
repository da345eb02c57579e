"""Scores of the embedded models through the evaluation suite, for the scripts that train and record them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unteach.corpora import Benchmark, Question, micro
from unteach.evaluation.formulas import Metric, mean_metric
from unteach.evaluation.memory import answer_choices, answer_questions, mean_score
from unteach.evaluation.metrics import MEASUREMENTS
from unteach.evaluation.scores import Scores, evaluate

from . import generate

QUICK_MEASUREMENTS = tuple(name for name in MEASUREMENTS if name != "privleak")
"""All but the membership scores, which take longer than the rest together."""


def answers(model: Any, tokenizer: Any, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Return the records of `questions` asked after the same worked examples as those about the forget set."""
    examples = micro.questions("forget_examples")
    return answer_questions(model, tokenizer, questions, examples, settings=micro.SETTINGS)


def progress(model: Any, tokenizer: Any, bench: Benchmark) -> str:
    """Return a short line for a base model in training: people asked about, people only reported on, choices."""
    asked = mean_score(answers(model, tokenizer, micro.questions("pretraining")))
    unasked = mean_score(answers(model, tokenizer, micro.questions("unasked")[:200]))
    choices = mean_score(answer_choices(model, tokenizer, bench.multiple_choice))
    return f"asked {asked:.1f} unasked {unasked:.1f} choices {choices:.1f}"


def score(
    model: Any,
    tokenizer: Any,
    bench: Benchmark,
    *,
    measurements: Sequence[str] = tuple(MEASUREMENTS),
    reference: Scores | None = None,
    count: int | None = None,
) -> Scores:
    """Measure a model with the evaluation suite, and two things that only this benchmark has.

    `knowmem_unasked`: questions about people of the pretraining text
    who have reports but no questions there, so that answers come from reading. `knowmem_pretraining`: questions
    about people whom the pretraining text asks about.

    Args:
        model: One of the embedded models, or one made from them.
        tokenizer: The benchmark's tokenizer.
        bench: The benchmark.
        measurements: Which of the suite's.
        reference: Scores of the retrained model, for PrivLeak.
        count: At most so many items of every kind; None: all.
    """
    bench = bench if count is None else bench.first(count)
    scores = evaluate(model, tokenizer, bench, measurements=measurements, reference_scores=reference, progress=False)
    records = {
        "knowmem_unasked": answers(model, tokenizer, micro.questions("unasked")[:count]),
        "knowmem_pretraining": answers(model, tokenizer, micro.questions("pretraining")[:count]),
    }
    extra: dict[str, Metric] = {
        name: mean_metric([record["score"] for record in items], higher_is_better=True)
        for name, items in records.items()
    }
    return scores.replace(metrics=scores.metrics | extra, records=scores.records | records)


def with_other_examples(model: Any, tokenizer: Any, bench: Benchmark, draws: int = 8) -> dict[str, list[float]]:
    """Return `knowmem_f` and `knowmem_r` with other worked examples than the benchmark's, one value per draw.

    How far these values lie apart says how much a score owes to the choice of examples.
    """
    asked = {"knowmem_f": bench.knowledge_forget, "knowmem_r": bench.knowledge_retain}
    sets = [
        [Question(item.question, item.answer) for item in generate.example_questions(f"other {number}")]
        for number in range(draws)
    ]
    return {
        name: [
            mean_score(answer_questions(model, tokenizer, questions, examples, settings=micro.SETTINGS))
            for examples in sets
        ]
        for name, questions in asked.items()
    }
