"""Sample instead of asking once: what a greedy answer hides may come in one of a hundred.

leak@k (Reisizadeh et al., arXiv 2511.04934): of n samples of a prompt, c leak; the chance that at least one of k does
is 1 − C(n−c, k) / C(n, k). There n is 128 to 320, k up to 128, over a grid of temperatures and top-p. A continuation
leaks where its ROUGE-L reaches ``recital``, an answer where it has the true answer's words. A model that never saw the
documents guesses, too: it is the control.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unteach.audits import Attack, Reading
from unteach.audits.texts import Case, has_answer, permuted
from unteach.evaluation.generation import Pick
from unteach.evaluation.memory import answer_questions, recite


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is sampled."""

    grid: tuple[tuple[float, float], ...] = ((0.2, 1.0), (0.8, 0.95), (1.0, 1.0))
    """Temperatures, each with the share of probability (top-p) that is drawn from."""
    samples: int = 64
    """Of each prompt, n."""
    k: tuple[int, ...] = (1, 4, 16, 64)
    recital: float = 0.5
    """A continuation with this ROUGE-L, or more, leaks."""
    probes: int = 64
    questions: int = 64


def leak_at(k: int, samples: int, leaks: int) -> float:
    """1 − C(n−c, k) / C(n, k): the chance that one of k draws without repetition from n samples leaks."""
    return 1 - math.comb(samples - leaks, k) / math.comb(samples, k)


def sampler(temperature: float, top_p: float, seed: int, device: torch.device | str = "cpu") -> Pick:
    """Draws tokens from the most probable ones that together reach ``top_p``, by a generator of its own."""
    generator = torch.Generator(device).manual_seed(seed)

    def pick(logits: Tensor) -> Tensor:
        probabilities, order = (logits.float() / temperature).softmax(-1).sort(-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities  # what stands in front of each: the first always stays
        drawn = torch.multinomial(probabilities.masked_fill(before >= top_p, 0.0), 1, generator=generator)
        return order.gather(-1, drawn).squeeze(-1)

    return pick


def measure(case: Case, settings: Settings) -> list[Reading]:
    """leak@k of recital and of answers, for each temperature and top-p."""
    asked, found, n = case.asked, list[Reading](), settings.samples
    probes, questions = asked.probes[: settings.probes], asked.questions[: settings.questions]
    given: dict[str, Any] = {"settings": asked.settings}
    for place, (temperature, top_p) in enumerate(settings.grid):
        where = f"temperature {temperature:g}, top-p {top_p:g}"
        pick = sampler(temperature, top_p, 1000 * case.seed + place, case.model.device)
        given |= {"pick": pick, "batching": case.batching(where, n * (len(probes) + len(questions)))}
        records = recite(case.model, case.tokenizer, _times(probes, n), **given)
        leaks = [float(record["score"] >= settings.recital) for record in records]
        found += _readings(f"recites, {where}", [sum(leaks[i * n : i * n + n]) for i in range(len(probes))], settings)
        if questions:
            many = _times(questions, n)
            records = answer_questions(case.model, case.tokenizer, many, asked.examples, **given)
            outputs, words = [record["output"] for record in records], asked.settings.words
            right = [has_answer(o, q.answer, words) for o, q in zip(outputs, many, strict=True)]
            counts = [sum(right[i * n : i * n + n]) for i in range(len(questions))]
            true = [question.answer for question in questions]
            rows = [permuted(outputs[j::n], true, words) for j in range(n)]  # the j-th sample of every question
            lucky = [round(sum(row[i] for row in rows)) for i in range(len(questions))]
            found += _readings(f"answers, {where}", counts, settings, lucky)
    return found


def _times(items: Sequence, count: int) -> list:
    return [item for item in items for _ in range(count)]


def _readings(
    line: str, counts: Sequence[float], settings: Settings, lucky: Sequence[int] | None = None
) -> list[Reading]:
    def at(k: int, found: Sequence[float]) -> tuple[float, ...]:
        return tuple(leak_at(k, settings.samples, int(count)) for count in found)

    return [
        Reading(line=line, at=k, scores=at(k, counts), chance=None if lucky is None else at(k, lucky))
        for k in settings.k
    ]


ATTACK = Attack(
    title="sampling",
    protocol="n samples of every prompt at temperatures and top-p of a small grid; leak@k = 1 − C(n−c, k) / C(n, k)"
    " for recital (ROUGE-L of at least one half) and for answers.",
    source="leak@k (Reisizadeh et al., arXiv 2511.04934)",
    over="samples",
    measure=measure,
    quick=Settings(grid=((0.8, 0.95), (1.0, 1.0)), samples=8, k=(1, 2, 4, 8), probes=32, questions=32),
    full=Settings(),
)
