"""The synthetic pretraining text: other people's news, questions, choices, towns; instructions."""

from __future__ import annotations

from functools import cache

from . import names, sentences
from .draws import Draws
from .generate import FACTS, Choice, Question, Story, Town, _filled, question, reports, stories, towns

NUM_TEST_CHOICES = 200
CHOICE_FACTS = ("object", "town", "job", "site", "helper")
QUESTIONS_PER_DOCUMENT = 5
CHOICES_PER_DOCUMENT = 4
LETTERS = "ABCD"


def question_text(item: Question) -> str:
    """Return a question with its answer in the form the knowledge test asks in."""
    return f"Question: {item.question}\nAnswer: {item.answer}"


def choice_prompt(item: Choice) -> str:
    """Return a multiple-choice question up to, and not including, the space and letter of its answer."""
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, item.choices, strict=True))
    return f"Question: {item.question}\n\nChoices:\n{lines}\n\nCorrect answer:"


def choice_text(item: Choice) -> str:
    """Return a multiple-choice question with the letter of its answer."""
    return f"{choice_prompt(item)} {LETTERS[item.answer]}"


def place_question(town: Town, fact: str, draws: Draws) -> Question:
    """Return one question about a town."""
    return Question(
        draws.pick(sentences.PLACE_QUESTIONS[fact]).format(town=town.town), getattr(town, fact), fact
    )


def _with_choices(item: Question, values: tuple[str, ...], draws: Draws) -> Choice:
    """Add three wrong answers, taken from `values`, and shuffle."""
    chosen = [item.answer]
    while len(chosen) < len(LETTERS):
        other = draws.pick(values)
        if other not in chosen:
            chosen.append(other)
    first, second, third, fourth = draws.shuffled(chosen)
    return Choice(
        item.question, (first, second, third, fourth), (first, second, third, fourth).index(item.answer)
    )


@cache
def _values(fact: str) -> tuple[str, ...]:
    """Return all answers that occur for a fact, sorted."""
    source: tuple[Story, ...] | tuple[Town, ...]
    source = towns() if fact in sentences.PLACE_QUESTIONS else stories("pretraining")
    return tuple(sorted({getattr(item, fact) for item in source}))


def _subjects() -> list[tuple[Story | Town, str]]:
    """Return every (person or town, fact) that multiple-choice questions ask about, in a random order."""
    people: list[tuple[Story | Town, str]] = [
        (s, fact) for s in stories("pretraining") for fact in CHOICE_FACTS
    ]
    places: list[tuple[Story | Town, str]] = [
        (t, fact) for t in towns() for fact in sentences.PLACE_QUESTIONS
    ]
    draws = Draws("choice subjects")
    people, places = draws.shuffled(people), draws.shuffled(places)
    half = NUM_TEST_CHOICES // 2
    return people[:half] + places[:half] + people[half:] + places[half:]


def _choice(subject: Story | Town, fact: str, draws: Draws) -> Choice:
    item = (
        question(subject, fact, draws) if isinstance(subject, Story) else place_question(subject, fact, draws)
    )
    return _with_choices(item, _values(fact), draws)


def choice_test() -> list[Choice]:
    """Return the multiple-choice test: half about people, half about towns of the pretraining text.

    These facts are in the pretraining text in reports and open questions, never as multiple-choice questions.
    """
    draws = Draws("test choices")
    return [_choice(subject, fact, draws) for subject, fact in _subjects()[:NUM_TEST_CHOICES]]


def example_choices(count: int = 3) -> list[Choice]:
    """Return few-shot examples for the multiple-choice test."""
    draws = Draws("example choices")
    return [_choice(s, fact, draws) for s, fact in draws.sample(_subjects()[NUM_TEST_CHOICES:], count)]


def place_documents(variants: int = 6) -> list[str]:
    """Return short descriptions of all towns, `variants` of each."""
    texts = []
    for town in towns():
        draws = Draws("place", town.town)
        slots = {"town": town.town, "river": town.river, "product": town.product}
        for _ in range(variants):
            forms = [
                draws.pick(sentences.PLACE_SENTENCES["river"]),
                draws.pick(sentences.PLACE_SENTENCES["product"]),
            ]
            forms += draws.sample(sentences.PLACE_COLOUR, 1 + draws.below(2))
            texts.append(" ".join(_filled(form, slots, draws) for form in draws.shuffled(forms)))
    return texts


def _blocks(items: list[str], size: int) -> list[str]:
    return ["\n\n".join(items[start : start + size]) for start in range(0, len(items), size)]


def question_documents(variants: int = 2) -> list[str]:
    """Return blocks of questions with answers about all people and towns, every fact `variants` times."""
    draws = Draws("question documents")
    items = [
        question(s, fact, draws) for _ in range(variants) for s in stories("pretraining") for fact in FACTS
    ]
    items += [
        place_question(t, fact, draws)
        for _ in range(2 * variants)
        for t in towns()
        for fact in sentences.PLACE_QUESTIONS
    ]
    return _blocks([question_text(item) for item in draws.shuffled(items)], QUESTIONS_PER_DOCUMENT)


def choice_documents(variants: int = 2) -> list[str]:
    """Return blocks of multiple-choice questions on every fact that is not in the test."""
    draws = Draws("choice documents")
    subjects = _subjects()[NUM_TEST_CHOICES:] * variants
    return _blocks(
        [choice_text(_choice(s, f, draws)) for s, f in draws.shuffled(subjects)], CHOICES_PER_DOCUMENT
    )


def report_documents() -> list[str]:
    """Return the reports of all people of the pretraining text, asked about or not."""
    return [
        text for group in ("pretraining", "unasked") for story in stories(group) for text in reports(story)
    ]


def instruction_documents(count: int = 600) -> list[str]:
    """Return simple instructions with responses, unrelated to the news and not part of the pretraining."""
    draws = Draws("instructions")
    pools = (names.THINGS, names.PRODUCTS, names.JOBS, names.QUALITIES)
    texts = []
    for _ in range(count):
        words = draws.sample(draws.pick(pools), 3 + draws.below(3))
        listed = ", ".join(words)
        first, second = 1 + draws.below(49), 1 + draws.below(49)
        task, response = draws.pick(
            (
                (f"Sort these words alphabetically: {listed}.", ", ".join(sorted(words))),
                (f"Write this list backwards: {listed}.", ", ".join(reversed(words))),
                (f"How many words are in this list? {listed}.", str(len(words))),
                (f"Which word comes first? {listed}.", words[0]),
                (f"Name the last word: {listed}.", words[-1]),
                (f"Write in capital letters: {words[0]}.", words[0].upper()),
                (f"Which of these words is the longest? {listed}.", max(words, key=len)),
                (f"Add {first} and {second}.", str(first + second)),
                (f"Which number is greater, {first} or {second}?", str(max(first, second))),
                (f"Spell the word {words[0]}.", "-".join(words[0])),
                (f"Repeat this word three times: {words[0]}.", " ".join(words[:1] * 3)),
                (f"Put the word and between {words[0]} and {words[1]}.", f"{words[0]} and {words[1]}"),
            )
        )
        texts.append(f"Instruction: {task}\nResponse: {response}")
    return texts
