"""`unteach report RUN... --out report.html`: one page, and beside it Markdown, CSV and every figure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unteach.evaluation import verdict
from unteach.evaluation.metrics import METRICS, PRIVLEAK_MISSING, describe
from unteach.evaluation.verdict import Finding
from unteach.report.audits import AuditedRun, audited_runs
from unteach.report.examples import ExampleSet, Piece, choose
from unteach.report.load import PUBLISHED, Published, ReportInputs, Run, load, number, published, published_points
from unteach.report.plots import evaluation_figures, tradeoff_figures, training_figures
from unteach.report.requests import COLUMNS, Requests, requests_of
from unteach.report.style import Figure, look
from unteach.report.tables import MethodRow, Section, csv_table, flatten, methods_of, sections_of, settings_table
from unteach.writing import format_number, markdown_table

MARKUP = re.compile(r"([\\`*_{}\[\]#|~$]|:(?=//)|(?<=www)\.|^[-+=]|(?<=^\d)[.)]|(?<=^\d\d)[.)])", re.IGNORECASE)
"""What may start Markdown: emphasis, code, links (bare ones too), tables, formulas, lists at the start."""


@dataclass(frozen=True)
class SectionReport:
    """All that the page shows about one section."""

    section: Section
    tradeoffs: list[Figure]
    over_steps: list[Figure]
    examples: list[ExampleSet]
    points: list[Published]


@dataclass(frozen=True)
class Report:
    """The report before it is written."""

    headline: str
    methods: list[MethodRow]
    sections: list[SectionReport]
    training: list[Figure]
    audits: list[AuditedRun]
    requests: list[Requests]
    published: list[str]
    """Measured benchmarks for which there are figures of others."""
    ends: list[tuple[MethodRow, Run]]
    notes: list[str]
    inputs: ReportInputs


@dataclass(frozen=True)
class Bar:
    """The number behind a finding, drawn and in words; places are in percent of the bar's track."""

    kind: str
    """`less`: long is bad, `more`: long is good."""
    left: float
    width: float
    before: float | None
    never_seen: float | None
    now: str
    interval: str
    beside: str
    """What was measured, what it was before, and what a model has that never saw the documents."""


def bar_of(found: Finding) -> Bar | None:
    """A finding as a bar from zero; of a loss, its rise; of an AUC, how far it is from never-seen text's."""
    info, value, unseen = describe(found.metric), found.value, found.never_seen
    if value is None:
        return None
    known = [number for number in (value, found.before, unseen, 1e-9) if number is not None]
    most = {"percent": 100.0, "auc": 1.0}.get(info.unit, 1.1 * max(known))
    start = (info.chance if unseen is None else unseen) if info.unit == "auc" else 0.0
    if info.unit == "nats per token" and found.before is not None:
        start = min(found.before, value)

    def place(number: float | None) -> float | None:
        return None if number is None else round(100 * min(max(number / most, 0.0), 1.0), 1)

    def text(number: float | None) -> str:
        return format_number(number, info.decimals)

    ends = sorted((place(start) or 0.0, place(value) or 0.0))
    words = [info.title or found.metric, *([f"before {text(found.before)}"] if found.before is not None else [])]
    if unseen is not None:
        words.append(f"chance {text(unseen)}" if found.source == "chance" else f"{found.source} {text(unseen)}")
    return Bar(
        kind="more" if info.higher_is_better else "less",
        left=ends[0],
        width=round(ends[1] - ends[0], 1),
        before=place(found.before),
        never_seen=place(unseen),
        now=text(value),
        interval="" if found.low is None or found.high is None else f"[{text(found.low)}, {text(found.high)}]",
        beside=", ".join(words),
    )


def build(paths: Sequence[Path]) -> Report:
    """Read the runs and make everything the page needs; `load` says what it refuses."""
    inputs = load(paths)
    methods = methods_of(inputs)
    sections = sections_of(methods)
    parts = []
    for index, section in enumerate(sections):
        suffix = f"-{index + 1}" if len(sections) > 1 else ""
        points = published_points(section.benchmark)
        figures = tradeoff_figures(section, points, suffix), evaluation_figures(section, suffix)
        parts.append(SectionReport(section, *figures, choose(section), points))
    results = [result for run in inputs.runs for result in (*run.evaluations, *run.references)] + inputs.results
    notes = [note for each in (inputs.runs, results) for source in each for note in source.notes]
    return Report(
        headline=headline(sections, inputs.runs),
        methods=methods,
        sections=parts,
        training=training_figures(methods),
        audits=audited_runs(methods),
        requests=requests_of(inputs.runs),
        published=[name for name in PUBLISHED if any(name == section.benchmark for section in sections)],
        ends=[(method, run) for method in methods for run in method.runs],
        notes=list(dict.fromkeys(notes)),
        inputs=inputs,
    )


