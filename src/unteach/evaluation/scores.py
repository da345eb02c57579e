"""Everything a benchmark can measure on one model, in one call, and its result: typed, versioned, and readable as a
plain mapping from metric to value. What there is to measure stands in `metrics`."""

import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unteach.evaluation.formulas import Metric
from unteach.evaluation.metrics import MEASUREMENTS, Evaluation, describe
from unteach.writing import write_whole

if TYPE_CHECKING:
    from unteach.corpora import Benchmark

SCHEMA = "unteach.scores/1"
AUDIT_SCHEMA = "unteach.audit/1"
"""Of a file that `unteach audit` writes."""
LEDGER_SCHEMA = "unteach.ledger/1"
"""Of the file in which a run keeps the requests before it."""
_AS_THEY_ARE = ("name", "model", "step", "seed", "settings", "versions", "model_sha256", "created", "seconds")
"""Fields that stand in a scores file under their own names."""


@dataclass(frozen=True, eq=False)
class Scores(Mapping[str, float]):
    """What was measured on one model.

    `scores["verbmem_f"]` is the value; `scores.metrics["verbmem_f"]` has its interval and count,
    `scores.items_of("verbmem_f")` what it was computed from; `scores.to_dict()` is what a scores file holds.
    """

    benchmark: str
    metrics: dict[str, Metric]
    records: dict[str, list[dict[str, Any]]]
    """Per-item records by metric; those of all membership metrics are under `membership`."""
    notes: tuple[str, ...] = ()
    """What a reader must know: what was not measured and why, what was cut, what is saturated."""
    settings: dict[str, Any] = field(default_factory=dict)
    data_sha256: str = ""
    name: str = ""
    model: str = ""
    model_sha256: str | None = None
    step: int | None = None
    seed: int | None = 0
    seconds: float = 0.0
    created: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> float:
        if metric not in self.metrics:
            raise KeyError(f"{metric!r} was not measured; measured: {', '.join(self.metrics) or 'nothing'}")
        return self.metrics[metric].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def items_of(self, metric: str) -> list[dict[str, Any]]:
        """The per-item records a metric was computed from."""
        if metric == "degenerate":
            return [record for group in self.records.values() for record in group if "degenerate" in record]
        group = describe(metric).records or metric
        if group not in self.records:
            raise KeyError(f"{metric!r} has no records; there are: {', '.join(self.records) or 'none'}")
        return self.records[group]

    def replace(self, **changes: Any) -> "Scores":
        """A copy with some fields changed, such as `name`, `model`, `step` or `seed`."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The result as one JSON-ready object, schema `unteach.scores/1`."""
        return {
            "schema": SCHEMA,
            "benchmark": {
                "name": self.benchmark,
                "counts": {name: metric.count for name, metric in self.metrics.items()},
                "data_sha256": self.data_sha256,
            },
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "metrics": {name: metric.to_dict() for name, metric in self.metrics.items()},
            "notes": list(self.notes),
            "items": self.records,
        }

    def write(self, path: Path) -> None:
        """Write the result to a JSON file, all or nothing."""
        write_json(path, self.to_dict())

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Scores":
        """Read what `to_dict` made."""
        if content.get("schema") != SCHEMA:
            raise ValueError(f"schema is {content.get('schema')!r}: only {SCHEMA!r} can be read")
        return cls(
            benchmark=content["benchmark"]["name"],
            metrics={name: Metric(**values) for name, values in content["metrics"].items()},
            records=dict(content["items"]),
            notes=tuple(content["notes"]),
            data_sha256=content["benchmark"]["data_sha256"],
            **{name: content[name] for name in _AS_THEY_ARE},
        )


def evaluate(
    model: Any,
    tokenizer: Any,
    benchmark: "Benchmark",
    *,
    reference_scores: Scores | Mapping[str, Any] | float | None = None,
    measurements: Collection[str] | None = None,
    batch_size: int = 128,
    seed: int = 0,
    progress: bool | None = None,
    name: str = "",
    model_name: str = "",
    step: int | None = None,
) -> Scores:
    """Measure a model.

    Leaves the model and the random state of torch as they were: safe to call between training steps.

    Args:
        model: a Hugging Face causal language model, on any device, in any precision.
        reference_scores: for PrivLeak and TOFU's forget quality: the scores of a model retrained without the
            forget set, measured on the same benchmark; or its `auc_forget_holdout_min_40` as a number.
        measurements: names out of `MEASUREMENTS`, by default all that the benchmark has data for.
        batch_size: most prompts decoded together.
        seed: of the bootstrap; kept in the result, as are `name`, `model_name` and `step`.
        progress: whether to show progress bars on stderr; by default where that is a terminal.
    """
    from unteach.evaluation.inference import Batching

    if isinstance(measurements, str) or set(measurements or ()) - set(MEASUREMENTS):
        raise ValueError(f"measurements is {measurements!r}: allowed are {', '.join(MEASUREMENTS)}")
    reference = reference_scores
    if isinstance(reference, int | float):
        reference = float(reference)
    elif reference is not None and not isinstance(reference, Scores):
        reference = Scores.from_dict(reference)
    started, absent = time.perf_counter(), []
    with progress_bars(progress) as bar:
        evaluation = Evaluation(model, tokenizer, benchmark, reference, Batching(batch_size), seed, start_bar=bar)
        for wanted, entry in MEASUREMENTS.items():
            if wanted not in measurements if measurements is not None else not entry.by_default:
                continue
            if all(getattr(benchmark, part) for part in entry.needs):
                entry.measure(evaluation, wanted)
            elif entry.absent:
                absent.append(f"{wanted} is not measured: the benchmark has no {entry.absent}")
    found = Scores(benchmark.name, evaluation.metrics, evaluation.records)
    if generated := found.items_of("degenerate"):
        evaluation.add_mean("degenerate", [float(record["degenerate"]) for record in generated])
    if model.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # decoding took much more than training will: others may share the GPU
    settings = dataclasses.asdict(benchmark.settings)
    return found.replace(
        notes=(*benchmark.notes, *evaluation.notes, *absent),
        settings={key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        data_sha256=benchmark.data_sha256,
        name=name,
        model=model_name,
        step=step,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=library_versions(),
    )


@contextmanager
def progress_bars(show: bool | None) -> Iterator[Callable[[str, int], Callable[[int], object]]]:
    """Inside the block, a function that begins a bar on stderr, given a label and the number of items."""
    from rich.console import Console
    from rich.progress import Progress

    hidden = not (sys.stderr.isatty() if show is None else show)
    with Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress:

        def start(label: str, total: int) -> Callable[[int], object]:
            task = progress.add_task(label, total=total)
            return lambda count: progress.advance(task, count)

        yield start


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as JSON, all or nothing; NaN is refused."""
    write_whole(path, as_json(content))


def as_json(content: Mapping[str, Any]) -> str:
    """An object as JSON text for a file; NaN is refused."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def library_versions() -> dict[str, str]:
    """Versions of what a score depends on."""
    import torch
    import transformers

    import unteach

    return {
        "unteach": unteach.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
