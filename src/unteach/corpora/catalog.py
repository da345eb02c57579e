"""Benchmarks by name."""

import dataclasses
from pathlib import Path

from unteach.corpora import Benchmark

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


def add_multiple_choice(benchmark: Benchmark, data: Path) -> Benchmark:
    """The benchmark with the MMLU questions from a folder, for `mmlu_val`.

    Args:
        benchmark: any.
        data: see `mmlu.load_mmlu`.
    """
    from unteach.corpora.mmlu import load_mmlu

    return dataclasses.replace(benchmark, multiple_choice=load_mmlu(data))