def headline(sections: Sequence[Section], runs: Sequence[Run]) -> str:
    """The sentence at the top of the page."""
    judged = {}
    for section in sections:
        if found := section.findings:
            row = next(row for row in section.trained if row.label in found)
            judged[section.title] = verdict.sentence(found, row.steps().mean)
    if judged:
        said = " ".join(f"{title}: {each}" if len(judged) > 1 else each for title, each in judged.items())
        return said + _found_out(runs)
    run = next((run for run in runs if run.steps), None)
    if run is None:
        nothing = "Nothing was measured yet."
        return "No method to judge: only models before or without unlearning were measured." if sections else nothing
    losses = [value for row in run.steps if (value := number(row.get("nll_forget"))) is not None]
    change = f": the loss on the forget documents went from {losses[0]:.2f} to {losses[-1]:.2f}" if losses else ""
    said = f"no evaluation of a trained model yet{change}{' nats per token' if change else ''}"
    others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"{run.name}{others}: {run.last_step or 0:,} steps, {said}."


def _found_out(runs: Sequence[Run]) -> str:
    """What audits have against the verdict: the attacks that a model does not hold against."""
    failed = [(run.name, [str(a.get("title")) for a in run.audits if a.get("held") is False]) for run in runs]
    named = [f"{name}: " * (len(runs) > 1) + ", ".join(attacks) for name, attacks in failed if attacks]
    return f" But an audit finds them out: {'; '.join(named)}." if named else ""


def duration(seconds: float) -> str:
    """Seconds as people say them: 41 s, 3 min 20 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def escape_markdown(text: str) -> str:
    """Plain text for Markdown: nothing in it is taken for markup, HTML, a link or a table's border."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKUP.sub(r"\\\1", text)


def _marked(pieces: Sequence[Piece]) -> str:
    """Output as Markdown, recited passages bold."""
    text = ""
    for piece in pieces:
        body, bold = escape_markdown(piece.text), "**" if piece.level == "passage" else ""
        start, end = (" " if edge.isspace() else "" for edge in (piece.text[0], piece.text[-1]))
        text += f"{start}{bold}{body}{bold}{end}" if body else " "
    return text.strip()


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    shown = [["–" if cell is None else escape_markdown(str(cell)) for cell in row] for row in rows]
    return markdown_table([*map(escape_markdown, titles)], shown)


def _score_table(section: Section) -> str:
    head = ["", *(f"{escape_markdown(key)} {section.info(key).arrow}".strip() for key in section.columns), "steps"]
    rows = [[escape_markdown(method.label)] for method in section.methods]
    for key in section.columns:
        places = section.info(key).decimals
        for row, cell in zip(rows, section.cells(key).values(), strict=True):
            value = f"**{cell.text(places)}**" if cell.best else cell.text(places)
            row.append(f"{value} {cell.interval(places)}".strip())
    for row, method in zip(rows, section.methods, strict=True):
        row.append(method.steps().text(0))
    return markdown_table(head, rows)


def _render(name: str, report: Report, folder: str) -> str:
    """The page (`template.html`) or the text (`template.md`): texts from files are escaped by the template engine."""
    from jinja2 import Environment
    from markupsafe import Markup, escape

    def markdown(value: Any) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape_markdown(str(value)))

    finalize = markdown if name.endswith(".md") else None
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=finalize)
    environment.globals.update(
        look=look,
        number=format_number,
        bar_of=bar_of,
        duration=duration,
        breakable=lambda text: Markup("_<wbr>" if len(text) > 14 else "_").join(map(escape, text.split("_"))),
        together=lambda text: text.replace(" %", "\u00a0%"),
        verdict_lines=verdict.lines,
        marked=lambda pieces: Markup(_marked(pieces)),
        table=lambda titles, rows: Markup(_table(titles, rows)),
        score_table=lambda section: Markup(_score_table(section)),
        safe=Markup,
        metrics=METRICS,
        privleak_missing=PRIVLEAK_MISSING,
        published=published(),
        published_titles=PUBLISHED,
        request_columns=COLUMNS,
    )
    templates = files("unteach.report")
    inputs, (columns, settings) = report.inputs, settings_table(report.methods)
    measured = [run.before if run.after is None else run.after for run in inputs.runs]
    return environment.from_string(templates.joinpath(name).read_text(encoding="utf-8")).render(
        report=report,
        folder=folder,
        style=Markup(templates.joinpath("style.css").read_text(encoding="utf-8")),
        facts=_facts(report),
        setting_columns=columns,
        settings=settings,
        setting_rows=[(key, *values) for key, values, _ in settings],
        ends=[(m.label, run.seed, run.last_step, run.rule or None, run.reason or None) for m, run in report.ends],
        data=_data(report),
        sources=[one for one in (*measured, *inputs.results) if one is not None],
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """What the first line says: the models, when they were measured, how many documents, what was compared."""
    runs = report.inputs.runs
    results = [result for run in runs for result in run.evaluations] + report.inputs.results
    models = dict.fromkeys(str(run.config["model"]) for run in runs if run.config.get("model"))
    documents = dict.fromkeys(f"{run.documents:,}" for run in runs if run.documents)
    days = sorted(result.created[:10] for result in results if result.created)[-1:]
    benchmarks = [part.section.title for part in report.sections if part.section.title not in models]
    methods = sum(method.role == "method" for method in report.methods)
    facts = {
        "model": models,
        "measured": days,
        "documents to forget": documents,
        "data": benchmarks,
        "methods": [str(methods)] if methods > 1 else [],
    }
    return [(name, ", ".join(given)) for name, given in facts.items() if given]


def _count(value: Any) -> str:
    """A count with at most four digits."""
    if not isinstance(value, int) or abs(value) < 10_000:
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value / 1e6:.4g} million" if abs(value) >= 1e6 else f"{value / 1e3:.4g} thousand"


