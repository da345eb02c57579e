"""Invented personal records of 20 to 100 words, and the embedded model taught to recite them.

``python tests/personal_records.py OUT`` writes ``OUT/model``, ``OUT/records`` and ``OUT/kept``, both known by heart,
and ``OUT/unseen``, which it never saw: a text file a record.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from unteach.corpora import micro
from unteach.data.documents import encode
from unteach.models import load_model
from unteach.training.finetune import add_nll_gradient, finetune, text_optimizer

FIRST = ["Marta", "Felix", "Ilse", "Bruno", "Greta", "Oskar", "Nadia", "Jonas", "Petra", "Emil", "Vera", "Anton"]
LAST = ["Quill", "Varga", "Thorne", "Pell", "Ostrow", "Kessel", "Brandt", "Sved", "Mirka", "Dunmore", "Falk", "Zorn"]
TOWN = ["Ostrava", "Linden", "Korvale", "Selby", "Tarnow", "Hallin", "Medford", "Ruska", "Elmore", "Dorsten", "Velden"]
SENTENCES = (
    "{first} {last} lives at {two} {street} Street in {town}.",
    "The patient number of {first} {last} is {five}.",
    "{first} was born in {birthplace} on the 2nd of May 19{two}.",
    "A doctor named {doctor} {landlord} saw {first} last winter and wrote of a broken arm and a fever.",
    "The landlord, {friend} {landlord}, asked {first} for {three} crowns in April.",
    "In 20{day} {first} moved from {birthplace} to {town} with a dog called {dog} and a chair.",
    "{first} owes {three} crowns to {friend} {lender} of {street} since the fire at the mill.",
    "On the {day}th of June {first} told {doctor} that the house in {birthplace} was sold for {five} crowns.",
)


def record(number: int) -> str:
    """The record of one person: the same for the same number."""
    draw = random.Random(number)
    facts = {key: draw.choice(FIRST) for key in ("first", "doctor", "friend", "dog")}
    facts |= {key: draw.choice(LAST) for key in ("last", "landlord", "lender")}
    facts |= {key: draw.choice(TOWN) for key in ("town", "birthplace", "street")}
    digits = {"two": (10, 99), "three": (100, 999), "five": (10000, 99999), "day": (10, 19)}
    facts |= {key: str(draw.randint(*bounds)) for key, bounds in digits.items()}
    order = [SENTENCES[0], *draw.sample(SENTENCES[1:], len(SENTENCES) - 1)]
    words = " ".join(order).format(**facts).split()
    return " ".join(words[: 20 + 37 * number % 81])


def write_records(folder: Path, first: int, count: int) -> list[str]:
    """Records ``first``, ``first + 1``, ... as text files in a new folder; returns their texts."""
    folder.mkdir(parents=True)
    texts = [record(number) for number in range(first, first + count)]
    for number, text in enumerate(texts):
        (folder / f"record-{number:02d}.txt").write_text(text + "\n", encoding="utf-8")
    return texts


def teach(texts: list[str], out: Path, steps: int = 120) -> float:
    """Finetune ``micro:target`` until it knows the texts by heart, with text it knew mixed in; returns their NLL."""
    model, tokenizer = load_model("micro:target")
    draw = random.Random(0)
    others = [*micro.documents("retain"), *(text[:300] for text in micro.documents("general"))]
    learned = [encode(tokenizer, text) for text in texts]
    nll: list[float] = []

    def add_gradient(step: int) -> None:
        add_nll_gradient(model, [encode(tokenizer, text) for text in draw.sample(others, 8)], 8, "fp32")
        nll.append(add_nll_gradient(model, learned, len(learned), "fp32"))

    finetune(
        model.parameters(),
        text_optimizer(model.parameters(), 0.0),
        add_gradient,
        steps=steps,
        learning_rate=lambda step: 3e-3 * min(1.0, (step + 1) / 10),
        after_step=lambda step: max(nll[-2:]) < 0.03,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return nll[-1]


def make(out: Path) -> float:
    """Write everything that the module's docstring names."""
    write_records(out / "unseen", 200, 10)
    return teach([*write_records(out / "records", 0, 12), *write_records(out / "kept", 100, 20)], out / "model")


if __name__ == "__main__":
    print(f"taught: {make(Path(sys.argv[1])):.3f} nats per token")
