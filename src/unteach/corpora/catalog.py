"""Benchmarks by name: MUSE, TOFU and MMLU, from the Hugging Face hub or a folder of tables, and the embedded one.

To add one: a function that reads it, and its `NamedBenchmark` in `CATALOG`.
"""

import dataclasses
import functools
from collections import defaultdict
from pathlib import Path

from unteach.corpora import (
    Benchmark,
    ChoiceQuestion,
    MeasuringSettings,
    NamedBenchmark,
    Probe,
    Question,
    Tofu,
    TofuQuestion,
    micro,
)
from unteach.data.records import Row, find_table, read_table

__all__ = [
    "CATALOG", "NAMES", "UNLEARNED", "add_multiple_choice", "load_benchmark", "load_mmlu", "load_muse", "load_tofu",
    "muse_documents", "named_benchmark", "tofu_documents", "tofu_pairs",
]  # fmt: skip

MUSE = {"muse-news": "muse-bench/MUSE-News", "muse-books": "muse-bench/MUSE-Books"}
"""Where each corpus of MUSE (Shi et al., 2024) is on the hub."""
_PAIR, _TEXT = ("question", "answer"), ("text",)
_MUSE_TABLES = {
    "verbmem/forget": ("prompt", "gt"),
    "knowmem/forget_qa": _PAIR,
    "knowmem/forget_qa_icl": _PAIR,
    "knowmem/retain_qa": _PAIR,
    "knowmem/retain_qa_icl": _PAIR,
    "privleak/forget": _TEXT,
    "privleak/retain": _TEXT,
    "privleak/holdout": _TEXT,
}
"""MUSE's layout; `..._icl` are worked examples, and the documents themselves are in `raw/` and `sust/` (text)."""
TOFU_SPLITS = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}
"""Forget splits of TOFU (Maini et al., 2024) and the retain split that completes each."""
MMLU_SHOTS = 5
_LETTERS = "ABCDEFGHIJ"


def load_muse(name: str, data: Path | None = None) -> Benchmark:
    """MUSE's probes, questions and membership texts.

    Args:
        name: `muse-news` or `muse-books`.
        data: a folder with MUSE's layout; any table may be missing there. By default the hub.

    Raises:
        ValueError: for another name, or a folder with none of the tables.
    """
    if name not in MUSE:
        raise ValueError(f"name is {name!r}: allowed are {', '.join(MUSE)}")
    tables = {table: _muse_rows(name, data, table, columns) or [] for table, columns in _MUSE_TABLES.items()}
    if data is not None and not any(tables.values()):
        raise ValueError(f"{data} has none of MUSE's tables; at least one of {', '.join(_MUSE_TABLES)} is needed")
    notes = []
    if data is not None and find_table(data, "raw/retain_standin") and not find_table(data, "raw/retain1"):
        notes.append(
            "the true retain texts are not in the data folder, only a stand-in: these are scores on MUSE-News text, "
            "not MUSE-News scores, and knowmem_r asks about texts the model may never have seen"
        )
    return Benchmark(
        name=name,
        verbatim_forget=tuple(Probe(row["prompt"], row["gt"]) for row in tables["verbmem/forget"]),
        knowledge_forget=_questions(tables["knowmem/forget_qa"]),
        knowledge_forget_examples=_questions(tables["knowmem/forget_qa_icl"]),
        knowledge_retain=_questions(tables["knowmem/retain_qa"]),
        knowledge_retain_examples=_questions(tables["knowmem/retain_qa_icl"]),
        membership_forget=tuple(row["text"] for row in tables["privleak/forget"]),
        membership_retain=tuple(row["text"] for row in tables["privleak/retain"]),
        membership_holdout=tuple(row["text"] for row in tables["privleak/holdout"]),
        notes=tuple(notes),
    )


def muse_documents(
    name: str, data: Path | None = None, *, subset: str = "raw", split: str = "forget", deduplicate: bool = False
) -> list[str]:
    """The documents of one split of MUSE.

    Args:
        name: `muse-news` or `muse-books`.
        data: a folder with MUSE's layout; by default the hub.
        subset: `raw`, or `sust` for the folds of sequential unlearning.
        split: such as `forget`, `retain1`, `forget_2`.
        deduplicate: drop repeated documents; MUSE-News' folds overlap and each holds about 30 twice.
    """
    rows = _muse_rows(name, data, f"{subset}/{split}", _TEXT)
    if rows is None:
        raise ValueError(f"{data} has no table {subset}/{split}")
    texts = [row["text"] for row in rows]
    return list(dict.fromkeys(texts)) if deduplicate else texts


def _muse_retained(name: str, data: Path | None) -> list[str]:
    """The retain documents; a stand-in where the folder has that alone, nothing where it has neither."""
    for split in ("retain1", "retain_standin"):
        if data is None or find_table(data, f"raw/{split}"):
            return muse_documents(name, data, split=split, deduplicate=True)
    return []


def _muse_rows(name: str, data: Path | None, table: str, columns: tuple[str, ...]) -> list[Row] | None:
    subset, split = table.split("/")
    return read_table(data, table, columns, hub=(MUSE[name], subset, split))


