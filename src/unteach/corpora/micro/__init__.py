"""The embedded benchmark: fictional local news, public-domain prose, a tokenizer and seven small models.

An honest small benchmark with the schema of MUSE; it is not MUSE, and its scores compare with nothing but
themselves. Everything here is data; how it was made is in `recipes/micro`. See docs/micro.md.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from unteach.corpora import Benchmark, ChoiceQuestion, MeasuringSettings, Probe, Question

FOLDER = Path(__file__).parent
MODELS = ("target", "retrained", "base", "small", "chooser_target", "chooser_retrained", "chooser_base")
"""What was made together is named alike: `chooser_...` can choose among answers, the first three cannot."""
FOLDS = ("forget_1", "forget_2", "forget_3", "forget_4")
"""Four disjoint parts of the forget documents, ten stories each."""
MIXED = {"general_mixed": "general", "general_mixed_heldout": "general_heldout"}
"""Prose, news and questions about people of the pretraining text: the name, and the part that its prose is from."""
DOCUMENTS = ("forget", "retain", "holdout", "general", "general_heldout", *FOLDS, "instruct", *MIXED, "alternates")
"""`alternates`: the forget documents in their order, word for word but for other facts about the same people."""
REPORTS_PER_STORY = 6
"""Documents of a group come story by story, so many of each."""
SETTINGS = MeasuringSettings(verbatim_tokens=64, knowledge_tokens=16, membership_tokens=256, general_tokens=256)

_PERSON = r"[A-Z][a-z]+ [A-Z][a-z]+"
Half = Literal["all", "stop", "measure"]
Kind = Literal["prose", "news", "questions"]


def _rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(FOLDER / "data" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def documents(part: str) -> list[str]:
    """The texts of a part; `part` is a name in `DOCUMENTS`."""
    if part not in DOCUMENTS:
        raise ValueError(f"documents micro:{part} do not exist, must be micro: with one of {', '.join(DOCUMENTS)}")
    if part in FOLDS:
        texts = documents("forget")
        size, number = len(texts) // len(FOLDS), FOLDS.index(part)
        return texts[number * size : (number + 1) * size]
    if part in MIXED:
        return [text for _, text in mixed_documents(part)]
    return [row["text"] for row in _rows(part)]


def mixed_documents(part: str) -> list[tuple[Kind, str]]:
    """The texts of a part in `MIXED`, each with its kind."""
    prose = documents(MIXED[part])
    return [(row["kind"], row["text"] if "text" in row else prose[row["document"]]) for row in _rows(part)]


def model_folder(part: str) -> Path:
    """The folder of an embedded model, ready for `AutoModelForCausalLM.from_pretrained`; `part` is in `MODELS`."""
    if part not in MODELS:
        raise ValueError(f"model is micro:{part}, must be micro: and one of {', '.join(MODELS)}")
    return FOLDER / "models" / part


def probes(group: str, half: Half = "all") -> tuple[Probe, ...]:
    """One verbatim probe per document of `forget`, `retain` or `holdout`, in a fixed random order, one for each half.

    `stop`: documents of every second story, for a stop rule; `measure`: those of the other stories, for the measurement
    after it; `all`: both.
    """
    if half not in get_args(Half):
        raise ValueError(f"half is {half!r}, must be one of {', '.join(get_args(Half))}")
    rows = _of("probes", group)
    if half != "all":
        rows = [row for row in rows if row["document"] // REPORTS_PER_STORY % 2 == (half == "measure")]
        rows.sort(key=lambda row: row["place_in_half"])
    return tuple(
        Probe(row["prompt"], row["expected"], tuple(row["prompt_ids"]), tuple(row["expected_ids"]), row["document"])
        for row in rows
    )


def questions(group: str) -> tuple[Question, ...]:
    """The questions of a group: `forget` and `retain`, with `forget_examples` and `retain_examples` put before them.

    `pretraining` asks about people whom the pretraining text asks about, `unasked` about people who have reports there
    and no questions. `pretraining_kept` and `pretraining_others` part the former: by whether `general_mixed` tells of
    them.
    """
    if group in ("pretraining_kept", "pretraining_others"):
        told = set(re.findall(_PERSON, "\n".join(documents("general_mixed"))))
        asked = ((item, re.findall(_PERSON, item.question)[0] in told) for item in questions("pretraining"))
        return tuple(item for item, kept in asked if kept == (group == "pretraining_kept"))
    return tuple(Question(row["question"], row["answer"]) for row in _of("questions", group))


class Story(NamedTuple):
    """The reports about one person."""

    person: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def stories(group: str) -> list[Story]:
    """The stories of `forget` or `retain` with the benchmark's questions about them, in the order of its documents."""
    texts, asked, found = documents(group), questions(group), []
    for begin in range(0, len(texts), REPORTS_PER_STORY):
        reports = tuple(texts[begin : begin + REPORTS_PER_STORY])
        names = Counter(re.findall(_PERSON, "\n".join(reports)))
        person = names.most_common(1)[0][0]
        found.append(Story(person, reports, tuple(item for item in asked if f" {person}" in item.question)))
    return found


def _of(name: str, group: str) -> list[dict[str, Any]]:
    """The rows of one group in a file that holds several."""
    rows = _rows(name)
    chosen = [row for row in rows if row["group"] == group]
    if not chosen:
        groups = dict.fromkeys(row["group"] for row in rows)
        raise ValueError(f"group is {group!r}, must be one of {', '.join(groups)}")
    return chosen


def _membership(group: str) -> tuple[str, ...]:
    texts = documents(group)  # in the fixed random order in which their membership is tested
    return tuple(texts[row["document"]] for row in _of("membership", group))


def load_benchmark(half: Half = "all") -> Benchmark:
    """The benchmark, with the verbatim probes of all forget documents, or of one half of the stories (`probes`).

    Recital of kept documents is in the whole one alone: cells are measured on a half, and known by its hash.
    """
    return Benchmark(
        name="micro",
        verbatim_forget=probes("forget", half),
        verbatim_holdout=probes("holdout"),
        verbatim_retain=probes("retain") if half == "all" else (),
        knowledge_forget=questions("forget"),
        knowledge_forget_examples=questions("forget_examples"),
        knowledge_retain=questions("retain"),
        knowledge_retain_examples=questions("retain_examples"),
        membership_forget=_membership("forget"),
        membership_retain=_membership("retain"),
        membership_holdout=_membership("holdout"),
        multiple_choice=tuple(ChoiceQuestion(**row) for row in _rows("choices")),
        general_texts=tuple(documents("general_heldout")),
        settings=SETTINGS,
        notes=("micro is a benchmark of fictional texts with the schema of MUSE; it is not MUSE",),
    )
