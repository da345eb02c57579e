"""``unteach verify RECEIPT``: compute again what a receipt says, and tell line by line what agrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unteach.data import read_documents
from unteach.errors import InputError
from unteach.evaluation.metrics import describe
from unteach.job.receipts.hashes import Hashed, document_hash, document_salt
from unteach.job.receipts.proof import one_document, read_proof, secret_for, wrong_with
from unteach.job.receipts.receipt import Receipt, hashed_model, read_receipt
from unteach.job.receipts.signature import check_signature, signature_of
from unteach.models.load import find_folder
from unteach.writing import file_sha256, format_number

__all__ = ["Check", "VerifyOptions", "compared_scores", "run", "show"]

MOST_NAMED = 20
"""So many documents or files that differ are named."""
SAME = 1e-3
"""Relative difference up to which two scores count as the same; machines round differently."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What ``unteach verify`` takes."""

    receipt: str = ""
    """The receipt, or the run or model folder that has it."""
    model: str | None = None
    """The model that the run made: are these its weights, and its tokenizer?"""
    before: str | None = None
    """The model that the run began with."""
    documents: str | None = None
    """The documents of the request, all of them; needs the salt."""
    salt: Path | None = None
    """The request's secret. None: receipt.salt beside the receipt."""
    proof: Path | None = None
    """A proof that one document was in the request, made by unteach prove; needs that document, and no salt."""
    document: str | None = None
    """The file with the one document of the proof."""
    signer: Path | None = None
    """The public key of who must have signed the receipt, such as id_ed25519.pub."""
    measure: bool = False
    """Also measure the model again, with the texts that the receipt's settings name."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, whether it agrees (None: it was not looked at), and in words."""

    about: str
    agrees: bool | None
    says: str

    @property
    def line(self) -> str:
        """For a terminal."""
        return f"{ {True: '✓', False: '✗', None: '–'}[self.agrees] } {self.about}: {self.says}"


def run(options: VerifyOptions) -> dict[str, Any]:
    """Check all that was given: ``checks``, one for each line; ``status`` is 1 where something differs."""
    if not options.receipt:
        raise InputError("receipt is missing: name a receipt.json, or the run or model folder that has it")
    if options.measure and not options.model:
        raise InputError("model is missing: name the model to measure, --model FOLDER")
    if options.salt is not None and options.documents is None:
        raise InputError("salt is given, but no documents to compare: give documents, too")
    if (options.proof is None) != (options.document is None):
        raise InputError("proof and document belong together: give the file of each")
    receipt = read_receipt(Path(options.receipt))
    checks = [*_checks(receipt, options)]
    status = int(any(check.agrees is False for check in checks))
    content = {"receipt": str(receipt.path), "sha256": receipt.sha256, "checks": [asdict(check) for check in checks]}
    return {**content, "agrees": not status, "status": status}


def show(result: dict[str, Any]) -> None:
    """Print the lines, and the last word."""
    checks = [Check(**check) for check in result["checks"]]
    print("\n".join(check.line for check in checks))
    wrong = list(dict.fromkeys(check.about for check in checks if check.agrees is False))
    print(f"differs: {', '.join(wrong)}" if wrong else "everything that was looked at agrees")


def _checks(receipt: Receipt, options: VerifyOptions) -> Iterator[Check]:
    """Every line, one after the other."""
    if receipt.altered:
        yield Check("receipt", False, f"it was altered after it was written: {receipt.altered}")
    else:
        yield Check("receipt", True, f"unaltered by its own hash; SHA-256 {receipt.sha256}")
    yield _signature(receipt, options.signer)
    if not receipt.content:
        yield Check("all else", None, "not looked at: the receipt is not readable any more")
        return
    yield _request(receipt.content["request"])
    yield from _documents(receipt, options)
    if options.proof is not None and options.document is not None:
        field = receipt.content["settings"].get("text_field", "text")
        wrong = wrong_with(read_proof(options.proof), receipt, one_document(options.document, field))
        yield Check("proof", not wrong, wrong or "the document was in the request")
    for option, part, other in (("before", "model", "result"), ("model", "result", "model")):
        name = getattr(options, option)
        what = "model before" if option == "before" else "model"
        if name is None:
            yield Check(what, None, f"not looked at: --{option} FOLDER")
        else:
            yield _model(what, name, receipt.content[part], receipt.content[other])
    yield from _audits(receipt)
    if options.measure and options.model:
        from unteach.job.receipts.measure import measured_again

        found = measured_again(receipt, options.model, options.documents)
        yield from compared_scores(receipt.content["scores"]["after"], dict(found))
    else:
        yield Check("scores", None, "not measured again: --measure")


