"""The report for other programs: Markdown for a repository or an issue, CSV for a spreadsheet, TensorBoard's files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from unteach.evaluation.metrics import PRIVLEAK_MISSING
from unteach.evaluation.verdict import lines as verdict_lines
from unteach.report.examples import Piece
from unteach.report.load import load, number
from unteach.report.tables import Section, format_cell, format_interval, settings_table
from unteach.writing import format_number, markdown_table

if TYPE_CHECKING:
    from unteach.report.page import Report

SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$]|:(?=//)|(?<=www)\.|^[-+=]|(?<=^\d)[.)]|(?<=^\d\d)[.)])", re.IGNORECASE)
"""Characters that may start markup: emphasis, code, links (bare ones too), tables, formulas, lists at the start."""


def csv_cell(value: Any) -> Any:
    """A cell on one line that no spreadsheet takes for a formula: a text that begins as one gets an apostrophe."""
    if value is None:
        return ""
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
    parts = ("", "_std", "_low", "_high")
    writer.writerow(csv_cell(name) for name in (*head, *(f"{key}{part}" for key in metrics for part in parts)))
    for section in sections:
        for method in section.methods:
            lines = [("all", method)]
            if len(method.members) > 1:
                lines += [(str(member.seed), replace(method, members=(member,))) for member in method.members]
            for seed, line in lines:
                first = [section.benchmark, section.data_sha256, method.label, method.role, seed]
                cells = [line.cell(metric) for metric in metrics]
                values = [value for cell in cells for value in (cell.mean, cell.std, cell.low, cell.high)]
                writer.writerow(map(csv_cell, (*first, len(line.members), line.steps().mean, *values)))
    return out.getvalue()


def escape(text: str) -> str:
    """Plain text for Markdown: nothing in it is taken for markup, HTML, a link or a table's border."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return SPECIAL.sub(r"\\\1", text)


def _marked(pieces: Sequence[Piece]) -> str:
    """Output with recited passages bold."""
    text = ""
    for piece in pieces:
        body = escape(piece.text)
        space = (" " if piece.text[:1].isspace() else "", " " if piece.text[-1:].isspace() else "")
        body = f"**{body}**" if piece.level == "passage" and body else body
        text += f"{space[0]}{body}{space[1]}" if body else " "
    return text.strip()


def markdown(report: Report, figures: str) -> str:
    """The report as Markdown, its pictures taken from the folder `figures`."""
    figures = quote(figures)
    lines = ["# What was forgotten, and what was kept", "", f"**{escape(report.headline)}**", ""]
    for part in report.sections:
        section = part.section
        lines += [f"## {escape(section.title)}", ""]
        for label, findings in part.verdicts.items():
            lines += [f"{escape(label)}:", "", *(f"- {escape(line)}" for line in verdict_lines(findings)), ""]
        lines += _scores(section)
        for figure in (*part.tradeoffs, *part.over_steps):
            lines += [f"![{escape(figure.description)}]({figures}/{figure.name}.svg)", ""]
        for group in part.examples:
            lines += [f"### {escape(group.title)}", ""]
            for example in group.examples:
                lines += [f"> {escape(example.prompt)}", "", f"- expected: {escape(example.expected)}"]
                for answer in example.answers:
                    score = f" ({format_number(answer.score, 0)})" if answer.score is not None else ""
                    lines.append(f"- {escape(answer.label)}{score}: {_marked(answer.pieces)}")
                lines.append("")
    if report.training:
        lines += ["## Training", ""]
        lines += [f"![{escape(figure.description)}]({figures}/{figure.name}.svg)\n" for figure in report.training]
    if report.ends:
        lines += ["## Steps to the stop rule", ""]
        facts = [(method.label, run.seed, run.last_step, run.rule, run.reason) for method, run in report.ends]
        rows = [["–" if fact in ("", None) else escape(str(fact)) for fact in row] for row in facts]
        lines += [markdown_table(["method", "seed", "steps", "stop rule", "why it stopped"], rows), ""]
    columns, settings = settings_table(report.methods)
    if settings:
        lines += ["## Settings", ""]
        shown = [[escape(key), *map(escape, values)] for key, values, _ in settings]
        lines += [markdown_table(["setting", *map(escape, columns)], shown), ""]
    if report.notes:
        lines += ["## Notes", "", *(f"- {escape(note)}" for note in report.notes), ""]
    return "\n".join(lines)


def _scores(section: Section) -> list[str]:
    head = ["", *(f"{escape(key)} {section.info(key).arrow}".strip() for key in section.columns), "steps"]
    columns = {key: section.cells(key) for key in section.columns}
    rows = []
    for method in section.methods:
        row = [escape(method.label)]
        for key in section.columns:
            cell, places = columns[key][method.label], section.info(key).decimals
            value = format_cell(cell, places)
            value = f"**{value}**" if cell.best else value
            row.append(f"{value} {format_interval(cell, places)}".strip())
        rows.append([*row, format_cell(method.steps(), 0)])
    about = "Mean (sample std) over seeds; in brackets 95 % bootstrap intervals over items, averaged over seeds."
    lines = [markdown_table(head, rows), "", about, ""]
    if section.privleak_missing:
        lines += [PRIVLEAK_MISSING, ""]
    return lines


def write_tensorboard(run: Path, folder: Path) -> Path:
    """Write the scalars of a run folder as TensorBoard event files.

    Training figures (`train/nll_forget`, `train/grad_norm`, ...) come from metrics.jsonl, scores
    (`scores/verbmem_f`, ...) from the evaluations. Gaps (None, NaN) are left out. Run names with their seed
    become subfolders of `folder`, so several runs can share it.

    Raises:
        ValueError: the run cannot be read, or the `tensorboard` package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("writing TensorBoard files needs the tensorboard package: pip install tensorboard") from error

    inputs = load([run])
    if not inputs.runs:
        raise ValueError(f"{run}: not a run folder, so it has no scalars over steps for TensorBoard")
    loaded = inputs.runs[0]
    seed = "" if loaded.seed is None else f"-seed{loaded.seed}"
    name = "".join(letter if letter.isalnum() or letter in "-_.+" else "_" for letter in loaded.name).strip(".")
    target = folder / f"{name or 'run'}{seed}"
    with SummaryWriter(str(target)) as writer:
        for row in loaded.steps:
            for key, value in row.items():
                scalar = number(value)
                if key != "step" and scalar is not None:
                    writer.add_scalar(f"train/{key}", scalar, int(row["step"]))
        for result in loaded.evaluations:
            for key, value in result.items():
                writer.add_scalar(f"scores/{key}", value, result.step)
    return target
