"""From runs to rows: which results belong together, and their means, spreads and intervals.

A *method* is one name run with one set of settings, over any number of seeds. A *section* holds the methods
measured on one benchmark with one set of data (equal data hashes), as the halves of the paper's Table 1;
rows of different sections are never compared.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from unteach.evaluation.formulas import Metric
from unteach.evaluation.metrics import LOSS_AUC, METRICS, RAW_AUC, MetricInfo, columns, describe
from unteach.evaluation.scores import Scores
from unteach.evaluation.verdict import Finding, judge, stop_scores
from unteach.report.load import ReportInputs, Run
from unteach.writing import format_number, in_words

Role = Literal["target", "retrained", "method"]
HOW_STARTED = frozenset({"out", "resume", "json"})
"""Settings that say nothing about the result."""
QUESTIONS = {
    "Recited?": ("verbmem_f", "verbmem_holdout", "nll_forget"),
    "Known?": ("knowmem_f",),
    "Detectable?": ("privleak", RAW_AUC, LOSS_AUC),
    "Rest kept?": ("nll_general", "nll_retain", "verbmem_r", "knowmem_r", "mmlu_val", "mmlu_invalid", "degenerate"),
}
"""Which metrics answer which question."""
RUN_SPECIFIC = HOW_STARTED | {"seed", "seeds", "name"}
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
    best: bool = False

    def text(self, decimals: int = 1) -> str:
        """`mean` or `mean (std)`."""
        spread = f" ({format_number(self.std, decimals)})" if self.std is not None else ""
        return format_number(self.mean, decimals) + spread

    def interval(self, decimals: int = 1) -> str:
        """`[low, high]`, or nothing."""
        bounds = [format_number(bound, decimals) for bound in (self.low, self.high) if bound is not None]
        return f"[{bounds[0]}, {bounds[1]}]" if len(bounds) == 2 else ""


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
        measured = self.before if self.result is None else self.result
        return None if measured is None else (measured.benchmark, measured.data_sha256)


@dataclass(frozen=True)
class MethodRow:
    """A row of the table. `index` numbers the methods of the whole report: it picks colour and marker."""

    label: str
    role: Role
    members: tuple[Member, ...]
    index: int = 0

    @property
    def title(self) -> str:
        """The label in words: a name made of optimizer, loss and divergence becomes what it stands for."""
        name, space, rest = self.label.partition(" ")
        if self.role == "target":
            return f"before{space}{rest}"
        return (in_words(name.split("-")) or name) + space + rest

    @property
    def runs(self) -> list[Run]:
        """The run folders behind the row."""
        return [member.run for member in self.members if member.run is not None]

    @property
    def seeds(self) -> list[MethodRow]:
        """Each seed as a row of its own."""
        return [replace(self, members=(member,)) for member in self.members]

    @property
    def results(self) -> list[Scores]:
        """The scores of the models kept."""
        return [member.result for member in self.members if member.result is not None]

    @property
    def data(self) -> tuple[str, str] | None:
        """Name and hash of the benchmark of its first measured seed."""
        return next((member.data for member in self.members if member.data is not None), None)

    def cell(self, metric: str) -> TableCell:
        """Mean, spread and interval of `metric` over the seeds that measured it."""
        return aggregate([result.metrics[metric] for result in self.results if metric in result])

    def steps(self) -> TableCell:
        """Steps the kept models were trained for."""
        steps = [float(run.last_step) for run in self.runs if run.last_step is not None]
        return aggregate([Metric(step, None, None, 0, None, "steps") for step in steps])


@dataclass(frozen=True)
class Section:
    """Methods measured on the same data. `columns` are shown in the main table, `extra` in the full one."""

    title: str
    benchmark: str
    data_sha256: str
    methods: tuple[MethodRow, ...]
    columns: tuple[str, ...]
    extra: tuple[str, ...]
    privleak_missing: bool

    @property
    def counts(self) -> dict[str, int]:
        """Test items of each metric, of the first result."""
        first = next((result for method in self.methods for result in method.results), None)
        return {key: metric.count for key, metric in first.metrics.items() if metric.count} if first else {}

    @property
    def groups(self) -> list[tuple[str, list[str]]]:
        """What the main table of the page shows: the metrics of the four questions, then those without one."""
        measured = (*self.columns, *self.extra)
        groups = [(question, [key for key in keys if key in measured]) for question, keys in QUESTIONS.items()]
        answering = {key for _, keys in groups for key in keys}
        groups.append(("Benchmark", [key for key in self.columns if key not in answering]))
        return [(question, keys) for question, keys in groups if keys]

    @property
    def others(self) -> list[str]:
        """Every other metric that was measured."""
        shown = {key for _, keys in self.groups for key in keys}
        return [key for key in self.extra if key not in shown]

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
        info, sign = self.info(metric), {"↑": -1.0, "↓": 1.0}
        costs = {
            method.label: sign[info.arrow] * mean if info.arrow in sign else abs(mean)
            for method in self.trained
            if (mean := cells[method.label].mean) is not None
        }
        if info.ranked and len(costs) > 1:
            best = [label for label, cost in costs.items() if cost == min(costs.values())]
            cells |= {label: replace(cells[label], best=True) for label in best}
        return cells

    @cached_property
    def findings(self) -> dict[str, tuple[Finding, ...]]:
        """Label → the verdict on a method, for each that was measured."""
        retrained, target = self.first("retrained"), self.first("target")
        reference = _means(retrained.results) if retrained else {}
        start = _means(target.results) if target else {}
        found = {}
        for row in self.trained:
            if row.results:
                base = next((run.base for run in row.runs if run.base), {})
                before = _means([member.before for member in row.members if member.before is not None])
                found[row.label] = judge(_means(row.results), start | before, reference, stop_scores(base))
        return found

    def info(self, metric: str) -> MetricInfo:
        """How a metric is printed; one without an entry gets its arrow from what the results say."""
        results = [result for method in self.methods for result in method.results]
        better = next((r.metrics[metric].higher_is_better for r in results if metric in r), None)
        if metric in METRICS or better is None:
            return describe(metric)
        return replace(describe(metric), arrow="↑" if better else "↓")


def aggregate(metrics: Sequence[Metric]) -> TableCell:
    """Combine the seeds of one metric."""
    if not metrics:
        return TableCell(None)
    values = [metric.value for metric in metrics]
    lows = [metric.low for metric in metrics if metric.low is not None]
    highs = [metric.high for metric in metrics if metric.high is not None]
    whole = len(lows) == len(highs) == len(values)
    bounds = (statistics.fmean(lows), statistics.fmean(highs)) if whole else (None, None)
    return TableCell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, *bounds)


def _means(results: Sequence[Scores]) -> dict[str, Metric]:
    """Every metric that was measured, its mean and interval over the seeds."""
    names = dict.fromkeys(name for result in results for name in result)
    cells = {name: aggregate([result.metrics[name] for result in results if name in result]) for name in names}
    return {name: Metric(cell.mean or 0.0, cell.low, cell.high, 0, None, "") for name, cell in cells.items()}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names, lists as texts."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return flat


def _setting(value: Any) -> str:
    """A setting for people: four digits of a number say enough, config.yaml has all."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def settings_table(methods: Sequence[MethodRow]) -> tuple[list[str], list[tuple[str, list[str], bool]]]:
    """Columns (methods with settings) and rows (setting, values, whether they differ), differences first."""
    configured = {}
    for method in methods:
        if method.runs and method.runs[0].config:
            settings = flatten(method.runs[0].config)
            seeds = ", ".join(str(run.seed) for run in method.runs if run.seed is not None)
            configured[method.label] = settings | ({"seed": seeds} if seeds else {})
    rows = []
    for key in dict.fromkeys(key for settings in configured.values() for key in settings if key not in HOW_STARTED):
        values = [settings.get(key) for settings in configured.values()]
        rows.append((key, [*map(_setting, values)], len({*map(str, values)}) > 1))
    return list(configured), sorted(rows, key=lambda row: not row[2])


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
        known = next((place for place, other in enumerate(same) if _same_model(result, other)), None)
        if known is None:
            same.append(result)
        elif len(result) > len(same[known]):
            same[known] = result

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

    methods = []
    for (role, _, _), results in sorted(references.items(), key=lambda item: item[0][0] != "target"):
        for result in results:
            label = role if len(results) == 1 else f"{role} ({result.model or result.name})"
            methods.append(MethodRow(label, role, (Member(None, result),)))
    rows = [row for name, members in trained.items() for row in _split(name, members)]
    return _unique(methods + [replace(row, index=index) for index, row in enumerate(rows)])


