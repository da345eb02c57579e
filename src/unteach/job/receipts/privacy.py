"""What must not be told: the secret behind a request's salts, and the text in scores."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unteach.errors import InputError

__all__ = ["SALT", "hidden_hash", "hidden_inputs", "read_secret", "secret_of", "without_text"]

SALT = "receipt.salt"
"""In the run folder, and nowhere else: the secret from which the salts of a request's documents are made."""
TEXTS = ("documents", "holdout", "questions")
"""What an audit has hashes of that are texts of the user's."""
HIDDEN = "hmac:"
"""Begins a hash that needs the secret."""


def read_secret(path: Path) -> bytes:
    """The secret of a request's salts; an ``InputError`` where the file has none."""
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise InputError(f"salt is {str(path)!r}: it cannot be read ({error.strerror})") from None
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise InputError(f"salt is {str(path)!r}: it must hold 64 hexadecimal digits, as {SALT} of a run folder does")
    return secret


def secret_of(run: Path) -> bytes:
    """The secret of a run's salts, made at the first use; only its owner can read the file."""
    path = run / SALT
    if not path.exists():
        run.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    return read_secret(path)


def without_text(scores: Any, secret: bytes) -> Any:
    """Scores as a file may hold them that no text can be read from or guessed by.

    Of the items only numbers stay, and the hash of the data is one that needs the secret. What is no scores file (plain
    numbers by name) stays as it is.
    """
    if not isinstance(scores, Mapping) or "items" not in scores:
        return scores
    items = {group: [_numbers(record) for record in records] for group, records in scores["items"].items()}
    hidden = hidden_hash(scores["benchmark"]["data_sha256"], secret)
    return {**scores, "items": items, "benchmark": {**scores["benchmark"], "data_sha256": hidden}}


def hidden_hash(value: str, secret: bytes) -> str:
    """A hash of texts as one that cannot be computed, and so not be guessed, without the secret."""
    return value if value.startswith(HIDDEN) else HIDDEN + hmac.new(secret, value.encode(), "sha256").hexdigest()


def hidden_inputs(audit: Mapping[str, Any], secret: bytes) -> dict[str, Any]:
    """An audit's content with hashes of texts, and of what was made of them, that need the secret."""
    texts = {name: value for name, value in audit.get("inputs", {}).items() if name in TEXTS}
    hidden = {name: hidden_hash(value, secret) for name, value in texts.items()}
    keys = {"key": hidden_hash(audit["key"], secret)} if "key" in audit else {}
    return {**audit, **({"inputs": audit["inputs"] | hidden} if hidden else {}), **keys}


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """What is a number in an item, and the set that it belongs to."""
    kept = {name: value for name, value in record.items() if isinstance(value, int | float) or name == "set"}
    nested = {name: _numbers(value) for name, value in record.items() if isinstance(value, Mapping)}
    return kept | nested
