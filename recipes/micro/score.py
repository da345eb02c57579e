"""Scores of the embedded models through the evaluation suite, for the scripts that train and record them.

`python -m recipes.micro.score MODEL...` prints, for models made from `micro:target` (others need `--reference`),
what the cells of `unteach reproduce deep` hold, and what became of the people of the pretraining text.
"""

from __future__ import annotations

import argparse
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


COLUMNS = (
    "verbmem_f", "knowmem_f", "knowmem_r", "privleak", "nll_retain", "nll_general", "degenerate",
    "knowmem_pretraining", "knowmem_pretraining_kept", "knowmem_pretraining_others", "nll_news",
)  # fmt: skip
"""Of the printed table."""


def answers(model: Any, tokenizer: Any, questions: Sequence[Question], group: str = "forget") -> list[dict[str, Any]]:
    """Return the records of `questions` asked after the same worked examples as those about a group."""
    examples = micro.questions(f"{group}_examples")
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


def pretraining_scores(model: Any, tokenizer: Any) -> dict[str, Metric]:
    """Return what a model still knows of the pretraining text, apart for people of the mixed general text and others.

    Questions come after the worked examples of the retain questions, as in `unteach reproduce deep`; `nll_news` is the
    loss on the reports of `general_mixed_heldout`.
    """
    groups = ("pretraining_kept", "pretraining_others")
    records = {group: answers(model, tokenizer, micro.questions(group), "retain") for group in groups}
    records["pretraining"] = [record for group in groups for record in records[group]]
    found: dict[str, Metric] = {
        f"knowmem_{group}": mean_metric([record["score"] for record in items], higher_is_better=True)
        for group, items in records.items()
    }
    news = tuple(text for kind, text in micro.mixed_documents("general_mixed_heldout") if kind == "news")
    bench = Benchmark("news", general_texts=news, settings=micro.SETTINGS)
    scores = evaluate(model, tokenizer, bench, measurements=["nll_general"], progress=False)
    return found | {"nll_news": scores.metrics["nll_general"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure models and print a table."""
    from unteach.evaluation.metrics import describe
    from unteach.models import load_model, load_tokenizer
    from unteach.writing import markdown_table

    parser = argparse.ArgumentParser(prog="python -m recipes.micro.score", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="+", help="folders or micro:NAME")
    parser.add_argument("--reference", default="micro:retrained", help="for PrivLeak: retrained, of the same family")
    options = parser.parse_args(arguments)
    tokenizer, bench = load_tokenizer("micro:target"), micro.load_benchmark("measure")
    retrained = load_model(options.reference)[0]
    reference = evaluate(retrained, tokenizer, bench, measurements=["privleak"], progress=False)
    rows = []
    for name in options.models:
        model = load_model(name)[0]
        scores = evaluate(model, tokenizer, bench, reference_scores=reference, progress=False)
        found = scores.metrics | pretraining_scores(model, tokenizer)
        rows.append([name, *(f"{found[column].value:.{describe(column).decimals}f}" for column in COLUMNS)])
    print(markdown_table(["", *COLUMNS], rows))


if __name__ == "__main__":
    main()