def _same_model(one: Scores, other: Scores) -> bool:
    """By their weights, or where these are not known by all that was measured of both."""
    if one.model_sha256 and other.model_sha256:
        return one.model_sha256 == other.model_sha256
    shared = set(one) & set(other)
    return dict(one) == dict(other) or (
        bool(shared) and all(math.isclose(one[key], other[key], rel_tol=1e-4, abs_tol=1e-6) for key in shared)
    )


def _unique(methods: Sequence[MethodRow]) -> list[MethodRow]:
    """No two rows of one label: methods are told apart by their benchmark, and all by a number if that fails."""
    labels = [method.label for method in methods]
    seen: dict[tuple[Any, ...], int] = {}
    unique = []
    for method in methods:
        label, data = method.label, method.data
        if method.role == "method" and labels.count(label) > 1 and data:
            label = f"{label} · {data[0]}"
        key = (label, None if method.role == "method" else data)
        seen[key] = seen.get(key, 0) + 1
        unique.append(replace(method, label=f"{label} ({seen[key]})" if seen[key] > 1 else label))
    return unique


def _split(name: str, members: Sequence[Member]) -> list[MethodRow]:
    """One row per set of settings that were given, and data; runs with one seed are no seeds of one method and stay
    apart."""
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        settings = flatten(member.run.config) if member.run else {}
        own = RUN_SPECIFIC.union(member.run.measured if member.run else ())
        kept = tuple(sorted((key, str(value)) for key, value in settings.items() if key not in own))
        groups.setdefault((kept, member.data, member.run is None), []).append(member)
    keys = {key for settings, _, _ in groups for key, _ in settings}
    varying = {key for key in keys if len({dict(settings).get(key, "None") for settings, _, _ in groups}) > 1}
    rows: list[tuple[str, list[Member]]] = []
    for (settings, data, _), group in groups.items():
        differs = [f"{key} {value}" for key, value in settings if key in varying]
        detail = ", ".join(differs) if 0 < len(differs) <= 2 else _where(group[0])
        alone = sum(key[1] == data for key in groups) == 1
        if len({member.seed for member in group}) == len(group):
            rows.append((name if alone else f"{name} · {detail}", group))
        else:
            rows += [(f"{name} · {_where(member)}", [member]) for member in group]
    return [MethodRow(label, "method", tuple(group)) for label, group in rows]


