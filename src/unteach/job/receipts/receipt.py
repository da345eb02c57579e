"""``RUN/receipt.json``: what a run was asked, did and measured, in hashes and numbers, never in text.

The file ends with the SHA-256 of all its bytes before that entry, so that a change is seen without any other file.
Against somebody who also changes that hash help a signature (``signature``), the next receipt of the chain, which names
the hash of the whole file, and every copy elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unteach.audits import attacks
from unteach.audits.running import SUMMARY
from unteach.data import Documents
from unteach.errors import InputError, first_line
from unteach.evaluation.command import hash_weights
from unteach.evaluation.formulas import Metric
from unteach.evaluation.scores import Scores, library_versions
from unteach.evaluation.verdict import Finding, stop_scores
from unteach.job.receipts.hashes import NORMALISATION, Hashed
from unteach.job.receipts.privacy import secret_of
from unteach.job.receipts.schema import problems, schema
from unteach.job.run_folder import ForgetResult
from unteach.models.load import COPIED, find_folder, weight_paths
from unteach.writing import file_sha256, write_whole

__all__ = ["RECEIPT", "SCHEMA", "Receipt", "hashed_model", "issue", "parent_of", "read_receipt", "renew"]

SCHEMA, SCHEMA_FILE = "unteach.receipt/1", "receipt.schema.json"
RECEIPT, EARLIER = "receipt.json", "receipts"
"""The receipt, in a run folder and beside a saved model; and the folder beside it with those of earlier requests."""
HASHING = "SHA-256(salt + text), salt = HMAC-SHA256(secret, text); Merkle tree over the sorted hashes as in RFC 6962"
_END = re.compile(rb' "sha256": "([0-9a-f]{64})"\n\}\n\Z')
_UNTRIED = "attack "
_LABELS = ("line", "unit")
"""Names of an audit's figures, which come from the attack and not from a document."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt as it was read."""

    path: Path
    sha256: str
    """Of the whole file."""
    content: dict[str, Any]
    """Empty where it cannot be read any more."""
    altered: str = ""
    """How the file shows that it was changed after it was written; empty where it does not."""

    @property
    def names(self) -> set[str]:
        """The hashes under which later receipts may name this one."""
        return {self.sha256, *self.content.get("replaces", ())}


def write_receipt(path: Path, content: Mapping[str, Any]) -> None:
    """Write a receipt, with its own hash at the end."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}") + ",\n"
    own = hashlib.sha256(text.encode()).hexdigest()
    write_whole(path, f'{text} "sha256": "{own}"\n}}\n')


def read_receipt(path: Path) -> Receipt:
    """Read a receipt, or that of a run or model folder, and see whether it was changed.

    Raises:
        InputError: There is none, it is something else, or of a schema that this version does not know.
    """
    path = path / RECEIPT if path.is_dir() else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"receipt is {str(path)!r}: it cannot be read ({error.strerror})") from None
    end, ours = _END.search(data), SCHEMA.encode() in data
    altered = ""
    if end is None:
        altered = "its last entry, its own hash, is missing or damaged"
    elif hashlib.sha256(data[: end.start()]).hexdigest() != end[1].decode():
        altered, ours = "its content does not have the hash that it ends with", True
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        if not (altered and ours):
            raise InputError(f"receipt is {str(path)!r}: not readable as JSON ({first_line(error)})") from None
        content = {}
    found = content.get("schema") if isinstance(content, dict) else None
    if found != SCHEMA and not (altered and ours):
        raise InputError(f"receipt is {str(path)!r}: its schema is {found!r}, this version reads {SCHEMA!r}")
    wrong = list(problems(content, whole := schema(SCHEMA_FILE), whole))
    if wrong and not altered:
        raise InputError(f"receipt is {str(path)!r}: {problem}" for problem in wrong)
    return Receipt(path, hashlib.sha256(data).hexdigest(), {} if wrong else content, altered)


def hashed_model(folder: Path, name: str) -> dict[str, Any]:
    """Hashes of a model's weights, configuration and tokenizer files, and one of all weights."""
    weights = weight_paths(folder)
    others = sorted(
        entry.name for entry in folder.iterdir() if entry.is_file() and entry.suffix in COPIED and entry.name != RECEIPT
    )
    paths = weights | {file: folder / file for file in others if file not in weights}
    files = {name: file_sha256(path) for name, path in paths.items()}
    return {"name": name, "sha256": hash_weights(folder, files), "files": files}