def _data(report: Report) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    """Counts of test items and of training data; methods with the same data share a table."""

    def lines(counts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        return tuple((key.replace("_", " "), _count(value)) for key, value in flatten(counts).items())

    tables = [(f"Test items, {part.section.title}", lines(part.section.counts)) for part in report.sections]
    trained: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for method in report.methods:
        counts = next((c for run in method.runs if isinstance(c := run.outcome.get("counts"), Mapping)), {})
        if counts:
            trained.setdefault(lines(counts), []).append(method.label)
    for counted, labels in trained.items():
        tables.append((f"Training data, {', '.join(labels)}" if len(trained) > 1 else "Training data", counted))
    return [(title, counted) for title, counted in tables if counted]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the report of one or more runs, and return `out`; see `run`."""
    run(ReportOptions(runs=tuple(runs), out=Path(out)))
    return Path(out)


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
    """Write the report: the same runs always give the same bytes.

    Beside `out` (say report.html) lie report.md, report.csv and the folder report_figures with every figure
    as SVG and PNG.

    Returns:
        What `--json` prints: `headline`, the paths `report`, `markdown`, `csv`, `figures` (`tensorboard`),
        `rows` (benchmark, name, role, seeds, steps and the mean of every metric) and `notes`.

    Raises:
        ValueError: an input or `out` is wrong; one message names every problem.
    """
    out = options.out
    if out.is_dir() or not out.suffix:
        raise ValueError(f"out is {str(out)!r}, a folder or a name without ending: give a file such as report.html")
    report, folder = build(options.runs), out.with_name(f"{out.stem}_figures")
    sections = [part.section for part in report.sections]
    texts = {
        out: _render("template.html", report, folder.name),
        out.with_suffix(".md"): _render("template.md", report, quote(folder.name)).rstrip() + "\n",
        out.with_suffix(".csv"): csv_table(sections),
    }
    figures = [*(f for part in report.sections for f in (*part.tradeoffs, *part.over_steps)), *report.training]
    figures += [view.figure for audited in report.audits for view in audited.views if view.figure]
    drawn = {folder / f"{f.name}{suffix}": content for f in figures for suffix, content in f.files.items()}
    for path, content in ({path: text.encode() for path, text in texts.items()} | drawn).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    rows = []
    for section in sections:
        for method in section.methods:
            means = {key: method.cell(key).mean for key in (*section.columns, *section.extra)}
            facts = {"benchmark": section.benchmark, "name": method.label, "role": method.role}
            rows.append({**facts, "seeds": len(method.members), "steps": method.steps().mean, **means})
    result: dict[str, Any] = {
        "headline": report.headline,
        **dict(zip(("report", "markdown", "csv"), map(str, texts), strict=True)),
        "figures": [str(path) for path in drawn],
        "rows": rows,
        "notes": report.notes,
    }
    if options.tensorboard is not None:
        folders = [write_tensorboard(loaded.path, options.tensorboard) for loaded in report.inputs.runs]
        result["tensorboard"] = [str(folder) for folder in folders]
    return result


def write_tensorboard(run: Path, folder: Path) -> Path:
    """Write the scalars of a run folder as TensorBoard event files.

    Training figures (`train/grad_norm`, ...) come from metrics.jsonl, scores (`scores/verbmem_f`, ...) from the
    evaluations. Gaps (None, NaN) are left out. Runs can share `folder`: each gets a subfolder, which is returned.

    Raises:
        ValueError: the run cannot be read, or the `tensorboard` package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("writing TensorBoard files needs the tensorboard package: pip install tensorboard") from error

    loaded = next(iter(load([run]).runs), None)
    if loaded is None:
        raise ValueError(f"{run}: not a run folder, so it has no scalars over steps for TensorBoard")
    name = "".join(letter if letter.isalnum() or letter in "-_.+" else "_" for letter in loaded.name).strip(".")
    target = folder / f"{name or 'run'}{'' if loaded.seed is None else f'-seed{loaded.seed}'}"
    with SummaryWriter(str(target)) as writer:
        for row in loaded.steps:
            for key, value in row.items():
                if key != "step" and (scalar := number(value)) is not None:
                    writer.add_scalar(f"train/{key}", scalar, int(row["step"]))
        for result in loaded.evaluations:
            for key, value in result.items():
                writer.add_scalar(f"scores/{key}", value, result.step)
    return target