def _questions(rows: list[Row]) -> tuple[Question, ...]:
    return tuple(Question(row["question"], row["answer"]) for row in rows)


def load_tofu(split: str = "forget10", data: Path | None = None) -> Benchmark:
    """TOFU's four question sets with their reworded and wrong answers.

    Args:
        split: `forget01`, `forget05` or `forget10`.
        data: a folder with the tables `<split>_perturbed`, `retain_perturbed`, `real_authors_perturbed` and
            `world_facts_perturbed`; by default the hub.
    """
    if split not in TOFU_SPLITS:
        raise ValueError(f"split is {split!r}: allowed are {', '.join(TOFU_SPLITS)}")
    sets = {
        name: tuple(
            TofuQuestion(
                question=row["question"],
                answer=row["answer"],
                paraphrased_answer=row.get("paraphrased_answer") or row["answer"],
                perturbed_answers=tuple(row["perturbed_answer"]),
            )
            for row in _tofu_rows(f"{split if name == 'forget' else name}_perturbed", data, "perturbed_answer")
        )
        for name in ("forget", "retain", "real_authors", "world_facts")
    }
    return Benchmark(name=f"tofu-{split}", tofu=Tofu(**sets))


def tofu_pairs(split: str, data: Path | None = None) -> tuple[Question, ...]:
    """Question–answer pairs of a split (`full`, `forget10`, `retain90`, ...), as TOFU trains on them."""
    return _questions(_tofu_rows(split, data))


def tofu_documents(split: str, data: Path | None = None) -> list[str]:
    """The same, a question and its answer as one document."""
    prompt = MeasuringSettings().tofu_prompt
    return [f"{prompt.format(question=pair.question)} {pair.answer}" for pair in tofu_pairs(split, data)]


def _tofu_rows(table: str, data: Path | None, *columns: str) -> list[Row]:
    rows = read_table(data, table, (*_PAIR, *columns), hub=("locuslab/TOFU", table, "train"))
    if rows is None:
        raise ValueError(f"{data} has no table `{table}`")
    return rows


def load_mmlu(data: Path | None = None) -> tuple[ChoiceQuestion, ...]:
    """The 1,531 validation questions of MMLU (Hendrycks et al., 2021) with five worked examples before each.

    Args:
        data: a folder with the table `validation` (question, choices, answer, subject) and either
            `prompt.txt`, the worked examples as text, or a table `dev`. By default the hub.

    Returns:
        The questions. The worked examples are those of `prompt.txt`, the same for all questions; without it
        the first five of the `dev` split of the question's own subject, as is usual for MMLU. The two differ
        by a few points, so scores are comparable only within one.
    """

    def read(split: str) -> list[Row] | None:
        return read_table(data, split, ("question", "choices", "answer"), hub=("cais/mmlu", "all", split))

    if (rows := read("validation")) is None:
        raise ValueError(f"{data} has no table `validation` with question, choices, answer")
    fixed, examples = "", defaultdict[str, list[str]](list)
    if data is not None and (data / "prompt.txt").is_file():
        fixed = (data / "prompt.txt").read_text(encoding="utf-8").strip() + "\n\n"
    elif (development := read("dev")) is None:
        raise ValueError(f"{data} has neither prompt.txt nor a table `dev`: worked examples are needed")
    else:
        for row in development:
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


def _muse(name: str) -> NamedBenchmark:
    return NamedBenchmark(
        load=functools.partial(load_muse, name),
        documents=lambda data: muse_documents(name, data, deduplicate=True),
        retain=functools.partial(_muse_retained, name),
    )


def _tofu(split: str) -> NamedBenchmark:
    return NamedBenchmark(
        load=functools.partial(load_tofu, split),
        documents=functools.partial(tofu_documents, split),
        retain=functools.partial(tofu_documents, TOFU_SPLITS[split]),
        questions=functools.partial(tofu_pairs, split),
        probe_tokens=(24, 40),  # a question and its answer are short: the question is the prompt
        ends_documents=True,
    )


CATALOG: dict[str, NamedBenchmark] = {
    "micro": NamedBenchmark(
        load=lambda data: micro.load_benchmark(),
        documents=lambda data: micro.documents("forget"),
        retain=lambda data: micro.documents("retain"),
    ),
    **{name: _muse(name) for name in MUSE},
    "tofu": _tofu("forget10"),
    **{f"tofu-{split}": _tofu(split) for split in TOFU_SPLITS},
    "mmlu": NamedBenchmark(load=lambda data: Benchmark(name="mmlu", multiple_choice=load_mmlu(data))),
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
    """A benchmark by its name, from a folder; by default from the hub, `micro` from the package itself.

    Raises:
        ValueError: for a name that is not in `NAMES`, or a folder that does not exist.
    """
    if data is not None and not data.is_dir():
        raise ValueError(f"data is {data}: there is no such folder")
    return named_benchmark(name).load(data)


def add_multiple_choice(benchmark: Benchmark, data: Path) -> Benchmark:
    """The benchmark with the MMLU questions from a folder (see `load_mmlu`), for `mmlu_val`."""
    return dataclasses.replace(benchmark, multiple_choice=load_mmlu(data))
