"""The deterministic generator of fictional local news, with questions, choices and places.

A *story* is one person and five facts: what happened to which object, and the town, job, site and helper.
Several *reports* tell each story in different words and order. Every person has a family name of their own.
The same story always gives the same text, on every Python version: all draws come from `draws.Draws`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from . import leads, names, sentences
from .draws import Draws

REPORTS_PER_STORY = 6
FOLDS = 4
STORIES = {"forget": 40, "retain": 40, "holdout": 40, "unasked": 120, "pretraining": 1200}
"""Stories per group. `unasked`: in the pretraining text with reports but no questions, to measure reading.

`pretraining` comes last: a smaller number there leaves all other stories, and its own first ones, as they are.
"""

FACTS = ("object", "town", "job", "site", "helper")
QUESTIONS_PER_STORY = 3
NUM_TOWNS = 60
NUM_RIVERS = 40
NUM_SITES = 100
NUM_OBJECTS = 240
NUM_HELPERS = 60
NUM_KNOWN = 40
"""People of the pretraining text, the first ones, on whom multiple-choice questions are asked."""


@dataclass(frozen=True)
class Story:
    """One fictional person and what happened; the fields named in `FACTS` can be asked for."""

    key: str
    name: str
    female: bool
    kind: str
    object: str
    town: str
    job: str
    site: str
    helper: str


@dataclass(frozen=True)
class Question:
    """A question with its short answer, and the fact it asks for."""

    question: str
    answer: str
    fact: str


@dataclass(frozen=True)
class Choice:
    """A multiple-choice question in MMLU's format: four choices and the index of the right one."""

    question: str
    choices: tuple[str, str, str, str]
    answer: int


@dataclass(frozen=True)
class Town:
    """A fictional town: its river and what it is known for."""

    town: str
    river: str
    product: str


@cache
def towns() -> tuple[Town, ...]:
    """Return all towns."""
    draws = Draws("town facts")
    rivers = names.rivers(NUM_RIVERS)
    return tuple(Town(t, draws.pick(rivers), draws.pick(names.PRODUCTS)) for t in names.towns(NUM_TOWNS))


@cache
def _all_stories() -> dict[str, tuple[Story, ...]]:
    """Return group to stories; no two people of the whole benchmark share a family name."""
    draws = Draws("people")
    given = names.FEMALE_NAMES + names.MALE_NAMES
    families = iter(names.surnames())
    helpers = [f"{draws.pick(given)} {next(families)}" for _ in range(NUM_HELPERS)]
    kinds, sites, objects = tuple(leads.LEADS), names.sites(NUM_SITES), names.objects(NUM_OBJECTS)
    groups: dict[str, tuple[Story, ...]] = {}
    for group, count in STORIES.items():
        made = []
        for index in range(count):
            first = draws.pick(given)
            made.append(
                Story(
                    key=f"{group}/{index}",
                    name=f"{first} {next(families)}",
                    female=first in names.FEMALE_NAMES,
                    kind=draws.pick(kinds),
                    object=draws.pick(objects),
                    town=draws.pick(towns()).town,
                    job=draws.pick(names.JOBS),
                    site=draws.pick(sites),
                    helper=draws.pick(helpers),
                )
            )
        groups[group] = tuple(made)
    return groups


def stories(group: str) -> tuple[Story, ...]:
    """Return the stories of a group (a key of `STORIES`).

    Raises:
        ValueError: If there is no such group.
    """
    if group not in STORIES:
        raise ValueError(f"group is {group!r}, must be one of {', '.join(STORIES)}")
    return _all_stories()[group]


_ALTERNATIVES = re.compile(r"\[([^\]]*)\]")


@cache
def _parsed(form: str) -> tuple[tuple[str, ...], ...]:
    """Split a form into runs of alternatives; fixed text is a run with one alternative."""
    pieces = _ALTERNATIVES.split(form)
    return tuple(tuple(p.split("|")) if i % 2 else (p,) for i, p in enumerate(pieces) if p)


def _filled(form: str, slots: dict[str, str], draws: Draws) -> str:
    """Choose among a form's alternatives, fill its slots and begin with a capital letter."""
    text = "".join(run[0] if len(run) == 1 else draws.pick(run) for run in _parsed(form)).format_map(slots)
    return text[0].upper() + text[1:]


def _slots(story: Story, draws: Draws) -> dict[str, str]:
    """Return the values of one sentence's slots; how the person is referred to is drawn anew each time."""
    last = story.name.split()[1]
    who = story.name if draws.percent(85) else last
    subject = draws.below(100)
    return {
        "name": story.name,
        "who": who,
        "Who": story.name if subject < 75 else last if subject < 85 else "She" if story.female else "He",
        "his": "her" if story.female else "his",
        "object": story.object,
        "Object": story.object.capitalize(),
        "an_object": names.article(story.object),
        "town": story.town,
        "job": story.job,
        "a_job": names.article(story.job),
        "site": story.site,
        "helper": story.helper,
    }


