"""The synthetic pretraining text: other people's news, questions, choices, towns; instructions."""

from __future__ import annotations

from functools import cache

from . import generate, names, sentences
from .draws import Draws
from .generate import FACTS, NUM_KNOWN, Choice, Question, Story, Town, _filled, _slots, question, stories, towns

CHOICE_FACTS = ("town", "job")
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
    return Question(draws.pick(sentences.PLACE_QUESTIONS[fact]).format(town=town.town), getattr(town, fact), fact)


def _with_choices(item: Question, values: tuple[str, ...], draws: Draws) -> Choice:
    """Add three wrong answers, taken from `values`, and shuffle."""
    chosen = [item.answer]
    while len(chosen) < len(LETTERS):
        other = draws.pick(values)
        if other not in chosen:
            chosen.append(other)
    first, second, third, fourth = draws.shuffled(chosen)
    return Choice(item.question, (first, second, third, fourth), (first, second, third, fourth).index(item.answer))


@cache
def _values(fact: str) -> tuple[str, ...]:
    """Return the answers that multiple-choice questions on a fact choose from, sorted."""
    source = towns() if fact in sentences.PLACE_QUESTIONS else stories("pretraining")[:NUM_KNOWN]
    return tuple(sorted({getattr(item, fact) for item in source}))


def _subjects() -> list[tuple[Story | Town, str]]:
    """Return every (person or town, fact) that multiple-choice questions ask about."""
    people = [(s, fact) for s in stories("pretraining")[:NUM_KNOWN] for fact in CHOICE_FACTS]
    places = [(t, fact) for t in towns() for fact in sentences.PLACE_QUESTIONS]
    return [*people, *places]


def _choice(subject: Story | Town, fact: str, draws: Draws) -> Choice:
    item = question(subject, fact, draws) if isinstance(subject, Story) else place_question(subject, fact, draws)
    return _with_choices(item, _values(fact), draws)


@cache
def choice_test() -> tuple[Choice, ...]:
    """Return the multiple-choice test: every fact of 40 people and all towns of the pretraining text, once.

    The pretraining text asks for the same facts among other choices, never for one among these choices in
    this order.
    """
    draws = Draws("test choices")
    return tuple(draws.shuffled([_choice(subject, fact, draws) for subject, fact in _subjects()]))


def example_choices(count: int = 2) -> list[Choice]:
    """Return few-shot examples for the multiple-choice test."""
    draws = Draws("example choices")
    return [_choice(subject, fact, draws) for subject, fact in draws.sample(_subjects(), count)]


def place_documents(variants: int = 6) -> list[str]:
    """Return short descriptions of all towns, `variants` of each."""
    texts = []
    for town in towns():
        draws = Draws("place", town.town)
        slots = {"town": town.town, "river": town.river, "product": town.product}
        for _ in range(variants):
            forms = [draws.pick(sentences.PLACE_SENTENCES["river"]), draws.pick(sentences.PLACE_SENTENCES["product"])]
            forms += draws.sample(sentences.PLACE_COLOUR, 1 + draws.below(2))
            texts.append(" ".join(_filled(form, slots, draws) for form in draws.shuffled(forms)))
    return texts


def blocks(items: list[str], size: int = QUESTIONS_PER_DOCUMENT) -> list[str]:
    """Return documents of so many questions each."""
    return ["\n\n".join(items[start : start + size]) for start in range(0, len(items), size)]


def question_documents(people: int, variants: int = 2) -> list[str]:
    """Return blocks of questions with answers about people and towns, every fact `variants` times.

    Args:
        people: The first so many people of the pretraining text are asked about.
        variants: How often each fact is asked for.
    """
    draws = Draws("question documents")
    items = [
        question(s, fact, draws) for _ in range(variants) for s in stories("pretraining")[:people] for fact in FACTS
    ]
    items += [
        place_question(t, fact, draws)
        for _ in range(2 * variants)
        for t in towns()
        for fact in sentences.PLACE_QUESTIONS
    ]
    return blocks([question_text(item) for item in draws.shuffled(items)])


def _fact_sentence(subject: Story | Town, fact: str, draws: Draws) -> str:
    """Return a sentence that states one fact about a person or town."""
    if isinstance(subject, Story):
        named = {"Who": subject.name, "who": subject.name}
        return _filled(draws.pick(sentences.FACT_SENTENCES[fact]), _slots(subject, draws) | named, draws)
    slots = {"town": subject.town, "river": subject.river, "product": subject.product}
    return _filled(draws.pick(sentences.PLACE_SENTENCES[fact]), slots, draws)


def choice_documents(variants: int = 60) -> list[str]:
    """Return blocks of multiple-choice questions on every fact of `choice_test`, among other choices.

    In every fourth block a sentence with the fact stands before each question: first practise for choosing,
    then for knowing.
    """
    draws = Draws("choice documents")
    tested = {(item.question, item.choices) for item in choice_test()}
    made: list[tuple[str, str]] = []
    for subject, fact in draws.shuffled(_subjects() * variants):
        item = _choice(subject, fact, draws)
        while (item.question, item.choices) in tested:
            item = _choice(subject, fact, draws)
        made.append((_fact_sentence(subject, fact, draws), choice_text(item)))
    told = len(made) // 4
    return blocks([f"{fact}\n{text}" for fact, text in made[:told]], CHOICES_PER_DOCUMENT) + blocks(
        [text for _, text in made[told:]], CHOICES_PER_DOCUMENT
    )


def report_documents(people: int) -> list[str]:
    """Return short reports on people of the pretraining text: the first so many, and all never asked about."""
    told = stories("pretraining")[:people] + stories("unasked")
    return [text for story in told for text in generate.reports(story, short=True)]


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
