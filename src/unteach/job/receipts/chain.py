"""The requests on one model in order: receipts, each after the one it follows; and ``RUN/ledger.json``, for the page.

``ledger.json`` (schema ``unteach.ledger/1``) holds ``requests``, the run's own and all before it, each with
``number``, ``written``, ``documents``, ``model``, ``weights``, ``ended``, ``verdict`` (four answers), ``link``,
``sound``, ``holds``, ``says``, ``now`` (the answers measured again, or null) and ``sha256``; and ``problems``, receipts
that cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.errors import InputError
from unteach.evaluation.scores import LEDGER_SCHEMA, write_json
from unteach.job.receipts.receipt import EARLIER, RECEIPT, Receipt, read_receipt
from unteach.models.adapters import is_adapter

__all__ = ["LEDGER", "Request", "chains", "keep_chain", "read_all", "row"]

LEDGER = "ledger.json"
"""In a run folder: what its page says about the requests before it."""
MEASURED = ("holds", "says", "now")
"""What only a measurement knows."""


@dataclass(frozen=True, slots=True)
class Request:
    """A receipt in its chain."""

    receipt: Receipt
    link: str
    """What it follows."""
    sound: bool
    """Whether the chain is whole up to here."""
    last: Receipt
    """The newest receipt that descends from it, or itself."""

    @property
    def answers(self) -> list[bool | None]:
        """The four answers of its own run."""
        return [entry["answer"] for entry in self.receipt.content["verdict"]]


def read_all(folder: Path) -> tuple[list[Receipt], list[str]]:
    """Every receipt in a folder once, older versions of one left out, and what is wrong with others."""
    files = {*folder.rglob(RECEIPT), *folder.rglob(f"{EARLIER}/[0-9]*.json")}
    found: dict[str, Receipt] = {}
    problems = []
    for file in sorted(files, key=lambda file: (len(file.parts), file)):
        try:
            receipt = read_receipt(file)
        except InputError as error:
            problems += error.problems
            continue
        if receipt.altered:
            problems.append(f"{file} was altered: {receipt.altered}")
        elif receipt.sha256 not in found or model_of(found[receipt.sha256]) is None:
            found[receipt.sha256] = receipt
    replaced = {name for receipt in found.values() for name in receipt.content["replaces"]}
    return [receipt for name, receipt in found.items() if name not in replaced], problems


def chains(receipts: Sequence[Receipt]) -> Iterator[Request]:
    """All receipts, each after the one it follows; where two follow one, the earlier branch first."""
    known = {name: receipt for receipt in receipts for name in receipt.names}
    order = sorted(receipts, key=lambda receipt: (receipt.content["number"], receipt.content["written"]))
    parents = {receipt.sha256: receipt.content["parent"] for receipt in order}

    def children(receipt: Receipt) -> list[Receipt]:
        return [each for each in order if parents[each.sha256] and parents[each.sha256]["sha256"] in receipt.names]

    def walk(receipt: Receipt, link: str, sound: bool) -> Iterator[Request]:
        last, following = receipt, children(receipt)
        while followed := children(last):
            last = followed[-1]
        yield Request(receipt, link, sound, last)
        for child in following:
            parent = parents[child.sha256]
            changed = "" if parent["same_weights"] else ", but the weights were changed in between"
            yield from walk(child, f"after {parent['number']}{changed}", sound and not changed)

    for receipt in order:
        parent = parents[receipt.sha256]
        if parent is None:
            yield from walk(receipt, "the first", True)
        elif parent["sha256"] not in known:
            yield from walk(receipt, f"after {parent['number']}, which is not here", False)


def model_of(receipt: Receipt) -> Path | None:
    """The saved model that a receipt lies beside, or in the run folder of."""
    here = receipt.path.parent
    if receipt.path.name != RECEIPT:
        return None
    both = (here, here / "model")
    return next((folder for folder in both if (folder / "config.json").is_file() or is_adapter(folder)), None)


def row(request: Request, measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A request as plain values; ``measured`` says whether it holds in the last model of its chain."""
    content = request.receipt.content
    if measured is None:
        is_last = request.last is request.receipt
        later = f"not measured after request {request.last.content['number']}: --measure"
        measured = {"holds": None, "says": "the last: see its verdict" if is_last else later, "now": None}
    return {
        "number": content["number"],
        "written": content["written"],
        "documents": content["request"]["documents"],
        "model": content["model"]["name"],
        "weights": content["result"]["sha256"],
        "ended": content["ended"]["rule"],
        "verdict": request.answers,
        "link": request.link,
        "sound": request.sound,
        **measured,
        "sha256": request.receipt.sha256,
    }


def keep_chain(run: Path, measured: Sequence[Mapping[str, Any]] = ()) -> Path | None:
    """Write ``ledger.json`` of a run whose model carries receipts of earlier requests; None where it does not.

    What was measured, now or before, stays as long as the weights are those that it was measured of.
    """
    if not (run / RECEIPT).is_file() or not (run / "model" / EARLIER).is_dir():
        return None
    receipts, problems = read_all(run)
    rows = [row(request) for request in chains(receipts)]
    if not rows:
        return None
    for known in (_read(run / LEDGER), measured):
        if known and known[-1]["weights"] == rows[-1]["weights"]:
            found = {old["weights"]: old for old in known if old["now"] is not None}
            rows = [new | {name: found.get(new["weights"], new)[name] for name in MEASURED} for new in rows]
    write_json(run / LEDGER, {"schema": LEDGER_SCHEMA, "requests": rows, "problems": problems})
    return run / LEDGER


def _read(file: Path) -> list[dict[str, Any]]:
    """The requests of a ``ledger.json``; none where there is no such file, or it is damaged."""
    try:
        content = json.loads(file.read_bytes())
        return content["requests"] if content["schema"] == LEDGER_SCHEMA else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
