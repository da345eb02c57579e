"""Write the data files of the embedded benchmark: `python -m recipes.micro.build`.

The texts and questions come from the generator, the probes are cut with the shipped tokenizer. The same files come out
byte for byte on every machine; `general.jsonl.gz` and `general_heldout.jsonl.gz` are collected texts and stay as they
are.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unteach.corpora import Benchmark, Probe, micro

from . import generate, mixed, pretraining, tokens
from .draws import Draws

GROUPS = ("forget", "retain", "holdout")
ASKED_PEOPLE = 40
"""People whom the pretraining text asks about, other than those with choices, on whom `pretraining` asks."""


def probes(tokenizer: Any, group: str) -> tuple[Probe, ...]:
    """Return one verbatim probe per document of a group, in a fixed random order.

    Args:
        tokenizer: The benchmark's tokenizer.
        group: `forget`, `retain` or `holdout`.
    """
    made = []
    for number, text in enumerate(generate.split_documents(group)):
        prompt, expected = tokens.verbatim_probe(tokenizer, text)
        whole, first = tokenizer(prompt + expected)["input_ids"], tokenizer(prompt)["input_ids"]
        made.append(Probe(prompt, expected, tuple(first), tuple(whole[len(first) :]), number))
    return tuple(Draws("order of probes", group).shuffled(made))


def _places_in_halves(group: str) -> dict[int, int]:
    """Return for each document the place of its probe in its half, which has a random order of its own."""
    numbers = range(len(generate.split_documents(group)))
    halves = [[n for n in numbers if n // generate.REPORTS_PER_STORY % 2 == half] for half in (0, 1)]
    orders = [Draws("order of probes", group).shuffled(half) for half in halves]
    return {number: place for order in orders for place, number in enumerate(order)}


def _probe_rows(tokenizer: Any, group: str) -> list[dict[str, Any]]:
    places = _places_in_halves(group)
    made = probes(tokenizer, group)
    return [
        {"group": group, "place_in_half": places[number]}
        | {name: value for name, value in dataclasses.asdict(probe).items() if name != "exact"}  # none is
        for probe in made
        if (number := probe.document) is not None
    ]


def benchmark_with(tokenizer: Any) -> Benchmark:
    """Return the shipped benchmark, its probes cut with another tokenizer."""
    return dataclasses.replace(
        micro.load_benchmark(),
        verbatim_forget=probes(tokenizer, "forget"),
        verbatim_holdout=probes(tokenizer, "holdout"),
    )


def asked_questions() -> list[generate.Question]:
    """Return questions about people whom the pretraining text asks about, other than those with choices."""
    draws = Draws("score")
    told = generate.stories("pretraining")[generate.NUM_KNOWN :][:ASKED_PEOPLE]
    return [generate.question(story, fact, draws) for story in told for fact in generate.FACTS]


def _questions() -> list[dict[str, Any]]:
    groups = {
        "forget": generate.split_questions("forget"),
        "forget_examples": generate.example_questions("forget"),
        "retain": generate.split_questions("retain"),
        "retain_examples": generate.example_questions("retain"),
        "unasked": generate.split_questions("unasked"),
        "pretraining": asked_questions(),
    }
    return [{"group": group, **dataclasses.asdict(item)} for group, items in groups.items() for item in items]


def _choices() -> list[dict[str, Any]]:
    shots = "".join(pretraining.choice_text(item) + "\n\n" for item in pretraining.example_choices())
    return [
        {"prompt": shots + pretraining.choice_prompt(item), "answer": item.answer, "question": item.question}
        for item in pretraining.choice_test()
    ]


def _membership() -> list[dict[str, Any]]:
    """The documents of each group in the order in which their membership is tested."""
    rows = []
    for group in GROUPS:
        numbers = range(len(generate.split_documents(group)))
        rows += [{"group": group, "document": number} for number in Draws("membership", group).shuffled(numbers)]
    return rows


def data_files(tokenizer: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every data file by the file's name without its ending."""
    texts = {group: generate.split_documents(group) for group in GROUPS}
    texts["alternates"] = [
        text for story in generate.stories("forget") for text in generate.reports(generate.alternate(story))
    ]
    texts["instruct"] = pretraining.instruction_documents()
    return {
        **{name: [{"text": text} for text in part] for name, part in texts.items()},
        "probes": [row for group in GROUPS for row in _probe_rows(tokenizer, group)],
        "questions": _questions(),
        "choices": _choices(),
        "membership": _membership(),
        "general_mixed": mixed.general_mixed(),
        "general_mixed_heldout": mixed.general_mixed_heldout(),
    }


def packed(rows: Iterable[dict[str, Any]]) -> bytes:
    """Return rows as gzipped JSON lines without a time in the header: equal rows give equal files."""
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), 9, mtime=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write all files."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(prog="python -m recipes.micro.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=micro.FOLDER / "data")
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(micro.model_folder("base"))
    for name, rows in data_files(tokenizer).items():
        (out / f"{name}.jsonl.gz").write_bytes(packed(rows))
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
