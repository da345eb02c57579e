"""Read what a report is made from: run folders and scores files, never a model.

Every text is cleaned on the way in (`clean`), so that nothing later can meet a character that HTML, SVG or
UTF-8 cannot hold. Problems are collected and raised together as one `ValueError`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from unteach.evaluation.formulas import Metric
from unteach.evaluation.scores import AUDIT_SCHEMA, LEDGER_SCHEMA, SCHEMA, Scores

RUN_FILES = ("config.yaml", "metrics.jsonl", "evaluations", "result.json")
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
RULES = {
    "stop": "met",
    "unconfirmed": "met, not confirmed",
    "max_steps": "not met: too many steps",
    "utility_floor": "not met: damage",
    "nearest": "not met: nearest model kept",
    "last": "not met: last model kept",
    "plateau": "not met: no more progress",
    "finished": "not met: ended by hand",
}
"""By which rule a run ended, in words."""
GOAL = re.compile(r"(\w+) [<>]=? ([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")
"""A condition in the text of a stop rule."""


@dataclass(frozen=True)
class Run:
    """One run folder.

    `evaluations` are sorted by step, the model before training first if it was measured. `references` are
    results in the folder that belong to no step (a retrained model, say). `steps` are the lines of
    metrics.jsonl, one per step, sorted; after a resume the later line of a step counts.
    """

    path: Path
    name: str
    seed: int | None
    config: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Scores, ...]
    references: tuple[Scores, ...]
    outcome: Mapping[str, Any]
    watched: tuple[Mapping[str, Any], ...]
    """What the stop rule saw at each of its evaluations."""
    notes: tuple[str, ...]
    audits: tuple[Mapping[str, Any], ...] = ()
    """What attacks found, see `unteach audit`."""
    measured: tuple[str, ...] = ()
    """Names of settings that were measured, not given: each seed has its own."""
    ledger: Mapping[str, Any] = field(default_factory=dict)
    """The requests on its model, its own the last, see `unteach ledger`; empty where it is the first."""

    def over_steps(self, metric: str) -> list[tuple[int, float]]:
        """A score wherever it was measured: by the stop rule where that did so twice, else by the evaluations."""
        rows = [(int(row["step"]), value) for row in self.watched if (value := number(row.get(metric))) is not None]
        return rows if len(rows) > 1 else [(e.step or 0, e[metric]) for e in self.evaluations if metric in e]

    @property
    def before(self) -> Scores | None:
        """The evaluation at step 0, if there is one."""
        return next((result for result in self.evaluations if result.step == 0), None)

    @property
    def after(self) -> Scores | None:
        """The evaluation of the kept model: at the stop rule's step, else the last one after step 0."""
        trained = [result for result in self.evaluations if result.step]
        kept = _mapping(self.outcome.get("stop")).get("step")
        return next((result for result in trained if result.step == kept), trained[-1] if trained else None)

    @property
    def base(self) -> dict[str, float]:
        """Scores of the base model on the stop rule's passages, where there was one."""
        given = {key: number(value) for key, value in _mapping(self.outcome.get("base")).items()}
        return {key: value for key, value in given.items() if value is not None}

    @property
    def documents(self) -> int | None:
        """How many documents were to be forgotten, as far as the folder tells."""
        counts = _mapping(self.outcome.get("counts"))
        return _integer(_mapping(counts.get("forget")).get("documents", counts.get("forget_documents")))

    @property
    def failure(self) -> str:
        """Why the run did not reach what it was meant to; empty where it did, or does not tell."""
        if self.outcome and self.outcome.get("forgotten") is not False:
            return ""
        if not self.outcome:
            return self.reason
        met = _mapping(self.outcome.get("stop")).get("rule") == "unconfirmed"
        return f"{'is not confirmed' if met else 'ended without meeting its rule'}: {self.reason}"

    @property
    def rule(self) -> str:
        """By which rule it ended, in words."""
        given = str(_mapping(self.outcome.get("stop")).get("rule") or "")
        return RULES.get(given, given)

    @property
    def reason(self) -> str:
        """Why it ended, as far as the folder tells."""
        given = _mapping(self.outcome.get("stop")).get("reason")
        return str(given or ("" if self.outcome else "unfinished or interrupted"))

    @property
    def goals(self) -> dict[str, float]:
        """The value that each metric of its stop rule had to reach, as far as the reason names it."""
        return {metric: float(value) for metric, value in GOAL.findall(self.reason)}

    @property
    def epochs(self) -> float | None:
        """How often the kept model had read the documents."""
        last = math.inf if self.last_step is None else self.last_step
        read = (number(row.get("epoch")) for row in reversed(self.steps) if row["step"] <= last)
        return next((value for value in (number(self.outcome.get("epochs")), *read) if value is not None), None)

    @property
    def last_step(self) -> int | None:
        """Steps the kept model was trained for, as far as the folder tells."""
        if self.after is not None:
            return self.after.step
        if isinstance(self.outcome.get("steps"), int):
            return self.outcome["steps"]
        return int(self.steps[-1]["step"]) if self.steps else None


