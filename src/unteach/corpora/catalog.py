"""Benchmarks by name."""

import dataclasses
from pathlib import Path

from unteach.corpora import Benchmark
from unteach.corpora.rows import check_columns, read_rows

NAMES = ("micro", "muse-news", "muse-books", "tofu-forget01", "tofu-forget05", "tofu-forget10", "mmlu")


def load_benchmark(name: str, data: Path | None = None) -> Benchmark:
    """A benchmark by its name.

    Args:
        name: one of `NAMES`.
        data: its folder; by default the Hugging Face hub, for `micro` the package itself.

    Raises:
        ValueError: for another name, or a folder that does not exist.
    """
    if data is not None and not data.is_dir():
        raise ValueError(f"data is {data}: there is no such folder")
    if name == "micro":
        from unteach.corpora import micro

        return micro.load_benchmark()
    if name.startswith("muse-") and name in NAMES:
        from unteach.corpora.muse import load_muse

        return load_muse(name, data)
    if name.startswith("tofu-") and name in NAMES:
        from unteach.corpora.tofu import load_tofu

        return load_tofu(name.removeprefix("tofu-"), data)
    if name == "mmlu":
        from unteach.corpora.mmlu import load_mmlu

        return Benchmark(name="mmlu", multiple_choice=load_mmlu(data))
    raise ValueError(f"benchmark is {name!r}: allowed are {', '.join(NAMES)}")


def add_general_texts(benchmark: Benchmark, path: Path, count: int = 200) -> Benchmark:
    """The benchmark with general texts from a file, for `nll_general`.

    Args:
        benchmark: any.
        path: a table with the column `text`.
        count: how many texts, the first ones.
    """
    rows = read_rows(path)
    check_columns(rows, ("text",), str(path))
    return dataclasses.replace(benchmark, general_texts=tuple(row["text"] for row in rows[:count]))


def add_multiple_choice(benchmark: Benchmark, data: Path) -> Benchmark:
    """The benchmark with the MMLU questions from a folder, for `mmlu_val`.

    Args:
        benchmark: any.
        data: see `mmlu.load_mmlu`.
    """
    from unteach.corpora.mmlu import load_mmlu

    return dataclasses.replace(benchmark, multiple_choice=load_mmlu(data))
