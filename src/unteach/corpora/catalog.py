"""Benchmarks by name: MUSE, TOFU and MMLU, from the Hugging Face hub or a folder of tables, and the embedded one.

To add one: a function that reads it, and its `NamedBenchmark` in `CATALOG`.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from unteach.corpora import Benchmark, ChoiceQuestion, MeasuringSettings, Probe, Question, Tofu, TofuQuestion, micro
from unteach.data.records import Row, find_table, read_table

MUSE = {"muse-news": "muse-bench/MUSE-News", "muse-books": "muse-bench/MUSE-Books"}
"""Where each corpus of MUSE (Shi et al., 2024) is on the hub."""
_PAIR, _TEXT = ("question", "answer"), ("text",)
_MUSE_TABLES: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "verbmem/forget": ("verbatim_forget", Probe, ("prompt", "gt")),
    "knowmem/forget_qa": ("knowledge_forget", Question, _PAIR),
    "knowmem/forget_qa_icl": ("knowledge_forget_examples", Question, _PAIR),
    "knowmem/retain_qa": ("knowledge_retain", Question, _PAIR),
    "knowmem/retain_qa_icl": ("knowledge_retain_examples", Question, _PAIR),
    "privleak/forget": ("membership_forget", str, _TEXT),
    "privleak/retain": ("membership_retain", str, _TEXT),
    "privleak/holdout": ("membership_holdout", str, _TEXT),
}
"""MUSE's layout: the part of a benchmark that each table holds, what a row becomes, and its columns. The documents
themselves are in `raw/` (text)."""
TOFU_SPLITS = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}
"""Forget splits of TOFU (Maini et al., 2024) and the retain split that completes each."""
MMLU_SHOTS = 5
_LETTERS = "ABCDEFGHIJ"


@dataclasses.dataclass(frozen=True)
class NamedBenchmark:
    """How a benchmark is read: an entry of the catalog. `data` is its folder of tables; None: where it is at home."""

    load: Callable[[Path | None], Benchmark]
    """data → what is measured."""
    documents: Callable[[Path | None], list[str]] | None = None
    """data → the texts to forget; None where there are none: it is then measured only, never unlearned."""
    retain: Callable[[Path | None], list[str]] | None = None
    """data → texts that the target learned beside those; an empty list where the folder has none."""
    questions: Callable[[Path | None], tuple[Question, ...]] | None = None
    """data → questions about the documents, for a stop rule; None: the benchmark's `knowledge_forget`."""
    probe_tokens: tuple[int, int] = (128, 64)
    """Tokens of a verbatim probe's prompt and of its continuation, where probes are cut from the documents."""
    ends_documents: bool = False
    """Whether a document is learned with the end-of-text token, as question–answer pairs are."""


def load_muse(name: str, data: Path | None = None) -> Benchmark:
    """MUSE's probes, questions and membership texts, of `muse-news` or `muse-books`.

    From a folder with MUSE's layout, where any table but not all may be missing; by default from the hub.
    """
    if name not in MUSE:
        raise ValueError(f"name is {name!r}: allowed are {', '.join(MUSE)}")
    parts: dict[str, Any] = {
        part: tuple(make(*(row[column] for column in columns)) for row in _muse_rows(name, data, table, columns))
        for table, (part, make, columns) in _MUSE_TABLES.items()
    }
    if data is not None and not any(parts.values()):
        raise ValueError(f"{data} has none of MUSE's tables; at least one of {', '.join(_MUSE_TABLES)} is needed")
    notes = []
    if data is not None and find_table(data, "raw/retain_standin") and not find_table(data, "raw/retain1"):
        notes.append(
            "the true retain texts are not in the data folder, only a stand-in: these are scores on MUSE-News text, "
            "not MUSE-News scores, and knowmem_r asks about texts the model may never have seen"
        )
    return Benchmark(name, **parts, notes=tuple(notes))


def muse_documents(name: str, data: Path | None = None, split: str = "forget") -> list[str]:
    """The documents of one split of MUSE (`forget`, `retain1`), repeated ones once."""
    rows = _muse_rows(name, data, f"raw/{split}", _TEXT, required=True)
    return list(dict.fromkeys(row["text"] for row in rows))


def _muse_retained(name: str, data: Path | None) -> list[str]:
    """The retain documents; a stand-in where the folder has that alone, nothing where it has neither."""
    for split in ("retain1", "retain_standin"):
        if data is None or find_table(data, f"raw/{split}"):
            return muse_documents(name, data, split)
    return []


def _muse_rows(name: str, data: Path | None, table: str, columns: tuple[str, ...], required: bool = False) -> list[Row]:
    subset, split = table.split("/")
    return read_table(data, table, columns, (MUSE[name], subset, split), required)


def load_tofu(split: str = "forget10", data: Path | None = None) -> Benchmark:
    """TOFU's four question sets with their reworded and wrong answers, of `forget01`, `forget05` or `forget10`.

    From a folder with the tables `<split>_perturbed`, `retain_perturbed`, `real_authors_perturbed` and
    `world_facts_perturbed`; by default from the hub.
    """
    if split not in TOFU_SPLITS:
        raise ValueError(f"split is {split!r}: allowed are {', '.join(TOFU_SPLITS)}")
    sets = {
        name: _tofu_rows(f"{split if name == 'forget' else name}_perturbed", data, "perturbed_answer")
        for name in ("forget", "retain", "real_authors", "world_facts")
    }
    return Benchmark(f"tofu-{split}", tofu=Tofu(**{name: tuple(map(_tofu, rows)) for name, rows in sets.items()}))


