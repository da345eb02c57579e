"""The embedded benchmark as a `Benchmark`: probes, questions, membership texts, choices, general text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from unteach.corpora import Benchmark, ChoiceQuestion, Probe, Question, Settings

from . import generate, pretraining, tokens
from .draws import Draws

Half = Literal["all", "stop", "measure"]
WINDOW = 256
SETTINGS = Settings(
    verbatim_tokens=tokens.EXPECTED_TOKENS, knowledge_tokens=16, membership_tokens=WINDOW, general_tokens=WINDOW
)


def probes(tokenizer: Any, group: str, half: Half = "all") -> tuple[Probe, ...]:
    """Return one verbatim probe per document of a group, in a fixed random order.

    Args:
        tokenizer: The benchmark's tokenizer.
        group: `forget`, `retain` or `holdout`.
        half: `stop`: documents of every second story, for a stop rule; `measure`: those of the other stories,
            for the measurement after it; `all`: both.

    Raises:
        ValueError: If `half` is none of these.
    """
    kept = {"all": (0, 1), "stop": (0,), "measure": (1,)}
    if half not in kept:
        raise ValueError(f"half is {half!r}, must be one of {', '.join(kept)}")
    made = []
    for number, text in enumerate(generate.split_documents(group)):
        if number // generate.REPORTS_PER_STORY % 2 not in kept[half]:
            continue
        prompt, expected = tokens.verbatim_probe(tokenizer, text)
        whole, first = tokenizer(prompt + expected)["input_ids"], tokenizer(prompt)["input_ids"]
        made.append(Probe(prompt, expected, tuple(first), tuple(whole[len(first) :]), number))
    return tuple(Draws("order of probes", group).shuffled(made))


def plain_questions(items: Sequence[generate.Question]) -> tuple[Question, ...]:
    """Return questions as the evaluation suite takes them."""
    return tuple(Question(item.question, item.answer) for item in items)


def _choices() -> tuple[ChoiceQuestion, ...]:
    shots = "".join(pretraining.choice_text(item) + "\n\n" for item in pretraining.example_choices())
    return tuple(
        ChoiceQuestion(shots + pretraining.choice_prompt(item), item.answer, question=item.question)
        for item in pretraining.choice_test()
    )


def build_benchmark(tokenizer: Any, general_texts: list[str], half: Half = "all") -> Benchmark:
    """Return the benchmark, its probes cut with the given tokenizer.

    Args:
        tokenizer: The benchmark's tokenizer.
        general_texts: Held-out prose.
        half: Which verbatim probes of the forget documents, see `probes`.
    """
    membership = {
        group: tuple(Draws("membership", group).shuffled(generate.split_documents(group)))
        for group in ("forget", "retain", "holdout")
    }
    return Benchmark(
        name="micro",
        verbatim_forget=probes(tokenizer, "forget", half),
        verbatim_holdout=probes(tokenizer, "holdout"),
        knowledge_forget=plain_questions(generate.split_questions("forget")),
        knowledge_forget_examples=plain_questions(generate.example_questions("forget")),
        knowledge_retain=plain_questions(generate.split_questions("retain")),
        knowledge_retain_examples=plain_questions(generate.example_questions("retain")),
        membership_forget=membership["forget"],
        membership_retain=membership["retain"],
        membership_holdout=membership["holdout"],
        multiple_choice=_choices(),
        general_texts=tuple(general_texts),
        settings=SETTINGS,
        notes=("micro is a benchmark of fictional texts with the schema of MUSE; it is not MUSE",),
    )