def issue(
    run: Path, result: ForgetResult, documents: Documents, scores: Mapping[str, Scores], changes: Sequence[str] = ()
) -> list[str]:
    """Write the receipt of a run that has saved its model, there and beside the model; lines for people.

    Args:
        run: The run folder.
        documents: As they were read, before a chat template.
        scores: ``before``, ``after`` and, where there is one, ``reference``.
        changes: What was other when the run was resumed, and was accepted.
    """
    config, source, saved = result.config, find_folder(result.config.model), run / "model"
    before = hashed_model(source, config.model)
    parent, said = parent_of(source, before)
    hashed = Hashed.of(documents.texts, secret_of(run))
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "written": _now(),
        "number": parent["number"] + 1 if parent else 1,
        "parent": parent,
        "replaces": [],
        "request": {
            "documents": len(hashed.hashes),
            "normalisation": NORMALISATION,
            "hashing": HASHING,
            "hashes": list(hashed.hashes),
            "set": hashed.set_hash,
            "merkle_root": hashed.root,
        },
        "model": before,
        "result": hashed_model(saved, str(saved)),
        "software": library_versions(),
        "settings": json.loads(json.dumps(dataclasses.asdict(config)), parse_constant=str),  # no floor: "Infinity"
        "ended": {
            **result.stop,
            "forgotten": result.forgotten,
            "seconds": round(result.seconds, 1),
            "changes": [*changes],
        },
        "scores": {
            name: {metric: value.to_dict() for metric, value in measured.items()}
            for name, measured in _metrics(scores, result.base).items()
        },
        "verdict": [{"question": f.question, "answer": f.answer, "line": f.line} for f in result.verdict],
        "audits": [],
        "not_measured": _not_measured(result.verdict, scores["after"].notes),
        "private": config.private,
    }
    _put(run, content | _with_audits(run, content))
    if parent is not None:
        _keep_earlier(source, saved, parent["number"])
        said.append(f"request {content['number']} on this model; earlier receipts: {saved / EARLIER}")
    return said


def _metrics(scores: Mapping[str, Scores], base: Mapping[str, float]) -> dict[str, Mapping[str, Metric]]:
    """The metrics of each model; of the base model, where there is one, those that the stop rule compared with."""
    found: dict[str, Mapping[str, Metric]] = {name: measured.metrics for name, measured in scores.items()}
    return found | ({"base": stop_scores(base)} if base else {})


def renew(run: Path) -> Receipt:
    """Write the receipt of a run again, with the audits that were made since; an unchanged one stays as it is."""
    old = read_receipt(run)
    if old.altered:
        raise InputError(f"receipt is {str(old.path)!r}: it was altered: {old.altered}; it is not written again")
    content = {name: value for name, value in old.content.items() if name != "sha256"}
    new = content | _with_audits(run, content)
    if new == content:
        return old
    _put(run, new | {"written": _now(), "replaces": [*content["replaces"], old.sha256]})
    return read_receipt(run)


def _put(run: Path, content: Mapping[str, Any]) -> None:
    """Write a receipt, and its copy beside the model; signatures of what stood there before go."""
    for folder in (run, run / "model"):
        write_receipt(folder / RECEIPT, content)
        (folder / f"{RECEIPT}.sig").unlink(missing_ok=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def parent_of(source: Path, model: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """The receipt that a model's folder carries, as the next one names it, and what people should know of it."""
    if not (source / RECEIPT).is_file():
        return None, []
    try:
        found = read_receipt(source)
    except InputError as error:
        return None, [f"warning: the chain of receipts begins anew: {error}"]
    if found.altered:
        return None, [f"warning: the chain of receipts begins anew: {found.path} was altered: {found.altered}"]
    same = found.content["result"]["sha256"] == model["sha256"]
    said = [] if same else [f"warning: the weights are not those that {found.path} names: they were changed since"]
    return {"sha256": found.sha256, "number": found.content["number"], "same_weights": same}, said


def _keep_earlier(source: Path, result: Path, number: int) -> None:
    """Put the receipts of earlier requests, with their signatures, beside the new model."""
    kept = result / EARLIER
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(source / EARLIER, kept) if (source / EARLIER).is_dir() else kept.mkdir()
    for ending in ("", ".sig"):
        with suppress(FileNotFoundError):
            shutil.copyfile(source / f"{RECEIPT}{ending}", kept / f"{number:04d}.json{ending}")


def _not_measured(verdict: Sequence[Finding], notes: Sequence[str]) -> list[str]:
    """What the scores leave open, in words: open answers, and what the evaluation itself could not measure."""
    found = [f"{part.title}: {part.note}" for one in verdict for part in (one, *one.parts) if part.answer is None]
    return list(dict.fromkeys([*found, *(n for n in notes if re.search("not (measured|reported)", n))]))


def _with_audits(run: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """What the audits of a run change in its receipt."""
    audits = []
    files = {file for file in (run / "audits").glob("*.json") if file.name != SUMMARY}
    for file in sorted(files):
        try:
            given = json.loads(file.read_bytes())
            assert isinstance(given, dict)
        except (ValueError, AssertionError):
            raise InputError(f"{file}: not an audit's result (JSON): make it again, or remove it") from None
        note = {} if content["private"] else {"note": str(given.get("note") or "")}
        held, seed = given.get("held"), given.get("seed")
        audits.append(
            {
                "attack": str(given.get("attack") or file.stem),
                "held": held if isinstance(held, bool) else None,
                "seed": seed if isinstance(seed, int) else None,
                "figures": {name: _numbers(given[name]) for name in ("after", "control", "beyond") if name in given},
                **note,
                "file": file.name,
                "sha256": file_sha256(file),
            }
        )
    made = {audit["attack"] for audit in audits}
    missing = [line for line in content["not_measured"] if not line.startswith(_UNTRIED)]
    missing += [f"{_UNTRIED}{name}: not made; unteach audit RUN" for name in attacks() if name not in made]
    return {"audits": audits, "not_measured": missing}


def _numbers(value: Any) -> Any:
    """What is a number in nested values, True, False and None among them, and what it is called; no other text."""
    if isinstance(value, dict):
        return {name: _numbers(part) for name, part in value.items() if name in _LABELS or not isinstance(part, str)}
    if isinstance(value, list):
        return [_numbers(part) for part in value if not isinstance(part, str)]
    return value
