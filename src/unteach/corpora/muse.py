"""MUSE-News and MUSE-Books (Shi et al., 2024), from the Hugging Face hub or from a folder of the same layout.

The layout: `verbmem/forget` (prompt, gt), `knowmem/forget_qa`, `knowmem/retain_qa` and the worked examples
`..._qa_icl` (question, answer), `privleak/forget`, `privleak/retain`, `privleak/holdout` (text), and the
documents themselves in `raw/` and `sust/` (text).
"""

from pathlib import Path

from unteach.corpora.benchmark import Benchmark, NamedBenchmark, Probe, Question
from unteach.data.records import Row, find_table, read_table

HUB = {"muse-news": "muse-bench/MUSE-News", "muse-books": "muse-bench/MUSE-Books"}
"""Where each corpus is on the hub."""
RETRAINED_AUC = {"muse-news": 0.4772, "muse-books": 0.5393}
"""The AUC of MUSE's own retrained 7B models, which MUSE's code has built in. True for those models only."""

_TABLES = {
    "verbmem/forget": ("prompt", "gt"),
    "knowmem/forget_qa": ("question", "answer"),
    "knowmem/forget_qa_icl": ("question", "answer"),
    "knowmem/retain_qa": ("question", "answer"),
    "knowmem/retain_qa_icl": ("question", "answer"),
    "privleak/forget": ("text",),
    "privleak/retain": ("text",),
    "privleak/holdout": ("text",),
}


def load_muse(name: str, data: Path | None = None) -> Benchmark:
    """MUSE's probes, questions and membership texts.

    Args:
        name: `muse-news` or `muse-books`.
        data: a folder with MUSE's layout; any table may be missing there. By default the hub.

    Raises:
        ValueError: for another name, or a folder with none of the tables.
    """
    if name not in HUB:
        raise ValueError(f"name is {name!r}: allowed are {', '.join(HUB)}")
    tables = {table: _rows(name, data, table, columns) or [] for table, columns in _TABLES.items()}
    if data is not None and not any(tables.values()):
        raise ValueError(f"{data} has none of MUSE's tables; at least one of {', '.join(_TABLES)} is needed")
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
        membership_forget=_texts(tables["privleak/forget"]),
        membership_retain=_texts(tables["privleak/retain"]),
        membership_holdout=_texts(tables["privleak/holdout"]),
        notes=tuple(notes),
    )


def muse_documents(
    name: str, data: Path | None = None, *, subset: str = "raw", split: str = "forget", deduplicate: bool = False
) -> list[str]:
    """The documents of one split.

    Args:
        name: `muse-news` or `muse-books`.
        data: a folder with MUSE's layout; by default the hub.
        subset: `raw`, or `sust` for the folds of sequential unlearning.
        split: such as `forget`, `retain1`, `forget_2`.
        deduplicate: drop repeated documents; MUSE-News' folds overlap and each holds about 30 twice.

    Raises:
        ValueError: where the split is not there.
    """
    rows = _rows(name, data, f"{subset}/{split}", ("text",))
    if rows is None:
        raise ValueError(f"{data} has no table {subset}/{split}")
    texts = [row["text"] for row in rows]
    return list(dict.fromkeys(texts)) if deduplicate else texts


def _rows(name: str, data: Path | None, table: str, columns: tuple[str, ...]) -> list[Row] | None:
    subset, split = table.split("/")
    return read_table(data, table, columns, hub=(HUB[name], subset, split))


def _questions(rows: list[Row]) -> tuple[Question, ...]:
    return tuple(Question(row["question"], row["answer"]) for row in rows)


def _texts(rows: list[Row]) -> tuple[str, ...]:
    return tuple(row["text"] for row in rows)


def _retained(name: str, data: Path | None) -> list[str]:
    """The retain documents; a stand-in where the folder has that alone, nothing where it has neither."""
    for split in ("retain1", "retain_standin"):
        if data is None or find_table(data, f"raw/{split}"):
            return muse_documents(name, data, split=split, deduplicate=True)
    return []


def _named(name: str) -> NamedBenchmark:
    return NamedBenchmark(
        load=lambda data: load_muse(name, data),
        documents=lambda data: muse_documents(name, data, deduplicate=True),
        retain=lambda data: _retained(name, data),
    )


BENCHMARKS = {name: _named(name) for name in HUB}
