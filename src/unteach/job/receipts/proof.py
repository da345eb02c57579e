"""``unteach prove RECEIPT --document FILE``: show that one document was in a request, without showing the others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.data import read_documents
from unteach.errors import InputError, first_line
from unteach.evaluation.scores import write_json
from unteach.job.receipts.hashes import document_hash, document_salt, path_to_root, root_from
from unteach.job.receipts.privacy import SALT, read_secret
from unteach.job.receipts.receipt import Receipt, read_receipt
from unteach.job.receipts.schema import problems

__all__ = ["ProveOptions", "one_document", "read_proof", "run", "secret_for", "show", "wrong_with"]

SCHEMA = "unteach.proof/1"
_HASH = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_SIDE = {"type": "string", "pattern": "^(left|right)$"}
_STEP = {"type": "object", "required": ["side", "hash"], "properties": {"side": _SIDE, "hash": _HASH}}
FORM: dict[str, Any] = {
    "type": "object",
    "required": ["schema", "receipt", "merkle_root", "salt", "hash", "path"],
    "additionalProperties": False,
    "properties": {
        "schema": {"const": SCHEMA},
        "receipt": _HASH,
        "merkle_root": _HASH,
        "salt": _HASH,
        "hash": _HASH,
        "path": {"type": "array", "items": _STEP},
    },
}
"""What a proof holds: the salt of the one document, its hash, and the way to the root."""


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """What ``unteach prove`` takes."""

    receipt: str = ""
    """The receipt, or the run or model folder that has it."""
    document: str = ""
    """A file with the one document."""
    salt: Path | None = None
    """The request's secret. None: receipt.salt beside the receipt."""
    text_field: str = "text"
    """Field that holds the text, where the file is a record."""
    out: Path = Path("proof.json")
    """The proof to write: it holds no text, and no other document's salt."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: ProveOptions) -> dict[str, Any]:
    """Write the proof of one document, which ``unteach verify RECEIPT --proof FILE --document FILE`` checks."""
    receipt = sound(options.receipt)
    secret, text = secret_for(receipt, options.salt), one_document(options.document, options.text_field)
    salt, hashes = document_salt(secret, text), receipt.content["request"]["hashes"]
    value = document_hash(salt, text)
    if value not in hashes:
        other = "a changed word is enough, and so is another request's salt"
        raise InputError(
            f"document is {options.document!r}: it is not among the {len(hashes):,} of the request ({other})"
        )
    proof = {
        "schema": SCHEMA,
        "receipt": receipt.sha256,
        "merkle_root": receipt.content["request"]["merkle_root"],
        "salt": salt.hex(),
        "hash": value,
        "path": path_to_root(hashes, hashes.index(value)),
    }
    write_json(options.out, proof)
    return {"proof": str(options.out), **proof}


def show(result: dict[str, Any]) -> None:
    """Say where the proof is."""
    print(f"proof: {result['proof']} (give it with the document and the receipt; keep receipt.salt)")


def sound(name: str) -> Receipt:
    """A receipt that was not altered."""
    if not name:
        raise InputError("receipt is missing: name a receipt.json, or the run or model folder that has it")
    receipt = read_receipt(Path(name))
    if receipt.altered:
        raise InputError(f"receipt is {name!r}: it was altered: {receipt.altered}")
    return receipt


def secret_for(receipt: Receipt, given: Path | None) -> bytes:
    """The secret that was given, or that lies beside the receipt."""
    beside = receipt.path.with_name(SALT)
    if given is None and not beside.exists():
        raise InputError(
            f"salt is missing: documents can be compared only by who has the request's {SALT}; --salt FILE"
        )
    return read_secret(given or beside)


def one_document(source: str, text_field: str) -> str:
    """The text of a file that holds one document."""
    if not source:
        raise InputError("document is missing: name the file with the one document")
    found = read_documents(source, text_field=text_field, option="document")
    if len(found) != 1:
        raise InputError(f"document is {source!r}: it holds {len(found):,} documents, must hold one")
    return found.texts[0]


def read_proof(path: Path) -> dict[str, Any]:
    """A proof; an ``InputError`` where the file is none."""
    try:
        proof = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"proof is {str(path)!r}: it cannot be read ({first_line(error)})") from None
    if wrong := list(problems(proof, FORM, FORM)):
        raise InputError(f"proof is {str(path)!r}: {problem}" for problem in wrong)
    return proof


def wrong_with(proof: dict[str, Any], receipt: Receipt, text: str) -> str:
    """What keeps a proof from showing that a text was in a receipt's request; empty where nothing does."""
    if document_hash(bytes.fromhex(proof["salt"]), text) != proof["hash"]:
        return "the document is not the one that the proof is of, or was changed"
    if root_from(proof["hash"], proof["path"]) != receipt.content["request"]["merkle_root"]:
        return "the proof does not lead to the root of this receipt"
    return ""
