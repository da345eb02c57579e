"""Before and after, side by side: which outputs to show, and which words recite the expected text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from unteach.report.load import number
from unteach.report.tables import Section

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


class Piece(NamedTuple):
    """A stretch of output: ordinary, common words (`word`), or a recited passage (`passage`)."""

    text: str
    level: Literal["", "word", "passage"] = ""


class Answer(NamedTuple):
    """One model's output. `score` is ROUGE-L in percent."""

    label: str
    pieces: tuple[Piece, ...]
    score: float | None


class Example(NamedTuple):
    """One prompt with the expected text and what each model made of it."""

    prompt: str
    expected: str
    answers: tuple[Answer, ...]


class ExampleSet(NamedTuple):
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
    words = [word.casefold() for word in WORD.findall(expected)]
    stretches: list[list[tuple[int, int]]] = []
    for pair in common_subsequence(words, [output[a:b].casefold() for a, b in spans]):
        if stretches and (pair[0] - 1, pair[1] - 1) == stretches[-1][-1]:
            stretches[-1].append(pair)
        else:
            stretches.append([pair])
    pieces, position = [], 0
    for stretch in stretches:
        start, end = spans[stretch[0][1]][0], spans[stretch[-1][1]][1]
        pieces.append(Piece(output[position:start]))
        pieces.append(Piece(output[start:end], "passage" if len(stretch) >= PASSAGE else "word"))
        position = end
    pieces.append(Piece(output[position:]))
    return tuple(piece for piece in pieces if piece.text)


def shorten(text: str, words: int = LONGEST, *, keep: Literal["start", "end"] = "start") -> str:
    """At most `words` words of a text, with an ellipsis where the rest was."""
    matches = list(WORD.finditer(text))
    if len(matches) <= words:
        return text
    return "… " + text[matches[-words].start() :] if keep == "end" else text[: matches[words - 1].end()] + " …"


def choose(section: Section) -> list[ExampleSet]:
    """Examples for each kind of probe, spread evenly over the score before (or of the first model measured).

    Models are the one before, the retrained one, then the first measured seed of each method (`after`, if there is only
    one). Only probes that every
    one of them answered are used, so that columns compare.
    """
    rows = [("before", section.first("target")), ("retrained", section.first("retrained"))]
    models = [(label, row.results[0]) for label, row in rows if row is not None and row.results]
    trained = [(row.title, row.results[0]) for row in section.trained if row.results]
    trained = [("after", trained[0][1])] if len(trained) == 1 else trained
    sets = []
    for metric, title, wanted in SETS:
        if not any(result.records.get(metric) for _, result in trained):
            continue
        answered: list[tuple[str, dict[tuple[str, str], dict[str, Any]]]] = []
        for label, result in (*models, *trained):
            if found := [item for item in result.records.get(metric, ()) if "prompt" in item]:  # else a private run
                answered.append((label, {(str(i.get("prompt", "")), str(i.get("expected", ""))): i for i in found}))
        if not answered:
            continue
        first = answered[0][1]
        keys = [key for key in first if all(key in items for _, items in answered)]
        keys.sort(key=lambda key: -(number(first[key].get("score")) or 0.0))
        count = min(wanted, len(keys))
        examples = []
        for place in range(count):
            key = keys[round(place * (len(keys) - 1) / max(count - 1, 1))]
            prompt, expected = key[0][max(0, key[0].rfind("Question:")) :], shorten(key[1])
            answers = []
            for label, items in answered:
                score = number(items[key].get("score"))
                percent = None if score is None else 100 * score if score <= 1 else score
                pieces = recited(expected, shorten(str(items[key].get("output", ""))))
                answers.append(Answer(label, pieces, percent))
            examples.append(Example(shorten(prompt, 60, keep="end"), expected, tuple(answers)))
        if examples:
            sets.append(ExampleSet(metric, title, tuple(examples), len(keys)))
    return sets
