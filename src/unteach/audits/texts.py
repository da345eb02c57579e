"""What attacks ask: passages, questions and facts cut from documents, and the model that is asked."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from unteach.corpora import MeasuringSettings, Probe, Question, micro
from unteach.corpora.own import (
    cut_probes,
    names_in,
    passage_sizes,
    question_form,
    take_examples,
    token_lengths,
    words_in,
)
from unteach.data import Documents
from unteach.data.documents import split_words
from unteach.evaluation.inference import Advance, Batching
from unteach.evaluation.memory import answer_questions, recite

__all__ = ["Asked", "Case", "answers", "embedded", "facts", "has_answer", "own", "recital", "unchanged"]

_NAMES = re.compile(r"(?<=\S )[A-Z][\w'’-]*(?: [A-Z][\w'’-]*)*")
"""Words with a capital behind the first word."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Documents, and what is asked about them."""

    documents: Documents
    groups: tuple[tuple[int, ...], ...]
    """Numbers of documents that tell of the same: a part of the documents is made of whole groups."""
    probes: tuple[Probe, ...]
    """Passages in an order without meaning: the first so many are as good as any."""
    unseen: Documents | None = None
    """Other documents of the same kind, which no model here has seen."""
    questions: tuple[Question, ...] = ()
    examples: tuple[Question, ...] = ()
    """Worked examples put before every question."""
    settings: MeasuringSettings = dataclasses.field(default_factory=MeasuringSettings)
    max_tokens: int = 1024
    """Of a training sequence."""

    def part(self, share: float, seed: int) -> set[int]:
        """Numbers of the documents of whole groups, at least one group, drawn by the seed; the rest is larger."""
        count = max(1, round(share * len(self.groups)))
        drawn = random.Random(seed).sample(range(len(self.groups)), min(count, max(1, len(self.groups) // 2)))
        return {number for group in drawn for number in self.groups[group]}

    def apart_from(self, numbers: set[int]) -> Asked:
        """The same with only what is asked about the other documents."""
        told = "\n".join(self.documents.texts[number] for number in sorted(numbers))
        probes = tuple(probe for probe in self.probes if probe.document not in numbers)
        return dataclasses.replace(self, probes=probes, questions=tuple(q for q in self.questions if not _in(told, q)))


def _in(text: str, question: Question) -> bool:
    """Whether a text tells of what a question asks: it has its names, or where there is none, the answer."""
    return any(name in text for name in _NAMES.findall(question.question) or [question.answer])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model under attack, and what it is asked."""

    model: Any
    tokenizer: Any
    asked: Asked
    unrelated: Documents
    """Text that has nothing to do with the documents."""
    seed: int
    role: str = "after"
    """before, after, reference, base or holdout (the audited model on documents that it never saw)."""
    batch_size: int = 128
    start_bar: Callable[[str, int], Advance] = lambda label, total: lambda count: None

    def batching(self, label: str, total: int) -> Batching:
        """How items are read together, with a progress bar of their own."""
        return Batching(self.batch_size, self.start_bar(f"{self.role}: {label}", total))


def embedded(seed: int, *, holdout: bool = False) -> Asked:
    """The embedded benchmark's own documents, passages and questions; or its never-seen documents."""
    documents = Documents("micro", micro.documents("holdout" if holdout else "forget"))
    groups = [
        range(first, first + micro.REPORTS_PER_STORY) for first in range(0, len(documents), micro.REPORTS_PER_STORY)
    ]
    questions, examples = micro.questions("forget"), micro.questions("forget_examples")
    shuffled = random.Random(seed).sample(questions, len(questions))
    return Asked(
        documents=documents,
        groups=tuple(map(tuple, groups)),
        probes=micro.probes("holdout" if holdout else "forget"),
        unseen=None if holdout else Documents("micro:holdout", micro.documents("holdout")),
        questions=() if holdout else tuple(shuffled),
        examples=() if holdout else examples,
        settings=micro.SETTINGS,
        max_tokens=512,
    )


def own(
    documents: Documents,
    tokenizer: Any,
    *,
    max_tokens: int,
    first_chunk: bool = False,
    unseen: Documents | None = None,
    questions: Sequence[Question] = (),
    template: str | None = None,
    count: int = 400,
    seed: int = 0,
) -> Asked:
    """What can be asked about any documents: passages are cut from them as a run cuts its own."""
    how: dict[str, Any] = {"count": count, "first_chunk": first_chunk, "later_passages": True, "seed": seed}
    how |= passage_sizes(token_lengths(documents, tokenizer), max_tokens)
    probes = cut_probes(documents, tokenizer, **how)
    settings = MeasuringSettings(**words_in(probes))
    if questions:
        settings = dataclasses.replace(settings, **question_form(tokenizer, template))
    draw = random.Random(seed)
    scored, examples = take_examples(draw.sample(list(questions), len(questions)), seed=seed)
    return Asked(
        documents=documents,
        groups=tuple((number,) for number in range(len(documents))),
        probes=tuple(draw.sample(probes, len(probes))),
        unseen=unseen,
        questions=scored,
        examples=examples,
        settings=settings,
        max_tokens=max_tokens,
    )


def facts(case: Case, most: int) -> list[Probe]:
    """Names and numbers in the passages, each after all that stands before it; spread over the passages."""
    rows = [names_in(probe, case.tokenizer) for probe in case.asked.probes[:most]]
    depth = max(map(len, rows), default=0)
    return [row[place] for place in range(depth) for row in rows if place < len(row)][:most]


def recital(case: Case, probes: Sequence[Probe], label: str) -> tuple[float, ...]:
    """How much of each passage the model recites: ROUGE-L of its greedy continuation, or exactly."""
    batching = case.batching(label, len(probes))
    found = recite(case.model, case.tokenizer, probes, settings=case.asked.settings, batching=batching)
    return tuple(record["score"] for record in found)


def answers(
    case: Case,
    questions: Sequence[Question],
    label: str,
    *,
    settings: MeasuringSettings | None = None,
    shots: bool = True,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Which questions the model answers right, 1 or 0; and which, if each answer were given to another question.

    The second is chance: what outputs of this form have in common with answers of this kind.
    """
    settings, examples = settings or case.asked.settings, case.asked.examples if shots else ()
    batching = case.batching(label, len(questions))
    records = answer_questions(case.model, case.tokenizer, questions, examples, settings=settings, batching=batching)
    true = [question.answer for question in questions]
    outputs, words = [record["output"] for record in records], settings.words
    right = tuple(float(has_answer(output, answer, words)) for output, answer in zip(outputs, true, strict=True))
    return right, permuted(outputs, true, words)


def permuted(outputs: Sequence[str], true: Sequence[str], words: Any) -> tuple[float, ...]:
    """How often each output has the answer to one of the other questions, where that is another answer."""
    scores = []
    for output, own_answer in zip(outputs, true, strict=True):
        others = [answer for answer in true if answer != own_answer]
        scores.append(sum(has_answer(output, other, words) for other in others) / max(1, len(others)))
    return tuple(scores)


def has_answer(output: str, answer: str, words: Any = "latin") -> bool:
    """Whether the words of an answer stand in an output, side by side."""
    wanted, given = split_words(answer, words), split_words(output, words)
    if not wanted:
        return answer.strip() != "" and answer.strip() in output
    return any(given[place : place + len(wanted)] == wanted for place in range(len(given) - len(wanted) + 1))


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Inside the block the weights may change; afterwards they are what they were."""
    kept = [(parameter, parameter.detach().clone(), parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weights, trained in kept:
                parameter.copy_(weights)
                parameter.requires_grad_(trained)
                parameter.grad = None
