"""`unteach report RUN... --out report.html`: one page, and beside it Markdown, CSV and every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from unteach.evaluation.metrics import METRICS, PRIVLEAK_MISSING
from unteach.evaluation.verdict import Finding, sentence
from unteach.report.examples import ExampleSet, choose
from unteach.report.exports import csv_table, markdown, write_tensorboard
from unteach.report.load import PUBLISHED, ReportInputs, Run, load, number, published, published_points, published_rows
from unteach.report.plots import evaluation_figures, keys_of, tradeoff_figures, training_figures
from unteach.report.style import Figure, look
from unteach.report.tables import (
    MethodRow,
    Section,
    flatten,
    format_cell,
    format_interval,
    methods_of,
    sections_of,
    settings_table,
)
from unteach.writing import format_number


@dataclass(frozen=True)
class SectionReport:
    """All that the page shows about one section."""

    section: Section
    verdicts: Mapping[str, Sequence[Finding]]
    tradeoffs: Sequence[Figure]
    over_steps: Sequence[Figure]
    examples: Sequence[ExampleSet]
    points: Sequence[Any]


@dataclass(frozen=True)
class Report:
    """The report before it is written."""

    headline: str
    methods: Sequence[MethodRow]
    sections: Sequence[SectionReport]
    training: Sequence[Figure]
    published: Sequence[str]
    """Measured benchmarks for which there are figures of others."""
    ends: Sequence[tuple[MethodRow, Run]]
    notes: Sequence[str]
    inputs: ReportInputs

    @property
    def figures(self) -> list[Figure]:
        """Every figure, in the order of the page."""
        return [*(f for part in self.sections for f in (*part.tradeoffs, *part.over_steps)), *self.training]


def build(paths: Sequence[Path]) -> Report:
    """Read the runs and make everything the page needs.

    Raises:
        ValueError: see `load`.
    """
    inputs = load(paths)
    methods = methods_of(inputs)
    parts = []
    sections = sections_of(methods)
    for index, section in enumerate(sections):
        suffix = f"-{index + 1}" if len(sections) > 1 else ""
        points = published_points(section.benchmark)
        parts.append(
            SectionReport(
                section,
                section.findings,
                tradeoff_figures(section, points, suffix),
                evaluation_figures(section, suffix),
                choose(section),
                points,
            )
        )
    return Report(
        headline=headline(sections, inputs.runs),
        methods=methods,
        sections=parts,
        training=training_figures(methods),
        published=[name for name in PUBLISHED if any(name == section.benchmark for section in sections)],
        ends=[(method, run) for method in methods for run in method.runs],
        notes=collect_notes(inputs),
        inputs=inputs,
    )


def headline(sections: Sequence[Section], runs: Sequence[Run]) -> str:
    """The sentence at the top of the page."""
    judged = {}
    for section in sections:
        if found := section.findings:
            row = next(row for row in section.trained if row.label in found)
            judged[section.title] = sentence(found, row.steps().mean)
    if not judged:
        return _unmeasured(sections, runs)
    return " ".join(f"{title}: {said}" if len(judged) > 1 else said for title, said in judged.items())


def _unmeasured(sections: Sequence[Section], runs: Sequence[Run]) -> str:
    """What can be said when no trained model was measured."""
    run = next((run for run in runs if run.steps), None)
    if run is None:
        return (
            "No method to judge: only models before or without unlearning were measured."
            if sections
            else "Nothing was measured yet."
        )
    values = [value for row in run.steps if (value := number(row.get("nll_forget"))) is not None]
    change = (
        f": the loss on the forget documents went from {values[0]:.2f} to {values[-1]:.2f} nats per token"
        if values
        else ""
    )
    others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"{run.name}{others}: {run.last_step or 0:,} steps, no evaluation of a trained model yet{change}."


def collect_notes(inputs: ReportInputs) -> list[str]:
    """Notes of runs and results, each once."""
    notes = [note for run in inputs.runs for note in run.notes]
    results = [result for run in inputs.runs for result in (*run.evaluations, *run.references)] + inputs.results
    notes += [note for result in results for note in result.notes]
    return list(dict.fromkeys(notes))


def duration(seconds: float) -> str:
    """Seconds as people say them: 41 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def render(report: Report) -> str:
    """The page as HTML; every text that came from a file is escaped by the template engine."""
    from jinja2 import Environment
    from markupsafe import Markup, escape

    folder = files("unteach.report")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(
        look=look,
        number=format_number,
        cell=format_cell,
        interval=format_interval,
        keys_of=keys_of,
        duration=duration,
        breakable=lambda text: Markup("_<wbr>" if len(text) > 14 else "_").join(
            escape(part) for part in text.split("_")
        ),
        together=lambda text: text.replace(" %", "\u00a0%"),
        metrics=METRICS,
        privleak_missing=PRIVLEAK_MISSING,
        safe=Markup,
    )
    setting_columns, settings = settings_table(report.methods)
    template = environment.from_string(folder.joinpath("template.html").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        facts=_facts(report),
        style=Markup(folder.joinpath("style.css").read_text(encoding="utf-8")),
        setting_columns=setting_columns,
        settings=settings,
        published=published(),
        published_titles=PUBLISHED,
        published_rows=published_rows,
        data=_data(report),
        sources=_sources(report),
    )