def _where(member: Member) -> str:
    if member.run is not None:
        return member.run.path.resolve().name
    return member.result.model or member.result.name if member.result is not None else ""


def sections_of(methods: Sequence[MethodRow]) -> list[Section]:
    """Group rows by benchmark and data; rows without any result belong to no section."""
    groups: dict[tuple[str, str], list[MethodRow]] = {}
    for method in methods:
        if method.data is not None:
            groups.setdefault(method.data, []).append(method)
    names = [name for name, _ in groups]
    sections = []
    for (name, data_hash), rows in groups.items():
        title = name if names.count(name) == 1 else f"{name} · data {data_hash[:8] or 'unknown'}"
        measured = list(dict.fromkeys(key for row in rows for result in row.results for key in result))
        shown = [key for key in columns("main") if key in measured]
        missing = "privleak" not in measured and RAW_AUC in measured
        if missing:
            shown.insert(min(3, len(shown)), RAW_AUC)
        beside = [key for key in columns("beside") if key in measured]
        if len(shown) < 2:  # another kind of benchmark: its own metrics come first
            shown += [key for key in measured if key not in (*shown, *beside)][:6]
        shown += beside
        extra = tuple(key for key in measured if key not in shown)
        sections.append(Section(title, name, data_hash, tuple(rows), tuple(shown), extra, missing))
    return sections


def csv_cell(value: Any) -> Any:
    """A cell on one line that no spreadsheet takes for a formula: a text that begins as one gets an apostrophe."""
    if not isinstance(value, str):
        return value
    text = re.sub(r"[\t\r\n]+", " ", value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def csv_table(sections: Sequence[Section]) -> str:
    """The table as CSV: a line per method (`seed` is `all`), and one per seed where there are several.

    Columns: benchmark, data_sha256, method, role, seed, seeds, steps, then for each metric its value (mean
    over seeds), `_std`, `_low` and `_high`.
    """
    metrics = list(dict.fromkeys(key for section in sections for key in (*section.columns, *section.extra)))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ["benchmark", "data_sha256", "method", "role", "seed", "seeds", "steps"]
    head += [f"{key}{part}" for key in metrics for part in ("", "_std", "_low", "_high")]
    writer.writerow(map(csv_cell, head))
    for section in sections:
        for method in section.methods:
            for line in (method, *(method.seeds if len(method.members) > 1 else ())):
                seed = "all" if line is method else str(line.members[0].seed)
                facts = section.benchmark, section.data_sha256, method.label, method.role, seed, len(line.members)
                row: list[Any] = [*facts, line.steps().mean]
                for cell in map(line.cell, metrics):
                    row += [cell.mean, cell.std, cell.low, cell.high]
                writer.writerow(map(csv_cell, row))
    return out.getvalue()