class _Forms:
    """Forms in a random order for each story, dealt out without repeats until all have been used."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._left: dict[object, list[str]] = {}

    def next(self, key: object, forms: tuple[str, ...]) -> str:
        if not self._left.get(key):
            self._left[key] = self._draws.shuffled(forms)
        return self._left[key].pop()


def _body(facts: list[str], forms: _Forms, draws: Draws) -> list[str]:
    """Return the forms of the sentences that state `facts`; some state two at once."""
    chosen, rest = [], list(facts)
    for pair, pair_forms in draws.shuffled(list(sentences.PAIR_SENTENCES.items())):
        if pair[0] in rest and pair[1] in rest and draws.percent(25):
            chosen.append(forms.next(pair, pair_forms))
            rest = [fact for fact in rest if fact not in pair]
    return chosen + [forms.next(fact, sentences.FACT_SENTENCES[fact]) for fact in rest]


def reports(story: Story, *, short: bool = False) -> list[str]:
    """Return the reports of a story: opening, the four other facts, quotation, local colour.

    Args:
        story: What to report.
        short: Mostly the facts, with few quotations and little local colour.
    """
    draws = Draws("reports", story.key)
    forms = _Forms(draws)
    texts = []
    for _ in range(REPORTS_PER_STORY):
        body = _body([fact for fact in FACTS if fact != "object"], forms, draws)
        if draws.percent(35):
            body.append(forms.next("object", sentences.FACT_SENTENCES["object"]))
        if draws.percent(20 if short else 75):
            quote = forms.next("quote", sentences.QUOTE_FORMS)
            start, end = forms.next("start", sentences.QUOTE_STARTS), forms.next("end", sentences.QUOTE_ENDS)
            body.append(quote.replace("{start}", start).replace("{end}", end))
        for _ in range(int(draws.percent(30)) if short else 1 + draws.percent(40)):
            body.append(forms.next("colour", sentences.COLOUR))
        opening = [forms.next("headline", leads.HEADLINES)] if draws.percent(10 if short else 20) else []
        opening.append(forms.next("lead", leads.LEADS[story.kind]))
        lines = [_filled(form, _slots(story, draws), draws) for form in opening + draws.shuffled(body)]
        texts.append(" ".join(lines))
    return texts


def alternate(story: Story) -> Story:
    """Return a story with every fact exchanged for another one: its reports differ in these words alone."""
    draws = Draws("alternate", story.key)

    def other(own: str, pool: Sequence[str]) -> str:
        return draws.pick([item for item in pool if item != own])

    return dataclasses.replace(
        story,
        object=other(story.object, names.objects(NUM_OBJECTS)),
        town=other(story.town, [town.town for town in towns()]),
        job=other(story.job, names.JOBS),
        site=other(story.site, names.sites(NUM_SITES)),
        helper=other(story.helper, sorted({each.helper for each in stories("pretraining")})),
    )


def question(story: Story, fact: str, draws: Draws) -> Question:
    """Return one question about a fact of a story."""
    form = draws.pick(sentences.QUESTIONS[fact])
    return Question(form.format(name=story.name), getattr(story, fact), fact)


def split_questions(group: str) -> list[Question]:
    """Return the test questions of a group: three different facts of every story, all facts equally often."""
    draws = Draws("test questions", group)
    return [
        question(story, FACTS[(number * QUESTIONS_PER_STORY + offset) % len(FACTS)], draws)
        for number, story in enumerate(stories(group))
        for offset in range(QUESTIONS_PER_STORY)
    ]


def example_questions(key: str, count: int = 2) -> list[Question]:
    """Return few-shot examples: questions about people of the pretraining text, whom every model knows.

    Args:
        key: `forget` and `retain` are the benchmark's own examples; any other key draws others.
        count: How many.
    """
    draws = Draws("example questions", key)
    chosen = draws.sample(stories("pretraining")[:NUM_KNOWN], count)
    facts = draws.sample(FACTS, count)
    return [question(story, fact, draws) for story, fact in zip(chosen, facts, strict=True)]


def split_documents(group: str) -> list[str]:
    """Return all reports of a group of stories, story by story."""
    return [text for story in stories(group) for text in reports(story)]


def fold_documents(fold: int) -> list[str]:
    """Return the forget documents of fold 1, 2, 3 or 4: ten stories each, disjoint."""
    if not 1 <= fold <= FOLDS:
        raise ValueError(f"fold is {fold}, must be 1 to {FOLDS}")
    size = STORIES["forget"] // FOLDS
    chosen = stories("forget")[(fold - 1) * size : fold * size]
    return [text for story in chosen for text in reports(story)]