def _facts(report: Report) -> list[str]:
    """What the first line says: the models, when they were measured, how many documents, what was compared."""
    runs = report.inputs.runs
    results = [result for run in runs for result in run.evaluations] + report.inputs.results
    models = dict.fromkeys(str(run.config["model"]) for run in runs if run.config.get("model"))
    documents = dict.fromkeys(f"{run.documents:,} documents" for run in runs if run.documents)
    days = sorted(result.created[:10] for result in results if result.created)[-1:]
    benchmarks = [part.section.title for part in report.sections]
    methods = sum(method.role == "method" for method in report.methods)
    count = [f"{methods} methods"] if methods > 1 else []
    return [*models, *days, *documents, *(name for name in benchmarks if name not in models), *count]


def _data(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """Counts of test items and of training data; methods with the same data share a table."""

    def lines(counts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        return tuple((key, f"{v:,}" if isinstance(v, int) else str(v)) for key, v in flatten(counts).items())

    tables = [(f"Test items, {part.section.title}", lines(part.section.counts)) for part in report.sections]
    trained: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for method in report.methods:
        counts = next((c for run in method.runs if isinstance(c := run.outcome.get("counts"), Mapping)), {})
        trained.setdefault(lines(counts), []).append(method.label)
    trained.pop((), None)
    alone = len(trained) == 1
    tables += [("Training data" if alone else f"Training data, {', '.join(m)}", c) for c, m in trained.items()]
    return [(title, list(counts)) for title, counts in tables if counts]


def _sources(report: Report) -> list[tuple[str, str]]:
    """Where each result came from: file, model, hashes, versions."""
    inputs = report.inputs
    results = [run.before if run.after is None else run.after for run in inputs.runs] + list(inputs.results)
    lines = []
    for result in results:
        if result is not None:
            versions = ", ".join(f"{key} {value}" for key, value in result.versions.items())
            facts = (
                ("model", result.model),
                ("model sha256", (result.model_sha256 or "")[:12]),
                ("data sha256", result.data_sha256[:12]),
                ("measured", result.created),
                ("with", versions),
            )
            name = result.name if result.seed is None else f"{result.name}, seed {result.seed}"
            lines.append((name, " · ".join(f"{key} {value}" for key, value in facts if value)))
    return lines


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the report of one or more runs.

    Beside `out` (say report.html) lie report.md, report.csv and the folder report_figures with every figure
    as SVG and PNG. The same runs always give the same bytes.

    Args:
        runs: run folders or scores files (`unteach.scores/1`).
        out: the page to write; its folder is made if need be.

    Returns:
        `out`.

    Raises:
        ValueError: a run cannot be read, or `out` is a folder. One message names every problem.
    """
    out = Path(out)
    check_out(out)
    write(build(runs), out)
    return out


def check_out(out: Path) -> None:
    """Refuse an `out` that cannot be a page, before any work is done."""
    if out.is_dir() or not out.suffix:
        raise ValueError(f"out is {str(out)!r}, a folder or a name without ending: give a file such as report.html")


def write(report: Report, out: Path) -> dict[str, Any]:
    """Write page, Markdown, CSV and figures; returns their paths."""
    folder = out.with_name(f"{out.stem}_figures")
    texts = {
        out: render(report),
        out.with_suffix(".md"): markdown(report, folder.name),
        out.with_suffix(".csv"): csv_table([part.section for part in report.sections]),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    written = []
    if report.figures:
        folder.mkdir(exist_ok=True)
    for figure in report.figures:
        for suffix, content in figure.files.items():
            path = folder / f"{figure.name}{suffix}"
            path.write_bytes(content)
            written.append(path)
    return {"page": out, "markdown": out.with_suffix(".md"), "csv": out.with_suffix(".csv"), "figures": written}


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Compare runs on one page.

    Examples:
        unteach report run/
        unteach report runs/mt-* runs/adamw-* retrained.json --out comparison.html
    """

    runs: tuple[Path, ...]
    """Run folders and scores files; seeds of one method are averaged."""
    out: Path = Path("report.html")
    """The page to write. Markdown, CSV and the figures go beside it."""
    tensorboard: Path | None = None
    """Also write the runs' scalars as TensorBoard event files into this folder."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: ReportOptions) -> dict[str, Any]:
    """Write the report.

    Returns:
        What `--json` prints: `headline`, the paths `report`, `markdown`, `csv`, `figures` (`tensorboard`),
        `rows` (benchmark, name, role, seeds, steps and the mean of every metric) and `notes`.

    Raises:
        ValueError: an input or `out` is wrong; one message names every problem.
    """
    check_out(options.out)
    report = build(options.runs)
    paths = write(report, options.out)
    rows = []
    for part in report.sections:
        section = part.section
        for method in section.methods:
            means = {key: method.cell(key).mean for key in (*section.columns, *section.extra)}
            facts = {"benchmark": section.benchmark, "name": method.label, "role": method.role}
            rows.append({**facts, "seeds": len(method.members), "steps": method.steps().mean, **means})
    result: dict[str, Any] = {
        "headline": report.headline,
        "report": str(paths["page"]),
        "markdown": str(paths["markdown"]),
        "csv": str(paths["csv"]),
        "figures": [str(path) for path in paths["figures"]],
        "rows": rows,
        "notes": list(report.notes),
    }
    if options.tensorboard is not None:
        folders = [write_tensorboard(loaded.path, options.tensorboard) for loaded in report.inputs.runs]
        result["tensorboard"] = [str(folder) for folder in folders]
    return result
