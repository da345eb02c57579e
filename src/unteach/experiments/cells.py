"""Cells of an experiment: one method with one seed is one small JSON file, so that a run can stop anywhere and go on.

A cell's file holds the *key* of what it was measured with: a hash of all settings, of the models' weights and of the
texts, never of paths, so that a cell made on one machine is known on another. A cell with another key counts as missing
and is measured again. The file also holds a hash of the code that trains and measures; a cell of older code is kept
and marked, and ``--fresh`` measures it again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from unteach.evaluation.metrics import METRICS, describe
from unteach.writing import format_number, markdown_table

__all__ = ["Book", "Cell", "State", "by_name", "code_version", "mean_and_std", "result_table", "thinned", "what_runs"]

SCHEMA = "unteach.cell/1"
State = Literal["done", "older code", "other settings", "missing"]
CURVE = ("nll_forget", "forget_loss", "grad_norm", "divergence")
CURVE_POINTS = 60
"""Steps of a training curve that a cell keeps, at most."""
_CODE = ("method", "training", "data", "models", "evaluation", "job")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method with one seed."""

    name: str
    """Of the file, and of the row in the table."""
    seed: int
    settings: Mapping[str, Any]
    """All that the result depends on, as plain JSON values; no paths."""
    run: Callable[[], dict[str, Any]]
    """Measures the cell: what its file holds besides name, seed, key and versions."""
    needs: Sequence[Cell] = ()
    """Cells whose contents ``run`` reads; it measures them where they are missing."""

    @property
    def key(self) -> str:
        """Hash of schema, name, seed and settings."""
        content = {"schema": SCHEMA, "name": self.name, "seed": self.seed, "settings": self.settings}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class Book:
    """A folder of cells.

    Args:
        folder: Where the files are.
        say: Gets the lines for people.
        fresh: Measure cells of older code again.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], *, fresh: bool = False) -> None:
        self.folder, self.say, self.fresh = folder, say, fresh

    def path(self, cell: Cell) -> Path:
        """A cell's file."""
        return self.folder / f"{cell.name}-seed-{cell.seed}.json"

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """What a cell's file holds, whatever it was measured with; None where there is none that can be read."""
        try:
            return json.loads(self.path(cell).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def state(self, cell: Cell) -> State:
        """Whether a cell is done."""
        content = self.read(cell)
        if content is None:
            return "missing"
        if content.get("key") != cell.key:
            return "other settings"
        return "done" if content["code"] == code_version() else "older code"

    def is_usable(self, cell: Cell) -> bool:
        """Whether a cell need not be measured."""
        return self.state(cell) in (("done",) if self.fresh else ("done", "older code"))

    def get(self, cell: Cell) -> dict[str, Any]:
        """A cell's content: read if it is usable, else measured and written."""
        content = self.read(cell) if self.is_usable(cell) else None
        return content if content is not None else self._measure(cell)

    def _measure(self, cell: Cell) -> dict[str, Any]:
        from unteach.evaluation.scores import library_versions, write_json

        self.say(f"measuring {cell.name}, seed {cell.seed}")
        started = time.perf_counter()
        found = cell.run()
        content = {
            "schema": SCHEMA,
            "name": cell.name,
            "seed": cell.seed,
            "key": cell.key,
            "code": code_version(),
            "settings": dict(cell.settings),
            **_finite(found),
            "seconds": round(time.perf_counter() - started, 1),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": library_versions(),
            "hardware": _hardware(),
        }
        write_json(self.path(cell), content)
        return content

    def complete(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Measure what is missing, with the table of states before, and after every cell; all contents, in order."""
        self.say(self.states(cells))
        for cell in cells:
            if not self.is_usable(cell):
                self.get(cell)
                self.say(self.states(cells))
        return [self.get(cell) for cell in cells]

    def finished(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """The contents of those cells that are done, measuring nothing."""
        return [self.get(cell) for cell in cells if self.is_usable(cell)]

    def states(self, cells: Sequence[Cell]) -> str:
        """The table of what is done and what is missing: a row per name, a column per seed."""
        names, seeds = list(dict.fromkeys(c.name for c in cells)), sorted({c.seed for c in cells})
        of = {(cell.name, cell.seed): self.state(cell) for cell in cells}
        rows = [[name, *(of.get((name, seed), "–") for seed in seeds)] for name in names]
        missing = sum(not self.is_usable(cell) for cell in cells)
        table = markdown_table(["cell", *(f"seed {seed}" for seed in seeds)], rows)
        return f"{table}\n{len(cells) - missing} done, {missing} missing in {self.folder}"


@functools.cache
def code_version() -> str:
    """Hash of the code that trains and measures, without comments, docstrings and layout."""
    import unteach

    root = Path(unteach.__file__).parent
    files = [file for name in _CODE for file in sorted((root / name).glob("*.py"))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + what_runs(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def what_runs(source: str) -> str:
    """The code of a module without comments, docstrings and layout, written alike by every Python version."""

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(item) for item in node if not _documents(item)]
        if isinstance(node, ast.AST):  # newer versions have more fields, empty ones, and print them or not
            fields = ((name, plain(value)) for name, value in ast.iter_fields(node))
            return [type(node).__name__, *((name, value) for name, value in fields if value not in (None, []))]
        return node

    return repr(plain(ast.parse(source)))


def _documents(node: Any) -> bool:
    """Strings that stand alone document what is above them."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def thinned(rows: Sequence[Mapping[str, Any]], points: int = CURVE_POINTS) -> dict[str, list[Any]]:
    """The training curve of a run: a list per metric, of evenly spaced steps, the first and the last among them.

    Args:
        rows: The lines of ``metrics.jsonl``.
        points: Steps to keep, at most.
    """
    last = len(rows) - 1
    count = min(points, len(rows))
    kept = [rows[round(place * last / max(1, count - 1))] for place in range(count)]
    curve: dict[str, list[Any]] = {"step": [row["step"] for row in kept], "phase": [row["phase"] for row in kept]}
    return curve | {name: [_rounded(row[name]) for row in kept] for name in CURVE}


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hardware() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "cpu": platform.machine(), "threads": torch.get_num_threads()}


def by_name(contents: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Contents of cells grouped by name, in their order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for content in contents:
        groups.setdefault(content["name"], []).append(content)
    return groups


def mean_and_std(values: Sequence[float | None], decimals: int = 1) -> str:
    """``mean (std)`` over seeds, as in the paper's tables; the mean alone for one seed, a dash for none."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    text = format_number(statistics.fmean(known), decimals)
    return text if len(known) < 2 else f"{text} ({statistics.stdev(known):.{decimals}f})"


def result_table(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], metrics: Sequence[str], extra: Mapping[str, Sequence[str]] = {}
) -> str:
    """A Markdown table: a row per name, mean (std) over seeds of each metric that any row has.

    Args:
        rows: For each name, the metrics of its seeds: ``{"verbmem_f": {"value": ...}, ...}``.
        metrics: Columns in their order.
        extra: Further columns: title → a text per row.
    """
    shown = [m for m in metrics if any(m in values for group in rows.values() for values in group)]
    titles = [f"{m} {METRICS[m].arrow}".strip() if m in METRICS else m for m in shown]
    lines = []
    for place, (name, group) in enumerate(rows.items()):
        found = {m: [values[m]["value"] if m in values else None for values in group] for m in shown}
        texts = [mean_and_std(values, describe(m).decimals) for m, values in found.items()]
        lines.append([name, *texts, *(column[place] for column in extra.values())])
    return markdown_table(["", *titles, *extra], lines)
