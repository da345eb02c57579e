"""``unteach ledger FOLDER``: the requests on one model in order, and whether earlier ones hold after later ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.errors import InputError
from unteach.evaluation.formulas import Metric
from unteach.evaluation.verdict import MARKS, Finding, judge
from unteach.job.receipts.receipt import EARLIER, RECEIPT, Receipt, hashed_model, read_receipt
from unteach.writing import markdown_table

__all__ = ["LedgerOptions", "chains", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """What ``unteach ledger`` takes."""

    folder: str = ""
    """Where the runs lie; or one run, or one saved model, which carries the receipts of earlier requests."""
    measure: bool = False
    """Measure every earlier request again, on the last model of its chain, with the texts that its settings name."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


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


def run(options: LedgerOptions) -> dict[str, Any]:
    """Read all receipts, order and, if asked, measure; ``status`` is 1 where a chain is broken or a request fails."""
    folder = Path(options.folder)
    if not options.folder or not folder.is_dir():
        raise InputError(f"folder is {options.folder!r}: there is no such folder; name one with runs or a saved model")
    receipts, problems = _read_all(folder)
    if not receipts and not problems:
        raise InputError(f"folder is {options.folder!r}: there is no {RECEIPT} in it")
    rows = []
    for request in chains(receipts):
        holds, says = _holds(request, options.measure)
        content = request.receipt.content
        rows.append(
            {
                "number": content["number"],
                "written": content["written"],
                "documents": content["request"]["documents"],
                "model": content["model"]["name"],
                "weights": content["result"]["sha256"],
                "ended": content["ended"]["rule"],
                "verdict": request.answers,
                "link": request.link,
                "sound": request.sound,
                "holds": holds,
                "says": says,
                "receipt": str(request.receipt.path),
                "sha256": request.receipt.sha256,
            }
        )
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


def _read_all(folder: Path) -> tuple[list[Receipt], list[str]]:
    """Every receipt in a folder once, older versions of one left out, and what is wrong with others."""
    files = {*folder.rglob(RECEIPT), *folder.rglob(f"{EARLIER}/*.json")}
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
        elif receipt.sha256 not in found or _model_of(found[receipt.sha256]) is None:
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


def _model_of(receipt: Receipt) -> Path | None:
    """The saved model that a receipt lies beside, or in the run folder of."""
    here = receipt.path.parent
    if receipt.path.name != RECEIPT:
        return None
    return next((folder for folder in (here, here / "model") if (folder / "config.json").is_file()), None)


def _holds(request: Request, measure: bool) -> tuple[bool | None, str]:
    """Whether what a request reached is so in the last model of its chain, and in words."""
    if request.last is request.receipt:
        return None, "the last: see its verdict"
    after = f"after request {request.last.content['number']}"
    if not measure:
        return None, f"not measured {after}: --measure"
    model = _model_of(request.last)
    if model is None or hashed_model(model, "")["sha256"] != request.last.content["result"]["sha256"]:
        return None, f"not measured {after}: its model is not here, or was changed"
    from unteach.job.receipts.measure import measured_again

    try:
        found = measured_again(request.receipt, str(model))
    except InputError as error:
        return None, f"not measured {after}: {error.problems[0]}"
    judged = judge_again(request.receipt.content["scores"], found.metrics)
    pairs = list(zip(judged, request.answers, strict=True))[:3]
    lost = [finding.title for finding, then in pairs if then and finding.answer is False]
    marks = "".join(finding.mark for finding in judged)
    if lost:
        return False, f"{', '.join(lost)} {after} ({marks})"
    if not any(then for _, then in pairs):
        return None, f"nothing had been reached ({marks} {after})"
    return True, f"{marks} {after}"


def judge_again(then: Mapping[str, Mapping[str, Mapping[str, Any]]], now: Mapping[str, Metric]) -> tuple[Finding, ...]:
    """The verdict on new scores, beside the old ones that a receipt has: before, reference and base."""
    old = {
        name: {metric: Metric(**values) for metric, values in then.get(name, {}).items()}
        for name in ("before", "reference", "base")
    }
    return judge(now, old["before"], old["reference"], old["base"])
