"""`unteach report RUN... --out report.html`: what the command takes and does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    from unteach.report.page import build, check_out, write

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


def write_tensorboard(run: Path, folder: Path) -> Path:
    """Write the scalars of a run folder as TensorBoard event files.

    Training figures (`train/nll_forget`, `train/grad_norm`, ...) come from metrics.jsonl, scores
    (`scores/verbmem_f`, ...) from the evaluations. Gaps (None, NaN) are left out. Run names with their seed
    become subfolders of `folder`, so several runs can share it.

    Args:
        run: the run folder.
        folder: where the event files go; `tensorboard --logdir FOLDER` shows them.

    Returns:
        The subfolder that was written.

    Raises:
        ValueError: the run cannot be read, or the `tensorboard` package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("writing TensorBoard files needs the tensorboard package: pip install tensorboard") from error

    from unteach.report.load import load, number

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
