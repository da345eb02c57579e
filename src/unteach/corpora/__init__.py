"""What is measured on: benchmarks as plain data (`benchmark`), found by their names (`catalog`)."""

from unteach.corpora.benchmark import (
    Benchmark,
    ChoiceQuestion,
    MeasuringSettings,
    NamedBenchmark,
    Probe,
    Question,
    Tofu,
    TofuQuestion,
)  # fmt: skip

__all__ = [
    "Benchmark", "ChoiceQuestion", "MeasuringSettings", "NamedBenchmark", "Probe", "Question", "Tofu", "TofuQuestion",
]  # fmt: skip
