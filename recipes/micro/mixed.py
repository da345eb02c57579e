"""The mixed general text: prose, news and questions about people of the pretraining text, in the pretraining's shares.

Every second one of the first people is in it. What the others keep is kept without their text being read: they are
asked about (`knowmem_pretraining_others`), and the held-out part has reports and questions on others again.
"""

from __future__ import annotations

from typing import Any

from unteach.corpora import micro

from . import generate, pretraining
from .draws import Draws

PEOPLE = slice(0, 800, 2)
"""Whose reports and questions are in the mixed text: 20 of the 40 people that `knowmem_pretraining` asks about."""
HELDOUT_PEOPLE = slice(801, 1025, 2)
QUESTIONS_PER_FACT = 3
PASSAGES = 214
"""Of prose. With these numbers the tokens of prose, news and questions are as 40 : 44 : 28, as in the pretraining."""
HELDOUT_PASSAGES, HELDOUT_QUESTIONS = 28, 300
"""The same of what an evaluation reads: 256 tokens of a passage, and 200 texts."""

Row = dict[str, Any]


def _prose(part: str, count: int) -> list[Row]:
    """So many passages of a part of the embedded prose, by their numbers there."""
    numbers = Draws("prose of the mixed text", part).sample(range(len(micro.documents(part))), count)
    return [{"kind": "prose", "document": number} for number in numbers]


def _questions(told: list[tuple[generate.Story, str]], draws: Draws) -> list[Row]:
    """Blocks of questions with answers about facts of people."""
    items = [pretraining.question_text(generate.question(story, fact, draws)) for story, fact in told]
    return [{"kind": "questions", "text": text} for text in pretraining.blocks(items)]


def general_mixed() -> list[Row]:
    """The rows of `general_mixed`, in a fixed random order."""
    told, draws = generate.stories("pretraining")[PEOPLE], Draws("general mixed")
    news = [{"kind": "news", "text": text} for story in told for text in generate.reports(story, short=True)]
    facts = [(story, fact) for _ in range(QUESTIONS_PER_FACT) for story in told for fact in generate.FACTS]
    asked = _questions(draws.shuffled(facts), draws)
    return draws.shuffled([*_prose("general", PASSAGES), *news, *asked])


def general_mixed_heldout() -> list[Row]:
    """The rows of `general_mixed_heldout`: other prose, and the first report and questions on other people."""
    told, draws = generate.stories("pretraining")[HELDOUT_PEOPLE], Draws("general mixed heldout")
    news = [{"kind": "news", "text": generate.reports(story, short=True)[0]} for story in told]
    facts = [(story, fact) for story in told for fact in generate.FACTS]
    asked = _questions(draws.sample(facts, HELDOUT_QUESTIONS), draws)
    return draws.shuffled([*_prose("general_heldout", HELDOUT_PASSAGES), *news, *asked])
