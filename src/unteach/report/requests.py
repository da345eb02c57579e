"""The section "Requests on this model": what was removed when, and whether it still holds (`RUN/ledger.json`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unteach.evaluation.verdict import MARKS
from unteach.report.load import RULES, Run, number

COLUMNS = ("request", "when", "documents", "stop rule", "verdict then", "verdict now", "still holds", "chain")


@dataclass(frozen=True)
class Requests:
    """The requests on one model, up to a run of this report."""

    run: Run
    rows: tuple[tuple[str, ...], ...]
    """A row each, see `COLUMNS`."""
    answers: tuple[bool | None, ...]
    """Of each row: whether it still holds."""
    problems: tuple[str, ...]
    """Receipts that cannot be read, or were altered."""


def requests_of(runs: Sequence[Run]) -> list[Requests]:
    """The chain of every run that follows an earlier request, but for those that a longer chain has in it."""
    chains = {run.path: _rows(run) for run in runs}
    ends = {path: [row.get("weights") for row in rows] for path, rows in chains.items() if rows}
    found = []
    for run in runs:
        rows = chains[run.path]
        others = [weights for path, weights in ends.items() if path != run.path]
        if rows and not any(ends[run.path][-1] in weights[:-1] for weights in others):
            given = run.ledger.get("problems")
            problems = tuple(map(str, given)) if isinstance(given, list) else ()
            answers = tuple(_answer(row.get("holds")) for row in rows)
            found.append(Requests(run, tuple(_cells(row) for row in rows), answers, problems))
    return found


def _rows(run: Run) -> list[Mapping[str, Any]]:
    given = run.ledger.get("requests")
    return [row for row in given if isinstance(row, Mapping)] if isinstance(given, list) else []


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    count, rule = number(row.get("documents")), str(row.get("ended") or "")
    return (
        str(row.get("number") or "–"),
        str(row.get("written") or "–")[:10],
        "–" if count is None else f"{count:,.0f}",
        RULES.get(rule, rule) or "–",
        _marks(row.get("verdict")),
        _marks(row.get("now")),
        f"{MARKS[_answer(row.get('holds'))]} {str(row.get('says') or '').removesuffix(': --measure')}",
        str(row.get("link") or "–"),
    )


def _answer(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _marks(answers: Any) -> str:
    return "".join(MARKS[_answer(answer)] for answer in answers) if isinstance(answers, list) else "–"
