"""`unteach demo`: unlearn the embedded model with the paper's method, a baseline and deep forgetting, and compare with
retraining."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig, Stop
from unteach.errors import InputError
from unteach.experiments import DEEP, DEEP_INPUTS, METHODS, MICRO_SETTINGS

__all__ = ["DemoOptions", "run"]

PAPER = ("mt-nlul-kl", "adamw-npo-kl")
"""Methods of the paper that are always shown."""
SHOWN = ("verbmem_f", "knowmem_f", "privleak", "verbmem_r", "nll_retain", "knowmem_r", "nll_general", "degenerate")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demo takes."""

    out: Path = Path("demo")
    """Folder for the runs and the report; must not exist yet."""
    seed: int = 0
    """Of the batches."""
    all: bool = False
    """Run every method of the paper besides deep forgetting, not two of them."""
    json: bool = False
    """Print the rows as one JSON object and nothing else."""


def run(options: DemoOptions) -> dict[str, Any]:
    """Unlearn ``micro:target``, print a table and before/after text, and write the report page.

    Returns ``rows`` (one for the target, the retrained model and each method) and ``report``, the page's path.
    """
    from unteach.evaluation.scores import Scores
    from unteach.job import run_forget
    from unteach.job.run_folder import SharedScores
    from unteach.report import write_report

    out = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"out is {str(out)!r}, which exists and is not empty: name a new folder")
    names = [*(METHODS if options.all else PAPER), "deep"]
    shared, results, rows = SharedScores(), dict[str, Scores](), list[dict[str, Any]]()
    verdicts = dict[str, list[str]]()
    for name in names:
        print(f"\n{name}", file=sys.stderr)
        method = DEEP if name == "deep" else METHODS[name]
        given = DEEP_INPUTS if name == "deep" else {"base": "micro:small"} if method.loss == "it" else {}
        fixed = MICRO_SETTINGS | {"seed": options.seed, "stop": Stop(plateau=0)}  # α stays the method's
        config = ForgetConfig(out=str(out / name), method=method, **given, **fixed)

        def measured_once(score: str, compute: Callable[[], Any], rule: Any = config.keep) -> Any:
            own = f" {rule}" if score.startswith("stop") else ""  # a rule on membership needs other scores
            return shared.measured_once(score + own, compute)

        result = run_forget(config, shared=measured_once)
        files = {"target": "step_000000", "retrained": "reference", name: f"step_{result.steps:06d}"}
        for row, file in files.items():
            text = (out / name / "evaluations" / f"{file}.json").read_text(encoding="utf-8")
            results[row] = Scores.from_dict(json.loads(text))
        done = {"steps": result.steps, "seconds": round(result.seconds, 1)}
        rows.append(_row(name, results[name], options.seed) | done)
        verdicts[name] = [finding.line for finding in result.verdict]
    retrained = _row("retrained", results["retrained"], options.seed) | {"privleak": 0.0}  # it is its own yardstick
    rows = [_row("target", results["target"], options.seed), retrained, *rows]
    report = write_report([out / name for name in names], out / "report.html")
    if not options.json:
        _print(rows, results, verdicts, report)
    return {"rows": rows, "report": str(report)}


def _row(name: str, scores: Any, seed: int) -> dict[str, Any]:
    return {"name": name, "seed": seed} | {m: scores.get(m) for m in SHOWN} | {"steps": None, "seconds": scores.seconds}


def _print(rows: list[dict[str, Any]], results: dict[str, Any], verdicts: dict[str, list[str]], report: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def said(scores: Any, part: str) -> str:
        return escape(" ".join(scores.items_of("verbmem_f")[0][part].split()))

    console = Console()
    table = Table("", *(row["name"] for row in rows))
    for name in (*SHOWN, "steps", "seconds"):
        cells = [row[name] for row in rows]
        table.add_row(name, *("–" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))
    console.print(table)
    for name, lines in verdicts.items():
        console.print(f"\n[bold]{name}[/bold]", *map(escape, lines), sep="\n  ")
    console.print(f"\n[bold]A forget article begins[/bold]: {said(results['target'], 'prompt')}")
    console.print(f"[bold]and goes on[/bold]: {said(results['target'], 'expected')}")
    for name, scores in results.items():
        console.print(f"[bold]{name}[/bold] says: {said(scores, 'output')}")
    console.print(f"\nreport: {report}")
