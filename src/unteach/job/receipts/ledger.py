"""``unteach ledger FOLDER``: the requests on one model in order, and whether earlier ones hold after later ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.errors import InputError
from unteach.evaluation.formulas import Metric
from unteach.evaluation.verdict import MARKS, Finding, judge
from unteach.job.ending import write_page
from unteach.job.receipts.chain import Request, chains, keep_chain, model_of, read_all, row
from unteach.job.receipts.receipt import RECEIPT, hashed_model
from unteach.writing import markdown_table

__all__ = ["LedgerOptions", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """What ``unteach ledger`` takes."""

    folder: str = ""
    """Where the runs lie; or one run, or one saved model, which carries the receipts of earlier requests."""
    measure: bool = False
    """Measure every earlier request again, on the last model of its chain, with the texts that its settings name; the
    last run's report then shows it, too."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: LedgerOptions) -> dict[str, Any]:
    """Read all receipts, order and, if asked, measure; ``status`` is 1 where a chain is broken or a request fails."""
    folder = Path(options.folder)
    if not options.folder or not folder.is_dir():
        raise InputError(f"folder is {options.folder!r}: there is no such folder; name one with runs or a saved model")
    receipts, problems = read_all(folder)
    if not receipts and not problems:
        raise InputError(f"folder is {options.folder!r}: there is no {RECEIPT} in it")
    requests = list(chains(receipts))
    rows = [row(request, _measured(request) if options.measure else None) for request in requests]
    if options.measure:
        for last in [request.receipt for request in requests if request.last is request.receipt]:
            chain = [found for request, found in zip(requests, rows, strict=True) if request.last is last]
            if (last.path.parent / "result.json").is_file() and keep_chain(last.path.parent, chain):
                write_page(last.path.parent)
    rows = [found | {"receipt": str(request.receipt.path)} for request, found in zip(requests, rows, strict=True)]
    wrong = bool(problems) or any(row["holds"] is False or not row["sound"] for row in rows)
    return {"folder": str(folder), "requests": rows, "problems": problems, "status": int(wrong)}


def show(result: dict[str, Any]) -> None:
    """Print the table, and what is wrong below it."""
    titles = ("#", "when", "documents", "model", "verdict", "ended", "chain", "still holds")
    rows = [
        (
            str(row["number"]), row["written"][:10], f"{row['documents']:,}", row["model"],
            "".join(MARKS[answer] for answer in row["verdict"]), row["ended"], row["link"],
            f"{MARKS[row['holds']]} {row['says']}",
        )
        for row in result["requests"]
    ]  # fmt: skip
    if rows:
        print(markdown_table(titles, rows))
        print("verdict: no longer recited, known, detectable; rest kept")
    for problem in result["problems"]:
        print(f"✗ {problem}")


def _measured(request: Request) -> dict[str, Any] | None:
    """Whether what a request reached is so in the last model of its chain, and in words; of the last itself nothing."""
    if request.last is request.receipt:
        return None
    after = f"after request {request.last.content['number']}"
    model = model_of(request.last)
    if model is None or hashed_model(model, "")["sha256"] != request.last.content["result"]["sha256"]:
        return _said(None, f"not measured {after}: its model is not here, or was changed")
    from unteach.job.receipts.measure import measured_again

    try:
        found = measured_again(request.receipt, str(model))
    except InputError as error:
        return _said(None, f"not measured {after}: {error.problems[0]}")
    judged = judge_again(request.receipt.content["scores"], found.metrics)
    now, pairs = [finding.answer for finding in judged], list(zip(judged, request.answers, strict=True))[:3]
    lost = [finding.title for finding, then in pairs if then and finding.answer is False]
    marks = "".join(finding.mark for finding in judged)
    if lost:
        return _said(False, f"{', '.join(lost)} {after} ({marks})", now)
    if not any(then for _, then in pairs):
        return _said(None, f"nothing had been reached ({marks} {after})", now)
    return _said(True, f"{marks} {after}", now)


def _said(holds: bool | None, says: str, now: list[bool | None] | None = None) -> dict[str, Any]:
    return {"holds": holds, "says": says, "now": now}


def judge_again(then: Mapping[str, Mapping[str, Mapping[str, Any]]], now: Mapping[str, Metric]) -> tuple[Finding, ...]:
    """The verdict on new scores, beside the old ones that a receipt has: before, reference and base."""
    old = {
        name: {metric: Metric(**values) for metric, values in then.get(name, {}).items()}
        for name in ("before", "reference", "base")
    }
    return judge(now, old["before"], old["reference"], old["base"])
