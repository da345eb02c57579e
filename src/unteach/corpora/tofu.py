"""TOFU (Maini et al., 2024), from the Hugging Face hub or from a folder of tables."""

from pathlib import Path

from unteach.corpora import Benchmark, Question, Tofu, TofuQuestion
from unteach.corpora.rows import Row, read_hub_table, read_table

HUB = "locuslab/TOFU"
SPLITS = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}
"""Forget splits and the retain split that completes each."""
_PERTURBED = ("question", "answer", "perturbed_answer")


def load_tofu(split: str = "forget10", data: Path | None = None) -> Benchmark:
    """The four question sets with their reworded and wrong answers.

    Args:
        split: `forget01`, `forget05` or `forget10`.
        data: a folder with the tables `<split>_perturbed`, `retain_perturbed`, `real_authors_perturbed` and
            `world_facts_perturbed`; by default the hub.

    Raises:
        ValueError: for another split, or a missing table.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}: allowed are {', '.join(SPLITS)}")
    return Benchmark(
        name=f"tofu-{split}",
        tofu=Tofu(
            forget=_perturbed(f"{split}_perturbed", data),
            retain=_perturbed("retain_perturbed", data),
            real_authors=_perturbed("real_authors_perturbed", data),
            world_facts=_perturbed("world_facts_perturbed", data),
        ),
    )


def tofu_pairs(split: str, data: Path | None = None) -> tuple[Question, ...]:
    """Question–answer pairs of a split, as used for training.

    Args:
        split: such as `full`, `forget10` or `retain90`.
        data: a folder with the table; by default the hub.
    """
    return tuple(Question(row["question"], row["answer"]) for row in _rows(split, data, ("question", "answer")))


def _perturbed(table: str, data: Path | None) -> tuple[TofuQuestion, ...]:
    return tuple(
        TofuQuestion(
            question=row["question"],
            answer=row["answer"],
            paraphrased_answer=row.get("paraphrased_answer") or row["answer"],
            perturbed_answers=tuple(row["perturbed_answer"]),
        )
        for row in _rows(table, data, _PERTURBED)
    )


def _rows(table: str, data: Path | None, columns: tuple[str, ...]) -> list[Row]:
    if data is None:
        return read_hub_table(HUB, table, "train", columns)
    rows = read_table(data, table, columns)
    if rows is None:
        raise ValueError(f"{data} has no table `{table}`")
    return rows
