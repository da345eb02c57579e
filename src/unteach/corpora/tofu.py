"""TOFU (Maini et al., 2024), from the Hugging Face hub or from a folder of tables."""

from pathlib import Path

from unteach.corpora.benchmark import Benchmark, MeasuringSettings, NamedBenchmark, Question, Tofu, TofuQuestion
from unteach.data.records import Row, read_table

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


def tofu_documents(split: str, data: Path | None = None) -> list[str]:
    """A question and its answer as one document, for each pair of a split; arguments as for `tofu_pairs`."""
    prompt = MeasuringSettings().tofu_prompt
    return [f"{prompt.format(question=pair.question)} {pair.answer}" for pair in tofu_pairs(split, data)]


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
    rows = read_table(data, table, columns, hub=(HUB, table, "train"))
    if rows is None:
        raise ValueError(f"{data} has no table `{table}`")
    return rows


def _named(split: str) -> NamedBenchmark:
    return NamedBenchmark(
        load=lambda data: load_tofu(split, data),
        documents=lambda data: tofu_documents(split, data),
        retain=lambda data: tofu_documents(SPLITS[split], data),
        questions=lambda data: tofu_pairs(split, data),
        probe_tokens=(24, 40),  # a question and its answer are short: the question is the prompt
        ends_documents=True,
    )


BENCHMARKS = {"tofu": _named("forget10")} | {f"tofu-{split}": _named(split) for split in SPLITS}
