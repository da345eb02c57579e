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

from unteach.evaluation.formulas import Metric
from unteach.evaluation.scores import SCHEMA, Scores

RUN_FILES = ("config.yaml", "metrics.jsonl", "evaluations", "result.json")
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


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
    notes: tuple[str, ...] = ()
    watched: tuple[Mapping[str, Any], ...] = ()
    """What the stop rule saw at each of its evaluations."""

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
        stop = self.outcome.get("stop")
        kept = stop.get("step") if isinstance(stop, Mapping) else None
        return next((result for result in trained if result.step == kept), trained[-1] if trained else None)

    @property
    def base(self) -> dict[str, float]:
        """Scores of the base model on the stop rule's passages, where there was one."""
        return {
            key: value
            for key, given in _mapping(self.outcome.get("base")).items()
            if (value := number(given)) is not None
        }

    @property
    def documents(self) -> int | None:
        """How many documents were to be forgotten, as far as the folder tells."""
        counts = _mapping(self.outcome.get("counts"))
        return _integer(_mapping(counts.get("forget")).get("documents", counts.get("forget_documents")))

    @property
    def failure(self) -> str:
        """Why the run did not reach what it was meant to; empty where it did, or does not tell."""
        if not self.outcome:
            return "unfinished or interrupted"
        return f"ended without meeting its rule: {self.reason}" if self.outcome.get("forgotten") is False else ""

    @property
    def rule(self) -> str:
        """By which rule it ended, in words."""
        given = str(_mapping(self.outcome.get("stop")).get("rule") or "")
        return {"stop": "met", "max_steps": "not met: too many steps", "utility_floor": "not met: damage"}.get(
            given, given
        )

    @property
    def reason(self) -> str:
        """Why it ended, as far as the folder tells."""
        given = _mapping(self.outcome.get("stop")).get("reason")
        return str(given or ("" if self.outcome else "unfinished or interrupted"))

    @property
    def epochs(self) -> float | None:
        """How often the kept model had read the documents."""
        told = number(self.outcome.get("epochs"))
        reached = [row for row in self.steps if self.last_step is None or row["step"] <= self.last_step]
        read = (value for row in reversed(reached) if (value := number(row.get("epoch"))) is not None)
        return next(read, None) if told is None else told

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
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def number(value: Any) -> float | None:
    """A finite number, or None for anything else (None, NaN, ±∞, a bool, a text)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def load(paths: Sequence[Path]) -> ReportInputs:
    """Read run folders and scores files.

    Raises:
        ValueError: nothing was given, or a path is missing, is no run folder, or holds broken or foreign
            files. One message names every problem, with file and line.
    """
    inputs, problems = ReportInputs(), []
    if not paths:
        problems.append("no runs were given: pass at least one run folder or scores file")
    for path in dict.fromkeys(Path(path) for path in paths):
        if path.is_dir():
            _read_folder(path, inputs, problems)
        elif path.exists():
            inputs.results += _read_scores(path, problems)
        else:
            problems.append(f"{path}: no such file or folder")
    if problems:
        raise ValueError("; ".join(problems))
    return inputs


def _read_folder(folder: Path, inputs: ReportInputs, problems: list[str]) -> None:
    if not any((folder / name).exists() for name in RUN_FILES):
        inside = sorted(child.name for child in folder.iterdir() if any((child / name).exists() for name in RUN_FILES))
        hint = f"; run folders inside it: {', '.join(inside)}" if inside else ""
        problems.append(f"{folder}: not a run folder (it has none of {', '.join(RUN_FILES)}){hint}")
        return
    notes: list[str] = []
    title = folder.resolve().name
    config = _read_config(folder / "config.yaml", problems)
    outcome = _read_json(folder / "result.json", problems) if (folder / "result.json").exists() else {}
    if not isinstance(outcome, Mapping):
        problems.append(f"{folder / 'result.json'}: expected an object, found {type(outcome).__name__}")
        outcome = {}
    steps = _read_steps(folder / "metrics.jsonl", problems, notes)
    results = [
        result for file in sorted((folder / "evaluations").glob("*.json")) for result in _read_scores(file, problems)
    ]
    evaluations = sorted((result for result in results if result.step is not None), key=lambda r: r.step or 0)
    trained = [result for result in evaluations if result.step]
    if not outcome:
        notes.append(f"{title}: no result.json, so the run is unfinished or was interrupted")
    name = outcome.get("name") or (trained[-1].name if trained else "") or config.get("name") or title
    seed = next(
        (
            value
            for value in (outcome.get("seed"), config.get("seed"), trained[-1].seed if trained else None)
            if isinstance(value, int)
        ),
        None,
    )
    inputs.runs.append(
        Run(
            path=folder,
            name=str(name),
            seed=seed,
            config=config,
            steps=steps,
            evaluations=tuple(evaluations),
            references=tuple(result for result in results if result.step is None),
            outcome=outcome,
            notes=tuple(notes),
            watched=_read_steps(folder / "evaluations" / "stop.jsonl", problems, notes),
        )
    )


def _read_config(file: Path, problems: list[str]) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    import yaml

    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problems.append(f"{file}{where}: not valid YAML ({getattr(error, 'problem', None) or 'unreadable'})")
        return {}
    if config is not None and not isinstance(config, Mapping):
        problems.append(f"{file}: expected settings as 'name: value', found {type(config).__name__}")
        return {}
    return clean(config or {})


def _read_json(file: Path, problems: list[str]) -> Any:
    """The cleaned content of a JSON file, or {} after noting the problem."""
    try:
        return clean(json.loads(file.read_text(encoding="utf-8", errors="replace")))
    except json.JSONDecodeError as error:
        problems.append(f"{file}, line {error.lineno}: not valid JSON ({error.msg})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
        problems.append(f"{file}: not readable as JSON ({error})")
    except OSError as error:
        problems.append(f"{file}: cannot be read ({error.strerror})")
    return {}


def _read_steps(file: Path, problems: list[str], notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """The lines of metrics.jsonl; a half-written last line is left out and noted."""
    if not file.exists():
        return ()
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
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
        step = number(row.get("step")) if isinstance(row, Mapping) else None
        if step is None:
            problems.append(f"{file}, line {index + 1}: expected an object with a number under 'step'")
        else:
            rows[step] = row
    return tuple(rows[step] for step in sorted(rows))


def _read_scores(file: Path, problems: list[str]) -> list[Scores]:
    """The results in a scores file: one result, a list of them, or a list under "results"."""
    found = len(problems)
    content = _read_json(file, problems)
    if len(problems) > found:
        return []
    if isinstance(content, Mapping) and "results" in content:
        content = content["results"]
    entries = content if isinstance(content, list) else [content]
    if not entries:
        problems.append(f"{file}: holds no results")
    results = []
    for index, entry in enumerate(entries):
        where = f"{file}, result {index + 1}" if len(entries) > 1 else str(file)
        problem = _result_problem(entry)
        if problem:
            problems.append(f"{where}: {problem}")
        else:
            results.append(_scores(entry, file))
    return results


def _result_problem(entry: Any) -> str | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("metrics"), Mapping):
        return "not a scores file (no object with 'metrics' in it)"
    if entry.get("schema", SCHEMA) != SCHEMA:
        return f"schema is {entry['schema']!r}, this version reads {SCHEMA!r}"
    wrong = [
        key
        for key, metric in entry["metrics"].items()
        if not isinstance(metric, Mapping | int | float | None) or isinstance(metric, bool)
    ]
    return f"metrics.{wrong[0]} is {entry['metrics'][wrong[0]]!r}, expected a number or an object" if wrong else None


def _scores(entry: Mapping[str, Any], file: Path) -> Scores:
    """One result of a scores file, whatever is missing or broken in it left out; see `Scores.from_dict`."""
    benchmark, notes = _mapping(entry.get("benchmark")), entry.get("notes")
    items = _mapping(entry.get("items"))
    metrics = {key: _metric(value) for key, value in entry["metrics"].items()}
    return Scores(
        benchmark=str(benchmark.get("name") or "unnamed benchmark"),
        metrics={key: metric for key, metric in metrics.items() if metric is not None},
        records={
            key: [item for item in value if isinstance(item, dict)]
            for key, value in items.items()
            if isinstance(value, list)
        },
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
    value, better = number(fields.get("value")), fields.get("higher_is_better")
    if value is None:
        return None
    return Metric(
        value=value,
        low=number(fields.get("low")),
        high=number(fields.get("high")),
        count=_integer(fields.get("count")) or 0,
        higher_is_better=better if isinstance(better, bool) else None,
        unit=str(fields.get("unit") or ""),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _integer(value: Any) -> int | None:
    finite = number(value)
    return int(finite) if finite is not None and finite == int(finite) else None


@dataclass(frozen=True)
class Published:
    """A point from another harness: `number` refers to the list under the figure, None for a single run."""

    number: int | None
    name: str
    source: str
    metrics: Mapping[str, float]


PUBLISHED = {"muse-news": "MUSE-News", "muse-books": "MUSE-Books"}
"""Benchmarks with published figures, and their titles. Only results under exactly these names are shown beside them."""


@cache
def published() -> dict[str, Any]:
    """Figures published by others (`published.json`), kept apart from our own rows and always named as theirs."""
    return json.loads(files("unteach.report").joinpath("published.json").read_text(encoding="utf-8"))


def published_points(benchmark: str) -> list[Published]:
    """Points for the trade-off panels: others' methods, the paper's rows, then the paper's single runs."""
    if benchmark not in PUBLISHED:
        return []
    named = [
        (point["name"], group["source"], point["metrics"])
        for group in published()["others"]
        if group["benchmark"] == benchmark
        for point in group["points"]
    ]
    named += [
        (row["name"], "the paper, Table 1", {key: cell["value"] for key, cell in row["metrics"].items()})
        for row in published()["paper"]["rows"]
        if row["benchmark"] == benchmark
    ]
    found = [Published(index + 1, *entry) for index, entry in enumerate(named)]
    return found + [
        Published(None, run["name"], f"log {run['log']}", run["metrics"])
        for run in published()["paper_runs"]["runs"]
        if run["benchmark"] == benchmark
    ]


def published_rows(benchmark: str) -> list[dict[str, Any]]:
    """The paper's Table 1 for one benchmark."""
    return [row for row in published()["paper"]["rows"] if row["benchmark"] == benchmark]
