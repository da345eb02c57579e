"""Salted hashes of documents, and a Merkle tree over them: pure functions on bytes and texts.

A short record could be guessed from its plain hash. So every document is hashed with a salt of its own, which only
somebody who has the request's secret can compute from the text:

    text     in Unicode's form NFC, every run of white space one space, none at the ends, as UTF-8
    salt     HMAC-SHA256(secret, text)
    hash     SHA-256(salt + text)
    set      SHA-256 of all hashes, sorted, one after the other
    root     of the Merkle tree over the sorted hashes (RFC 6962: a leaf is SHA-256(0x00 + hash), a node
             SHA-256(0x01 + left + right), the left part has the largest power of two that is less than all)

Who shows one document shows its salt and the tree's other hashes along the way to the root: that tells neither the
secret nor the salts of the others.
"""

from __future__ import annotations

import hashlib
import hmac
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "NORMALISATION",
    "Hashed",
    "document_hash",
    "document_salt",
    "merkle_root",
    "normalised",
    "path_to_root",
    "root_from",
]

NORMALISATION = "NFC; every run of white space is one space, none at the ends; UTF-8"


def normalised(text: str) -> bytes:
    """A text as it is hashed, see ``NORMALISATION``."""
    return " ".join(unicodedata.normalize("NFC", text).split()).encode(errors="surrogatepass")


def document_salt(secret: bytes, text: str) -> bytes:
    """The salt of one document; it tells nothing about the secret or the other salts."""
    return hmac.digest(secret, normalised(text), "sha256")


def document_hash(salt: bytes, text: str) -> str:
    """SHA-256 of a document's salt and its normalised text, in hexadecimal digits as all hashes here."""
    return hashlib.sha256(salt + normalised(text)).hexdigest()


@dataclass(frozen=True, slots=True)
class Hashed:
    """The documents of a request."""

    hashes: tuple[str, ...]
    """Sorted, so that they tell nothing about the order of the documents."""

    @classmethod
    def of(cls, texts: Sequence[str], secret: bytes) -> Hashed:
        """Hash texts, each with its salt."""
        return cls(tuple(sorted(document_hash(document_salt(secret, text), text) for text in texts)))

    @property
    def set_hash(self) -> str:
        """One hash of all documents, whatever their order."""
        return hashlib.sha256(b"".join(map(bytes.fromhex, self.hashes))).hexdigest()

    @property
    def root(self) -> str:
        """See ``merkle_root``."""
        return merkle_root(self.hashes)


def _leaf(value: str) -> bytes:
    return hashlib.sha256(b"\x00" + bytes.fromhex(value)).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _left_part(count: int) -> int:
    """The largest power of two that is less than a count of at least 2."""
    return 1 << (count - 1).bit_length() - 1


def merkle_root(hashes: Sequence[str]) -> str:
    """The root of the tree over these hashes, in their order; of none, SHA-256 of nothing."""
    return _root([_leaf(value) for value in hashes]).hex() if hashes else hashlib.sha256().hexdigest()


def _root(leaves: Sequence[bytes]) -> bytes:
    if len(leaves) == 1:
        return leaves[0]
    left = _left_part(len(leaves))
    return _node(_root(leaves[:left]), _root(leaves[left:]))


def path_to_root(hashes: Sequence[str], place: int) -> list[dict[str, str]]:
    """What leads from the hash at a place to the root, from below: at each step the other part, and its side."""
    leaves = [_leaf(value) for value in hashes]

    def walk(part: Sequence[bytes], place: int) -> list[dict[str, str]]:
        if len(part) == 1:
            return []
        left = _left_part(len(part))
        if place < left:
            return [*walk(part[:left], place), {"side": "right", "hash": _root(part[left:]).hex()}]
        return [*walk(part[left:], place - left), {"side": "left", "hash": _root(part[:left]).hex()}]

    return walk(leaves, place)


def root_from(value: str, path: Sequence[dict[str, str]]) -> str:
    """The root to which a hash and its path lead."""
    found = _leaf(value)
    for step in path:
        other = bytes.fromhex(step["hash"])
        found = _node(other, found) if step["side"] == "left" else _node(found, other)
    return found.hex()