@dataclass
class ReportInputs:
    """All that was read: run folders, and results from scores files."""

    runs: list[Run] = field(default_factory=list)
    results: list[Scores] = field(default_factory=list)


def clean(value: Any) -> Any:
    """Replace characters no page can hold (control characters, lone surrogates) by U+FFFD, recursively."""
    if isinstance(value, str):
        return UNPRINTABLE.sub("�", value)
    if isinstance(value, Mapping):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def number(value: Any) -> float | None:
    """A finite number, or None for anything else (None, NaN, ±∞, a bool, a text)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def _integer(value: Any) -> int | None:
    finite = number(value)
    return int(finite) if finite is not None and finite == int(finite) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def load(paths: Sequence[Path]) -> ReportInputs:
    """Read run folders and scores files.

    Raises:
        ValueError: nothing was given, or a path is missing, is no run folder, or holds broken or foreign
            files. One message names every problem, with file and line.
    """
    inputs = ReportInputs()
    problems = [] if paths else ["no runs were given: pass at least one run folder or scores file"]
    for path in dict.fromkeys(Path(path) for path in paths):
        if path.is_dir() and _is_run(path):
            inputs.runs.append(_read_run(path, problems))
        elif path.is_dir():
            inside = ", ".join(sorted(child.name for child in path.iterdir() if _is_run(child)))
            hint = f"; run folders inside it: {inside}" if inside else ""
            problems.append(f"{path}: not a run folder (it has none of {', '.join(RUN_FILES)}){hint}")
        elif path.exists():
            inputs.results += _read_scores(path, problems)
        else:
            problems.append(f"{path}: no such file or folder")
    if problems:
        raise ValueError("; ".join(problems))
    return inputs


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)


def _read_run(folder: Path, problems: list[str]) -> Run:
    notes: list[str] = []
    title = folder.resolve().name
    config = _read_mapping(folder / "config.yaml", "settings as 'name: value'", problems)
    outcome = _read_mapping(folder / "result.json", "an object", problems)
    steps = _read_steps(folder / "metrics.jsonl", problems, notes)
    watched = _read_steps(folder / "evaluations" / "stop.jsonl", problems, notes)
    results = [
        result for file in sorted((folder / "evaluations").glob("*.json")) for result in _read_scores(file, problems)
    ]
    evaluations = sorted((result for result in results if result.step is not None), key=lambda r: r.step or 0)
    last = next((result for result in reversed(evaluations) if result.step), None)
    if not outcome:
        notes.append(f"{title}: no result.json, so the run is unfinished or was interrupted")
    seeds = outcome.get("seed"), config.get("seed"), last.seed if last else None
    return Run(
        path=folder,
        name=str(outcome.get("name") or (last.name if last else "") or config.get("name") or title),
        seed=next((seed for seed in seeds if isinstance(seed, int)), None),
        config=config,
        steps=steps,
        evaluations=tuple(evaluations),
        references=tuple(result for result in results if result.step is None),
        outcome=outcome,
        watched=watched,
        notes=tuple(notes),
        audits=_read_audits(folder / "audits", problems),
        measured=_read_measured(folder / "start.json"),
        ledger=_of_schema(folder / "ledger.json", LEDGER_SCHEMA, problems),
    )


def _read_measured(file: Path) -> tuple[str, ...]:
    """Names of settings that were measured; none where the file does not say."""
    names = _read_mapping(file, "an object", []).get("measured")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _read_audits(folder: Path, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    """The files of the attacks in a folder, one each."""
    files = [file for file in sorted(folder.glob("*.json")) if file.name != "summary.json"]
    return tuple(content for file in files if (content := _of_schema(file, AUDIT_SCHEMA, problems)))


def _of_schema(file: Path, schema: str, problems: list[str]) -> Mapping[str, Any]:
    content = _read_mapping(file, "an object", problems)
    if content and content.get("schema") != schema:
        problems.append(f"{file}: schema is {content.get('schema')!r}, this version reads {schema!r}")
    return content


def _read(file: Path, problems: list[str]) -> Any:
    """The cleaned content of a JSON or YAML file, or None after noting the problem."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        return clean(yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problems.append(f"{file}{where}: not valid YAML ({getattr(error, 'problem', None) or 'unreadable'})")
    except json.JSONDecodeError as error:
        problems.append(f"{file}, line {error.lineno}: not valid JSON ({error.msg})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
        problems.append(f"{file}: not readable ({error})")
    except OSError as error:
        problems.append(f"{file}: cannot be read ({error.strerror})")
    return None


def _read_mapping(file: Path, expected: str, problems: list[str]) -> Mapping[str, Any]:
    content = _read(file, problems) if file.exists() else None
    if content is not None and not isinstance(content, Mapping):
        problems.append(f"{file}: expected {expected}, found {type(content).__name__}")
    return _mapping(content)


def _read_steps(file: Path, problems: list[str], notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """The lines of metrics.jsonl; a half-written last line is left out and noted."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else []
    filled = [index for index, line in enumerate(lines) if line.strip()]
    rows: dict[float, Mapping[str, Any]] = {}
    for index in filled:
        try:
            row = clean(json.loads(lines[index]))
        except json.JSONDecodeError as error:
            if index == filled[-1]:
                notes.append(f"{file.parent.resolve().name}: the last line of {file.name} is half written and left out")
            else:
                problems.append(f"{file}, line {index + 1}: not valid JSON ({error.msg})")
            continue
        step = number(_mapping(row).get("step"))
        if step is None:
            problems.append(f"{file}, line {index + 1}: expected an object with a number under 'step'")
        else:
            rows[step] = row
    return tuple(rows[step] for step in sorted(rows))


def _read_scores(file: Path, problems: list[str]) -> list[Scores]:
    """The results in a scores file: one result, a list of them, or a list under "results"."""
    found = len(problems)
    content = _read(file, problems)
    if len(problems) > found:
        return []
    content = _mapping(content).get("results", content)
    entries = content if isinstance(content, list) else [content]
    if not entries:
        problems.append(f"{file}: holds no results")
    results = []
    for index, entry in enumerate(entries):
        if problem := _result_problem(entry):
            problems.append(f"{file}{f', result {index + 1}' if len(entries) > 1 else ''}: {problem}")
        else:
            results.append(_scores(entry, file))
    return results


def _result_problem(entry: Any) -> str:
    metrics = _mapping(entry).get("metrics")
    if not isinstance(metrics, Mapping):
        return "not a scores file (no object with 'metrics' in it)"
    if entry.get("schema", SCHEMA) != SCHEMA:
        return f"schema is {entry['schema']!r}, this version reads {SCHEMA!r}"
    for key, metric in metrics.items():
        if not isinstance(metric, Mapping | int | float | None) or isinstance(metric, bool):
            return f"metrics.{key} is {metric!r}, expected a number or an object"
    return ""


def _scores(entry: Mapping[str, Any], file: Path) -> Scores:
    """One result of a scores file, whatever is missing or broken in it left out; see `Scores.from_dict`."""
    benchmark, notes = _mapping(entry.get("benchmark")), entry.get("notes")
    metrics = {key: _metric(value) for key, value in entry["metrics"].items()}
    records = {key: value for key, value in _mapping(entry.get("items")).items() if isinstance(value, list)}
    return Scores(
        benchmark=str(benchmark.get("name") or "unnamed benchmark"),
        metrics={key: metric for key, metric in metrics.items() if metric is not None},
        records={key: [item for item in value if isinstance(item, dict)] for key, value in records.items()},
        notes=tuple(map(str, notes)) if isinstance(notes, list) else (),
        settings=dict(_mapping(entry.get("settings"))),
        data_sha256=str(benchmark.get("data_sha256") or ""),
        name=str(entry.get("name") or entry.get("model") or file.stem),
        model=str(entry.get("model") or ""),
        model_sha256=str(entry.get("model_sha256") or ""),
        step=_integer(entry.get("step")),
        seed=_integer(entry.get("seed")),
        created=str(entry.get("created") or ""),
        versions=dict(_mapping(entry.get("versions"))),
    )


def _metric(given: Any) -> Metric | None:
    """A measured value from an object or a bare number; None where there is no finite number."""
    fields = given if isinstance(given, Mapping) else {"value": given}
    value, low, high = (number(fields.get(key)) for key in ("value", "low", "high"))
    if value is None:
        return None
    better = fields.get("higher_is_better")
    better = better if isinstance(better, bool) else None
    return Metric(value, low, high, _integer(fields.get("count")) or 0, better, str(fields.get("unit") or ""))


@dataclass(frozen=True)
class Published:
    """A point from another harness: `number` refers to the list under the figure, None for a single run."""

    number: int | None
    name: str
    source: str
    metrics: Mapping[str, float]
    note: str = ""
    """Where in which runs it was measured, if other rows are of the same runs."""


PUBLISHED = {"muse-news": "MUSE-News", "muse-books": "MUSE-Books"}
"""Benchmarks with published figures, and their titles. Only results under exactly these names are shown beside them."""


@cache
def published() -> dict[str, Any]:
    """Figures published by others (`published.json`), kept apart from our own rows and always named as theirs."""
    return json.loads(files("unteach.report").joinpath("published.json").read_text(encoding="utf-8"))


def published_points(benchmark: str) -> list[Published]:
    """Points for the trade-off panels: others' methods, the paper's rows, then the paper's single runs."""
    lists = published()["others"], published()["paper"]["rows"], published()["paper_runs"]["runs"]
    others, rows, runs = ([entry for entry in entries if entry["benchmark"] == benchmark] for entries in lists)
    named = [(point["name"], group["source"], point["metrics"], "") for group in others for point in group["points"]]
    for row in rows:
        figures = {key: cell["value"] for key, cell in row["metrics"].items()}
        named.append((row["name"], "the paper, Table 1", figures, row.get("note", "")))
    single = [Published(None, run["name"], f"log {run['log']}", run["metrics"]) for run in runs]
    return [Published(place, *entry) for place, entry in enumerate(named, 1)] + single
