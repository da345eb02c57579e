"""What a command says and writes when a run has ended, or was interrupted."""

from __future__ import annotations

import errno
import importlib.util
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unteach.errors import InputError, Interrupted, RanksParted
from unteach.evaluation import verdict
from unteach.evaluation.metrics import METRICS
from unteach.job.hub import push
from unteach.job.receipts.chain import keep_chain
from unteach.job.receipts.command import sign_receipt
from unteach.job.receipts.receipt import RECEIPT
from unteach.job.run_folder import ForgetResult, add_to_log, going_on
from unteach.models.distributed import first_to_say, lost_rank, ranks

__all__ = ["ended", "saying_how_to_go_on", "write_page"]

FAILED, INTERRUPTED = 1, 130
"""Exit status of a rank that ends without the others."""
_MENDED_BY = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room") | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "let it be written"
)
"""What can be done where the system does not let a run be written."""


def write_page(run: Path) -> Path | None:
    """Write the page of a run from what its folder holds; None where the libraries that draw it are not installed."""
    if not all(importlib.util.find_spec(needed) for needed in ("matplotlib", "jinja2")):
        return None
    from unteach.report import write_report

    keep_chain(run)
    return write_report([run], run / "report.html")


@contextmanager
def saying_how_to_go_on(run: Path) -> Iterator[None]:
    """A run that is interrupted in this block says how to go on with it, by its name."""
    try:
        yield
    except OSError as error:
        if error.errno not in _MENDED_BY or not (run / "config.yaml").exists():
            raise
        then = f"{_MENDED_BY[error.errno]}, then {going_on(run)}"
        raise InputError(f"{error.strerror} ({error.filename or run}): {then}") from None
    except (Interrupted, KeyboardInterrupt, RuntimeError) as error:
        lost = lost_rank(error)
        if isinstance(error, RuntimeError) and not lost:
            raise
        begun = (run / "config.yaml").exists()
        if ranks() > 1 and not isinstance(error, Interrupted):  # without the others, which may be gone
            line = "another process of this run has ended" if lost else "interrupted"
            line += f"; go on with: {going_on(run)}" if begun else ""
            raise RanksParted(line if first_to_say() else "", FAILED if lost else INTERRUPTED) from None
        if not begun:
            raise
        steps = (run / "metrics.jsonl").exists()
        end = f", or make a result of it as it is: unteach finish {shlex.quote(str(run))}" if steps else ""
        line = f"{str(error) or 'interrupted'}; go on with: {going_on(run)}{end}"
        add_to_log(run, [f"unteach: {line}"])
        raise Interrupted(line) from None


def ended(
    result: ForgetResult, run: Path, hub: str | None = None, key: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Write the page of a run, sign its receipt with a key, and upload its model if the rule was met; what to say, as
    plain values and in lines."""
    report = write_page(run)
    content = result.to_dict() | {"report": report and str(report)}
    lines = [
        *_before_and_after(result.before, result.after),
        f"{'' if result.forgotten else 'NOT forgotten: '}{result.stop['reason']} (step {result.steps})",
        *verdict.lines(result.verdict),
        _time(result),
        f"all scores: {run / 'result.json'}",
        f"model:      {run / 'model'}",
        f"receipt:    {run / RECEIPT}{f', signed: {sign_receipt(run, Path(key)).name}' if key else ''}",
        f"report:     {report or 'needs matplotlib and jinja2; unteach report writes it where they are'}",
    ]
    if hub:
        content["pushed"] = push(run / "model", hub) if result.forgotten else None
        upload = f"not pushed, the rule was not met; if you want it all the same: hf upload {hub} {run / 'model'}"
        lines.append(f"hub:        {content['pushed'] or upload}")
    add_to_log(run, lines)
    return content, lines


def _time(result: ForgetResult) -> str:
    """What the run's time was spent on."""
    steps, looks, rest = (f"{seconds:.0f} ({seconds / result.seconds:.0%})" for seconds in result.seconds_of.values())
    return f"seconds:    {result.seconds:.0f}: steps {steps}, looks of the stop rule {looks}, the rest {rest}"


def _before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """The scores that a person wants to see, a line each: those that the report explains."""
    shown = {name: info for name, info in METRICS.items() if name in before and name in after}
    width = max((len(info.title) for info in shown.values()), default=0)
    lines = []
    for name, info in shown.items():
        values = f"{before[name]:.{info.decimals}f} -> {after[name]:.{info.decimals}f}"
        lines.append(f"  {info.title:{width}}  {values:16}  {name} {info.arrow}".rstrip())
    return lines
