"""Benchmarks by name. To add one: a module with `BENCHMARKS`, a name → `NamedBenchmark`, and its line here."""

import dataclasses
from pathlib import Path

from unteach.corpora import micro, mmlu, muse, tofu
from unteach.corpora.benchmark import Benchmark, NamedBenchmark

__all__ = ["CATALOG", "NAMES", "UNLEARNED", "add_multiple_choice", "load_benchmark", "named_benchmark"]

CATALOG: dict[str, NamedBenchmark] = micro.BENCHMARKS | muse.BENCHMARKS | tofu.BENCHMARKS | mmlu.BENCHMARKS
NAMES = tuple(CATALOG)
UNLEARNED = tuple(name for name, entry in CATALOG.items() if entry.documents is not None)
"""Those with documents to forget, which experiments can run on."""


def named_benchmark(name: str) -> NamedBenchmark:
    """An entry of the catalog.

    Raises:
        ValueError: For a name that is not in it.
    """
    if name not in CATALOG:
        raise ValueError(f"benchmark is {name!r}: allowed are {', '.join(NAMES)}")
    return CATALOG[name]


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
    return named_benchmark(name).load(data)


def add_multiple_choice(benchmark: Benchmark, data: Path) -> Benchmark:
    """The benchmark with the MMLU questions from a folder, for `mmlu_val`.

    Args:
        benchmark: any.
        data: see `mmlu.load_mmlu`.
    """
    return dataclasses.replace(benchmark, multiple_choice=mmlu.load_mmlu(data))
