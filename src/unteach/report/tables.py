"""From runs to rows: which results belong together, and their means, spreads and intervals.

A *method* is one name run with one set of settings, over any number of seeds. A *section* holds the methods
measured on one benchmark with one set of data (equal data hashes), as the halves of the paper's Table 1;
rows of different sections are never compared.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from unteach.evaluation.formulas import Metric
from unteach.evaluation.metrics import METRICS, RAW_AUC, MetricInfo, columns, describe
from unteach.evaluation.scores import Scores
from unteach.evaluation.verdict import Finding, judge, stop_scores
from unteach.report.load import ReportInputs, Run
from unteach.writing import format_number, in_words

Role = Literal["target", "retrained", "method"]
RUN_SPECIFIC = frozenset({"seed", "seeds", "name", "out", "resume", "json"})
"""Settings that may differ between seeds of one method."""


@dataclass(frozen=True)
class TableCell:
    """One metric of one method.

    `mean` and `std` (sample standard deviation, None for one seed) are over seeds; `low` and `high` are the
    95 % bootstrap bounds over test items, averaged over seeds.
    """

    mean: float | None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    best: bool = False


@dataclass(frozen=True)
class Member:
    """One seed of a method: its final result, the result before training, and its run folder if any."""

    seed: int | None
    result: Scores | None
    before: Scores | None = None
    run: Run | None = None

    @property
    def data(self) -> tuple[str, str] | None:
        """Name and hash of the benchmark it was measured on, if it was measured at all."""
        measured = self.result if self.result is not None else self.before
        return None if measured is None else (measured.benchmark, measured.data_sha256)


@dataclass(frozen=True)
class MethodRow:
    """A row of the table. `index` numbers the methods of the whole report: it picks colour and marker."""

    label: str
    role: Role
    members: tuple[Member, ...]
    index: int = 0

    @property
    def words(self) -> str:
        """What the name of a method stands for; empty where it is not made of optimizer, loss and divergence."""
        return in_words(self.label.split(" ")[0].split("-"))

    @property
    def runs(self) -> list[Run]:
        """The run folders behind the row."""
        return [member.run for member in self.members if member.run is not None]

    @property
    def data(self) -> tuple[str, str] | None:
        """Name and hash of the benchmark of its first measured seed."""
        return next((member.data for member in self.members if member.data is not None), None)

    def cell(self, metric: str, *, before: bool = False) -> TableCell:
        """Mean, spread and interval of `metric` over the seeds that measured it, of the model kept or before."""
        results = [member.before if before else member.result for member in self.members]
        return aggregate([result.metrics[metric] for result in results if result is not None and metric in result])

    def metrics(self, *, before: bool = False) -> dict[str, Metric]:
        """Every metric that was measured, its mean and interval over the seeds."""
        results = [member.before if before else member.result for member in self.members]
        cells = {name: self.cell(name, before=before) for result in results for name in result or ()}
        return {name: Metric(c.mean or 0.0, c.low, c.high, 0, None, "") for name, c in cells.items()}

    def steps(self) -> TableCell:
        """Steps the kept models were trained for."""
        steps = [run.last_step for run in self.runs if run.last_step is not None]
        return aggregate([Metric(float(step), None, None, 0, None, "steps") for step in steps])


@dataclass(frozen=True)
class Section:
    """Methods measured on the same data. `columns` are shown in the main table, `extra` in the full one."""

    title: str
    benchmark: str
    data_sha256: str
    counts: Mapping[str, int]
    methods: tuple[MethodRow, ...]
    columns: tuple[str, ...]
    extra: tuple[str, ...]
    privleak_missing: bool

    def first(self, role: Role) -> MethodRow | None:
        """The first row with that role, if any."""
        return next((method for method in self.methods if method.role == role), None)

    @property
    def trained(self) -> list[MethodRow]:
        """The rows that are methods, not references."""
        return [method for method in self.methods if method.role == "method"]

    def cells(self, metric: str) -> dict[str, TableCell]:
        """Label → cell of one column, the best mean among methods marked where the paper sets it bold."""
        cells = {method.label: method.cell(metric) for method in self.methods}
        ranked = [m.label for m in self.trained if cells[m.label].mean is not None]
        info = self.info(metric)
        if info.ranked and len(ranked) > 1:

            def cost(label: str) -> float:
                mean = cells[label].mean or 0.0
                return {"↑": -mean, "↓": mean}.get(info.arrow, abs(mean))

            best = min(map(cost, ranked))
            cells |= {label: replace(cells[label], best=True) for label in ranked if cost(label) == best}
        return cells

    @property
    def findings(self) -> dict[str, tuple[Finding, ...]]:
        """Label → the verdict on a method, for each that was measured."""
        retrained, target = self.first("retrained"), self.first("target")
        reference = retrained.metrics() if retrained else {}
        start = target.metrics() if target else {}
        found = {}
        for row in self.trained:
            if any(member.result is not None for member in row.members):
                base = next((run.base for run in row.runs if run.base), {})
                found[row.label] = judge(row.metrics(), start | row.metrics(before=True), reference, stop_scores(base))
        return found

    def info(self, metric: str) -> MetricInfo:
        """How a metric is printed; one without an entry gets its arrow from what the results say."""
        results = [member.result for method in self.methods for member in method.members if member.result is not None]
        found = next((result.metrics[metric] for result in results if metric in result.metrics), None)
        if metric in METRICS or found is None or found.higher_is_better is None:
            return describe(metric)
        return replace(describe(metric), arrow="↑" if found.higher_is_better else "↓")


def aggregate(metrics: Sequence[Metric]) -> TableCell:
    """Combine the seeds of one metric."""
    if not metrics:
        return TableCell(None)
    values = [metric.value for metric in metrics]
    lows = [metric.low for metric in metrics if metric.low is not None]
    highs = [metric.high for metric in metrics if metric.high is not None]
    whole = len(lows) == len(highs) == len(values)
    return TableCell(
        mean=statistics.fmean(values),
        std=statistics.stdev(values) if len(values) > 1 else None,
        low=statistics.fmean(lows) if whole else None,
        high=statistics.fmean(highs) if whole else None,
        seeds=len(values),
    )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names, lists as texts."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return flat


def method_settings(run: Run) -> dict[str, Any]:
    """The settings of a run that make its method: all but seed, name and output folder."""
    return {key: value for key, value in flatten(run.config).items() if key not in RUN_SPECIFIC}


def settings_table(methods: Sequence[MethodRow]) -> tuple[list[str], list[tuple[str, list[str], bool]]]:
    """Columns (methods with settings) and rows (setting, values, whether they differ), differences first."""
    methods = [method for method in methods if method.runs and method.runs[0].config]
    flat = [flatten(method.runs[0].config) for method in methods]
    for settings in flat:
        for key in ("out", "resume", "json"):  # where and how it was started says nothing about the result
            settings.pop(key, None)
    for method, settings in zip(methods, flat, strict=True):
        seeds = [str(run.seed) for run in method.runs if run.seed is not None]
        if seeds:
            settings["seed"] = ", ".join(seeds)
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = []
    for key in keys:
        values = ["–" if settings.get(key) is None else str(settings[key]) for settings in flat]
        rows.append((key, values, len(set(values)) > 1))
    rows.sort(key=lambda row: not row[2])
    return [method.label for method in methods], rows


def role_of(name: str) -> Role:
    """`target` or `retrained` for names that end so (`micro:target`, `MUSE-news_retrain`), else `method`."""
    last = re.split(r"[:/\\_\-\s]", name.strip().casefold())[-1]
    if last == "target":
        return "target"
    return "retrained" if last in ("retrained", "retrain", "reference") else "method"


def methods_of(inputs: ReportInputs) -> list[MethodRow]:
    """Sort all runs and results into rows, references first, then methods in the order given."""
    references: dict[tuple[Role, str, str], list[Scores]] = {}
    trained: dict[str, list[Member]] = {}

    def add_reference(role: Role, result: Scores) -> None:
        same = references.setdefault((role, result.benchmark, result.data_sha256), [])
        if not any(_same_model(result, other) for other in same):
            same.append(result)

    for run in inputs.runs:
        if run.before is not None:
            add_reference("target", run.before)
        for result in run.references:
            role = role_of(result.name)
            add_reference("retrained" if role == "method" else role, result)
        trained.setdefault(run.name, []).append(Member(run.seed, run.after, run.before, run))
    for result in inputs.results:
        role = role_of(result.name)
        if role == "method":
            trained.setdefault(result.name, []).append(Member(result.seed, result))
        else:
            add_reference(role, result)

    methods = [
        MethodRow(
            role if len(results) == 1 else f"{role} ({result.model or result.name})", role, (Member(None, result),)
        )
        for (role, _, _), results in sorted(references.items(), key=lambda item: item[0][0] != "target")
        for result in results
    ]
    rows = [row for name, members in trained.items() for row in _split(name, members)]
    return _unique(methods + [replace(row, index=index) for index, row in enumerate(rows)])


def _unique(methods: Sequence[MethodRow]) -> list[MethodRow]:
    """No two rows of one label: methods are told apart by their benchmark, and all by a number if that fails."""
    labels = [method.label for method in methods]
    seen: dict[tuple[Any, ...], int] = {}
    unique = []
    for method in methods:
        data = method.data
        label = method.label
        if method.role == "method" and labels.count(label) > 1 and data:
            label = f"{label} · {data[0]}"
        key = (label, None if method.role == "method" else data)
        seen[key] = seen.get(key, 0) + 1
        unique.append(replace(method, label=f"{label} ({seen[key]})" if seen[key] > 1 else label))
    return unique


def _same_model(one: Scores, other: Scores) -> bool:
    if one.model_sha256 and other.model_sha256:
        return one.model_sha256 == other.model_sha256
    return dict(one) == dict(other)


def _split(name: str, members: Sequence[Member]) -> list[MethodRow]:
    """One row per set of settings and data; runs with one seed are no seeds of one method and stay apart."""
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        settings = tuple(sorted((k, str(v)) for k, v in method_settings(member.run).items())) if member.run else ()
        groups.setdefault((settings, member.data, member.run is None), []).append(member)
    rows: list[tuple[str, list[Member]]] = []
    varying = _varying([dict(settings) for settings, _, _ in groups])
    for (settings, data, _), group in groups.items():
        differs = [f"{key} {value}" for key, value in settings if key in varying]
        others = [key for key in groups if key[1] == data]
        detail = ", ".join(differs) if 0 < len(differs) <= 2 else _where(group[0])
        label = name if len(others) == 1 else f"{name} · {detail}"
        seeds = [member.seed for member in group]
        if len(set(seeds)) == len(seeds):
            rows.append((label, group))
        else:
            rows += [(f"{name} · {_where(member)}", [member]) for member in group]
    return [MethodRow(label, "method", tuple(group)) for label, group in rows]


def _where(member: Member) -> str:
    if member.run is not None:
        return member.run.path.resolve().name
    return member.result.model or member.result.name if member.result is not None else ""


def _varying(settings: Sequence[Mapping[str, Any]]) -> set[str]:
    keys = {key for one in settings for key in one}
    return {key for key in keys if len({str(one.get(key)) for one in settings}) > 1}


def sections_of(methods: Sequence[MethodRow]) -> list[Section]:
    """Group rows by benchmark and data; rows without any result belong to no section."""
    groups: dict[tuple[str, str], list[MethodRow]] = {}
    for method in methods:
        data = method.data
        if data is not None:
            groups.setdefault(data, []).append(method)
    names = [name for name, _ in groups]
    sections = []
    for (name, data_hash), rows in groups.items():
        title = name if names.count(name) == 1 else f"{name} · data {data_hash[:8] or 'unknown'}"
        sections.append(_section(title, name, data_hash, rows))
    return sections


def _section(title: str, name: str, data_hash: str, rows: Sequence[MethodRow]) -> Section:
    results = [member.result for row in rows for member in row.members if member.result is not None]
    measured: dict[str, None] = {}
    for result in results:
        measured |= dict.fromkeys(result)
    shown = [key for key in columns("main") if key in measured]
    missing = "privleak" not in measured and RAW_AUC in measured
    if missing:
        shown.insert(min(3, len(shown)), RAW_AUC)
    beside = [key for key in columns("beside") if key in measured]
    if len(shown) < 2:  # another kind of benchmark: its own metrics come first
        shown += [key for key in measured if key not in (*shown, *beside)][:6]
    shown += beside
    counts = {key: metric.count for result in results[:1] for key, metric in result.metrics.items() if metric.count}
    extra = tuple(key for key in measured if key not in shown)
    return Section(title, name, data_hash, counts, tuple(rows), tuple(shown), extra, missing)


def format_cell(cell: TableCell, decimals: int = 1) -> str:
    """`mean` or `mean (std)`."""
    spread = f" ({format_number(cell.std, decimals)})" if cell.std is not None else ""
    return format_number(cell.mean, decimals) + spread


def format_interval(cell: TableCell, decimals: int = 1) -> str:
    """`[low, high]`, or nothing."""
    if cell.low is None or cell.high is None:
        return ""
    return f"[{format_number(cell.low, decimals)}, {format_number(cell.high, decimals)}]"