def _signature(receipt: Receipt, signer: Path | None) -> Check:
    signature = signature_of(receipt.path)
    if not signature.is_file():
        missing = f"there is none at {signature}"
        return Check("signature", None if signer is None else False, missing)
    return Check("signature", *check_signature(receipt.path, signature, signer))


def _request(request: Mapping[str, Any]) -> Check:
    hashed = Hashed(tuple(request["hashes"]))
    given = len(request["hashes"]), sorted(request["hashes"]), request["set"], request["merkle_root"]
    if given != (request["documents"], request["hashes"], hashed.set_hash, hashed.root):
        return Check("request", False, "its count, set hash or Merkle root does not follow from its hashes")
    return Check("request", True, f"set hash and Merkle root follow from the hashes of {given[0]:,} documents")


def _documents(receipt: Receipt, options: VerifyOptions) -> Iterator[Check]:
    """Every document that was given and is not in the request, and how many of the request were not given."""
    if options.documents is None:
        yield Check("documents", None, "not looked at: --documents DIR")
        return
    settings, secret = receipt.content["settings"], secret_for(receipt, options.salt)
    how = {name: settings[name] for name in ("text_field", "skip_unreadable") if name in settings}
    found = read_documents(options.documents, **how)
    left, strange = Counter(receipt.content["request"]["hashes"]), []
    for label, text in zip(found.labels, found.texts, strict=True):
        value = document_hash(document_salt(secret, text), text)
        if left[value]:
            left[value] -= 1
        else:
            strange.append(label)
    missing = left.total()
    for label in strange[:MOST_NAMED]:
        yield Check("documents", False, f"{label} is not in the request, or was changed")
    if len(strange) > MOST_NAMED:
        yield Check("documents", False, f"{len(strange) - MOST_NAMED:,} more are not in the request, or were changed")
    if missing:
        yield Check("documents", False, f"{missing:,} of the request are not among those given")
    if not strange and not missing:
        yield Check("documents", True, f"all {len(found):,} are those of the request")


def _model(what: str, name: str, expected: Mapping[str, Any], other: Mapping[str, Any]) -> Check:
    """Whether a folder's files are those that a receipt names; if not, which."""
    folder = find_folder(name, "model" if what == "model" else "before")
    try:
        found = hashed_model(folder, name)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{what} is {name!r}: its weights cannot be read ({error})") from None
    given, named = found["files"], expected["files"]
    differing = [file for file in {**named, **given} if given.get(file) != named.get(file)]
    if not differing:
        return Check(what, True, f"all {len(given)} files are those of the receipt; weights {found['sha256'][:12]}")
    words = [
        f"{f} {'is missing' if f not in given else 'was added' if f not in named else 'differs'}" for f in differing
    ]
    more = f", and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    swapped = found["sha256"] == other["sha256"]
    which = f"; the weights are those of the model {'before the run' if what == 'model' else 'that the run made'}"
    return Check(what, False, ", ".join(words[:MOST_NAMED]) + more + (which if swapped else ""))


def _audits(receipt: Receipt) -> Iterator[Check]:
    """Whether the audits' files are still those that the receipt names, where it lies in the run folder."""
    for audit in receipt.content["audits"]:
        file = receipt.path.parent / "audits" / audit["file"]
        if file.is_file():
            same = file_sha256(file) == audit["sha256"]
            yield Check(f"audit {audit['attack']}", same, "as in the receipt" if same else f"{file} was changed")
        else:
            yield Check(f"audit {audit['attack']}", None, "its file is not here")


def compared_scores(then: Mapping[str, Mapping[str, Any]], now: Mapping[str, float]) -> Iterator[Check]:
    """A line for every score of a receipt: the same, within its interval, or different."""
    for name, metric in then.items():
        value, low, high = metric["value"], metric["low"], metric["high"]
        found = now.get(name)
        if found is None:
            yield Check(f"score {name}", None, f"not measured again; {value:.4g} in the receipt")
            continue
        digits = describe(name).decimals
        shown, before = format_number(found, digits), format_number(value, digits)
        same = abs(found - value) <= SAME * max(1.0, abs(value))
        inside = low is not None and high is not None and low <= found <= high
        if same:
            says = f"{shown}, as in the receipt"
        else:
            interval = "" if low is None or high is None else f" [{low:.4g}, {high:.4g}]"
            says = f"{shown}, in the receipt {before}{interval}" + (", within the interval" if inside else "")
        yield Check(f"score {name}", same or inside, says)
