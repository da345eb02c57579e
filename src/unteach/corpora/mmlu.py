"""The MMLU validation questions (Hendrycks et al., 2021)."""

from collections import defaultdict
from pathlib import Path

from unteach.corpora.benchmark import Benchmark, ChoiceQuestion, NamedBenchmark
from unteach.data.records import Row, read_table

HUB = "cais/mmlu"
SHOTS = 5
_COLUMNS = ("question", "choices", "answer")
_LETTERS = "ABCDEFGHIJ"


def load_mmlu(data: Path | None = None) -> tuple[ChoiceQuestion, ...]:
    """The 1,531 validation questions with five worked examples before each.

    Args:
        data: a folder with the table `validation` (question, choices, answer, subject) and either
            `prompt.txt`, the worked examples as text, or a table `dev`. By default the hub.

    Returns:
        The questions. The worked examples are those of `prompt.txt`, the same for all questions; without it
        the first five of the `dev` split of the question's own subject, as is usual for MMLU. The two differ
        by a few points, so scores are comparable only within one.

    Raises:
        ValueError: where the folder lacks a table.
    """
    rows = _rows(data, "validation")
    if rows is None:
        raise ValueError(f"{data} has no table `validation` with {', '.join(_COLUMNS)}")
    if data is not None and (data / "prompt.txt").is_file():
        return _build(rows, {}, (data / "prompt.txt").read_text(encoding="utf-8").strip() + "\n\n")
    development = _rows(data, "dev")
    if development is None:
        raise ValueError(f"{data} has neither prompt.txt nor a table `dev`: worked examples are needed")
    return _build(rows, _examples_by_subject(development), "")


def _rows(data: Path | None, split: str) -> list[Row] | None:
    return read_table(data, split, _COLUMNS, hub=(HUB, "all", split))


def write_question(row: Row) -> str:
    """A question with its lettered choices, up to `Correct answer:`.

    Args:
        row: `question` and `choices`.
    """
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(_LETTERS, row["choices"], strict=False))
    return f"Question: {row['question']}\n\nChoices:\n{choices}\n\nCorrect answer:"


def _examples_by_subject(rows: list[Row]) -> dict[str, str]:
    written: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        written[row.get("subject", "")].append(f"{write_question(row)} {_LETTERS[row['answer']]}\n\n")
    return {subject: "".join(group[:SHOTS]) for subject, group in written.items()}


def _build(rows: list[Row], examples: dict[str, str], fixed: str) -> tuple[ChoiceQuestion, ...]:
    return tuple(
        ChoiceQuestion(
            prompt=(fixed or examples.get(row.get("subject", ""), "")) + write_question(row),
            answer=int(row["answer"]),
            choices=len(row["choices"]),
            subject="" if fixed else row.get("subject", ""),
            question=row["question"],
        )
        for row in rows
    )


BENCHMARKS = {"mmlu": NamedBenchmark(load=lambda data: Benchmark(name="mmlu", multiple_choice=load_mmlu(data)))}