def _tofu(row: Row) -> TofuQuestion:
    reworded = row.get("paraphrased_answer") or row["answer"]
    return TofuQuestion(row["question"], row["answer"], reworded, tuple(row["perturbed_answer"]))


def tofu_pairs(split: str, data: Path | None = None) -> tuple[Question, ...]:
    """Question–answer pairs of a split (`full`, `forget10`, `retain90`, ...), as TOFU trains on them."""
    return tuple(Question(row["question"], row["answer"]) for row in _tofu_rows(split, data))


def tofu_documents(split: str, data: Path | None = None) -> list[str]:
    """The same, a question and its answer as one document."""
    prompt = MeasuringSettings().tofu_prompt
    return [f"{prompt.format(question=pair.question)} {pair.answer}" for pair in tofu_pairs(split, data)]


def _tofu_rows(table: str, data: Path | None, *columns: str) -> list[Row]:
    return read_table(data, table, (*_PAIR, *columns), ("locuslab/TOFU", table, "train"))


def load_mmlu(data: Path | None = None) -> tuple[ChoiceQuestion, ...]:
    """The 1,531 validation questions of MMLU (Hendrycks et al., 2021) with five worked examples before each.

    From a folder with the table `validation` (question, choices, answer, subject); by default from the hub. The worked
    examples are the folder's `prompt.txt`, the same for all questions; without it the first five of the split `dev` of
    the question's own subject, as is usual for MMLU. The two differ by a few points: scores are comparable only within
    one.
    """

    def read(split: str) -> list[Row]:
        return read_table(data, split, ("question", "choices", "answer"), ("cais/mmlu", "all", split))

    rows, fixed, examples = read("validation"), "", defaultdict[str, list[str]](list)
    if data is not None and (data / "prompt.txt").is_file():
        fixed = (data / "prompt.txt").read_text(encoding="utf-8").strip() + "\n\n"
    elif data is not None and not find_table(data, "dev"):
        raise ValueError(f"{data} has neither prompt.txt nor a table `dev`: worked examples are needed")
    else:
        for row in read("dev"):
            examples[row.get("subject", "")].append(f"{_choices(row)} {_LETTERS[row['answer']]}\n\n")
    return tuple(
        ChoiceQuestion(
            prompt=(fixed or "".join(examples[row.get("subject", "")][:MMLU_SHOTS])) + _choices(row),
            answer=int(row["answer"]),
            choices=len(row["choices"]),
            subject="" if fixed else row.get("subject", ""),
            question=row["question"],
        )
        for row in rows
    )


def _choices(row: Row) -> str:
    """A question with its lettered choices, up to `Correct answer:`."""
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(_LETTERS, row["choices"], strict=False))
    return f"Question: {row['question']}\n\nChoices:\n{choices}\n\nCorrect answer:"


CATALOG: dict[str, NamedBenchmark] = {
    "micro": NamedBenchmark(
        load=lambda data: micro.load_benchmark(),
        documents=lambda data: micro.documents("forget"),
        retain=lambda data: micro.documents("retain"),
    ),
    **{
        name: NamedBenchmark(partial(load_muse, name), partial(muse_documents, name), partial(_muse_retained, name))
        for name in MUSE
    },
    **{
        name: NamedBenchmark(
            load=partial(load_tofu, split),
            documents=partial(tofu_documents, split),
            retain=partial(tofu_documents, TOFU_SPLITS[split]),
            questions=partial(tofu_pairs, split),
            probe_tokens=(24, 40),  # a question and its answer are short: the question is the prompt
            ends_documents=True,
        )
        for name, split in (("tofu", "forget10"), *((f"tofu-{split}", split) for split in TOFU_SPLITS))
    },
    "mmlu": NamedBenchmark(load=lambda data: Benchmark("mmlu", multiple_choice=load_mmlu(data))),
}
NAMES = tuple(CATALOG)
UNLEARNED = tuple(name for name, entry in CATALOG.items() if entry.documents is not None)
"""Those with documents to forget, which experiments can run on."""


def named_benchmark(name: str) -> NamedBenchmark:
    """An entry of the catalog."""
    if name not in CATALOG:
        raise ValueError(f"benchmark is {name!r}: allowed are {', '.join(NAMES)}")
    return CATALOG[name]


def load_benchmark(name: str, data: Path | None = None) -> Benchmark:
    """A benchmark by its name, from a folder; by default from the hub, `micro` from the package itself."""
    if data is not None and not data.is_dir():
        raise ValueError(f"data is {data}: there is no such folder")
    return named_benchmark(name).load(data)


def add_multiple_choice(benchmark: Benchmark, data: Path) -> Benchmark:
    """The benchmark with the MMLU questions from a folder (see `load_mmlu`), for `mmlu_val`."""
    return dataclasses.replace(benchmark, multiple_choice=load_mmlu(data))
