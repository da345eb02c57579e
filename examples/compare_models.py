"""Compare two models by measuring alone: what each recites, knows and loses, with intervals.

python examples/compare_models.py [MODEL OTHER]
"""

from __future__ import annotations

import sys

import unteach
from unteach.corpora.catalog import load_benchmark
from unteach.models import load_model

SHOWN = ("verbmem_f", "knowmem_f", "knowmem_r", "nll_general")


def main(first: str = "micro:target", second: str = "micro:retrained", items: int | None = None) -> dict[str, tuple]:
    """Measure both on the embedded benchmark, or on its first items; for each metric both values with intervals."""
    benchmark = load_benchmark("micro")
    if items:
        benchmark = benchmark.first(items)
    measured = [unteach.evaluate(*load_model(name), benchmark).metrics for name in (first, second)]
    return {name: tuple(scores[name] for scores in measured) for name in SHOWN}


if __name__ == "__main__":
    names = sys.argv[1:] or ["micro:target", "micro:retrained"]
    print(f"{'':12}" + "".join(f"{name:>28}" for name in names))
    for metric, values in main(*names).items():
        cells = (f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]" for value in values)
        print(f"{metric:12}" + "".join(f"{cell:>28}" for cell in cells))
