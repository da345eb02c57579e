"""The result of an evaluation: typed, versioned, and readable as a plain mapping from metric to value."""

import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unteach.evaluation.metrics import describe
from unteach.evaluation.statistics import Metric
from unteach.writing import write_whole

SCHEMA = "unteach.scores/1"


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
            "name": self.name,
            "model": self.model,
            "step": self.step,
            "seed": self.seed,
            "benchmark": {
                "name": self.benchmark,
                "counts": {name: metric.count for name, metric in self.metrics.items()},
                "data_sha256": self.data_sha256,
            },
            "metrics": {name: metric.to_dict() for name, metric in self.metrics.items()},
            "notes": list(self.notes),
            "items": self.records,
            "settings": self.settings,
            "versions": self.versions,
            "model_sha256": self.model_sha256,
            "created": self.created,
            "seconds": self.seconds,
        }

    def write(self, path: Path) -> None:
        """Write the result to a JSON file, all or nothing."""
        write_json(path, self.to_dict())

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Scores":
        """Read what `to_dict` made."""
        if content.get("schema") != SCHEMA:
            raise ValueError(f"schema is {content.get('schema')!r}: only {SCHEMA!r} can be read")
        plain = ("name", "model", "model_sha256", "step", "seed", "seconds", "created")
        return cls(
            benchmark=content["benchmark"]["name"],
            metrics={name: Metric(**values) for name, values in content["metrics"].items()},
            records=dict(content["items"]),
            notes=tuple(content["notes"]),
            settings=dict(content["settings"]),
            data_sha256=content["benchmark"]["data_sha256"],
            versions=dict(content["versions"]),
            **{name: content[name] for name in plain},
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as JSON, all or nothing; NaN is refused."""
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


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
