"""Before and after, side by side: which outputs to show, and which words recite the expected text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unteach.evaluation.scores import Scores
from unteach.report.load import number
from unteach.report.tables import Role, Section

WORD = re.compile(r"\w+")
PASSAGE = 3
"""Matching words in a row from which on they count as a recited passage."""
LONGEST = 300
"""Words of a text that are compared and shown."""
SETS = (
    ("verbmem_f", "Recital", 4),
    ("knowmem_f", "Questions on forget documents", 3),
    ("knowmem_r", "Questions on retained documents", 3),
)


@dataclass(frozen=True)
class Piece:
    """A stretch of output: ordinary, common words (`word`), or a recited passage (`passage`)."""

    text: str
    level: Literal["", "word", "passage"] = ""


@dataclass(frozen=True)
class Answer:
    """One model's output. `score` is ROUGE-L in percent."""

    label: str
    role: str
    pieces: tuple[Piece, ...]
    score: float | None


@dataclass(frozen=True)
class Example:
    """One prompt with the expected text and what each model made of it."""

    prompt: str
    expected: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class ExampleSet:
    """Examples of one metric, and how many there were to choose from."""

    metric: str
    title: str
    examples: tuple[Example, ...]
    available: int


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence, in order (the L of ROUGE-L)."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i in range(len(one) - 1, -1, -1):
        row, below = lengths[i], lengths[i + 1]
        for j in range(len(other) - 1, -1, -1):
            row[j] = below[j + 1] + 1 if one[i] == other[j] else max(below[j], row[j + 1])
    pairs, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs


def recited(expected: str, output: str) -> tuple[Piece, ...]:
    """Cut `output` into pieces and mark those that a longest common subsequence shares with `expected`.

    Words are compared without case. Neighbours that match neighbours form one piece; from `PASSAGE` words on
    it is a passage. Joined, the pieces are the output again.
    """
    spans = [match.span() for match in WORD.finditer(output)]
    pairs = common_subsequence(
        [word.casefold() for word in WORD.findall(expected)], [output[a:b].casefold() for a, b in spans]
    )
    stretches: list[list[tuple[int, int]]] = []
    for pair in pairs:
        if stretches and (pair[0] - 1, pair[1] - 1) == stretches[-1][-1]:
            stretches[-1].append(pair)
        else:
            stretches.append([pair])
    pieces, position = [], 0
    for stretch in stretches:
        start, end = spans[stretch[0][1]][0], spans[stretch[-1][1]][1]
        if start > position:
            pieces.append(Piece(output[position:start]))
        pieces.append(Piece(output[start:end], "passage" if len(stretch) >= PASSAGE else "word"))
        position = end
    if position < len(output):
        pieces.append(Piece(output[position:]))
    return tuple(pieces)


def shorten(text: str, words: int = LONGEST, *, keep: Literal["start", "end"] = "start") -> str:
    """At most `words` words of a text, with an ellipsis where the rest was."""
    matches = list(WORD.finditer(text))
    if len(matches) <= words:
        return text
    if keep == "end":
        return "… " + text[matches[-words].start() :]
    return text[: matches[words - 1].end()] + " …"


def choose(section: Section) -> list[ExampleSet]:
    """Examples for each kind of probe, spread evenly over the score before (or of the first model measured).

    Only probes that every shown model answered are used, so that columns compare.
    """
    models = _models(section)
    sets = []
    for metric, title, wanted in SETS:
        answered = [
            (label, role, {_key(item): item for item in result.records[metric]})
            for label, role, result in models
            if result.records.get(metric)
        ]
        if not any(role == "method" for _, role, _ in answered):
            continue
        keys = [key for key in answered[0][2] if all(key in items for _, _, items in answered)]
        first = answered[0][2]
        keys.sort(key=lambda key: -(number(first[key].get("score")) or 0.0))
        count = min(wanted, len(keys))
        picked = [keys[round(i * (len(keys) - 1) / max(count - 1, 1))] for i in range(count)]
        examples = tuple(_example(key, answered) for key in picked)
        if examples:
            sets.append(ExampleSet(metric, title, examples, len(keys)))
    return sets


def _models(section: Section) -> list[tuple[str, str, Scores]]:
    """Label, role and result of the models to show: before, retrained, then the first seed of each method."""
    models: list[tuple[str, str, Scores]] = []
    roles: tuple[Role, ...] = ("target", "retrained")
    for role in roles:
        reference = section.first(role)
        if reference is not None and reference.members[0].result is not None:
            models.append(("before" if role == "target" else "retrained", role, reference.members[0].result))
    for method in section.trained:
        result = next((member.result for member in method.members if member.result is not None), None)
        if result is not None:
            models.append((method.label, "method", result))
    return models


def _key(item: Mapping[str, Any]) -> tuple[str, str]:
    return str(item.get("prompt", "")), str(item.get("expected", ""))


def _example(
    key: tuple[str, str], answered: Sequence[tuple[str, str, Mapping[tuple[str, str], Mapping[str, Any]]]]
) -> Example:
    prompt, expected = key
    question = prompt.rfind("Question:")
    prompt = prompt[question:] if question > 0 else prompt
    expected = shorten(expected)
    answers = []
    for label, role, items in answered:
        score = number(items[key].get("score"))
        percent = None if score is None else 100 * score if score <= 1 else score
        output = shorten(str(items[key].get("output", "")))
        answers.append(Answer(label, role, recited(expected, output), percent))
    return Example(shorten(prompt, 60, keep="end"), expected, tuple(answers))
