"""Salted hashes and the Merkle tree, against published values and over random sets."""

import hashlib
import random

import pytest

from unteach.job.receipts.hashes import Hashed, document_hash, document_salt, merkle_root, normalised, path_to_root
from unteach.job.receipts.hashes import root_from as root

LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    7: "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}
"""The leaves and roots with which implementations of Certificate Transparency (RFC 6962) are tested."""


@pytest.mark.parametrize("count", ROOTS)
def test_the_tree_is_that_of_rfc_6962(count):
    assert merkle_root(LEAVES[:count]) == ROOTS[count]


def test_every_hash_has_a_path_and_another_hash_or_path_leads_elsewhere():
    draws = random.Random(0)
    for count in [*range(1, 20), 240]:
        hashes = [draws.randbytes(32).hex() for _ in range(count)]
        place = draws.randrange(count)
        path = path_to_root(hashes, place)
        assert root(hashes[place], path) == merkle_root(hashes)
        assert root(draws.randbytes(32).hex(), path) != merkle_root(hashes)
        if path:
            step = draws.randrange(len(path))
            other = [dict(each) for each in path]
            other[step]["side"] = "left" if other[step]["side"] == "right" else "right"
            assert root(hashes[place], other) != merkle_root(hashes)


def test_layout_does_not_count_and_a_word_does():
    assert normalised(" caf\u00e9\r\n au\u00a0 lait ") == normalised("cafe\u0301 au lait") == "café au lait".encode()
    secret = bytes(32)
    one, same, other = (Hashed.of(texts, secret) for texts in (["a  b", "c"], ["c\n", "a b"], ["a b", "d"]))
    assert one == same
    assert one.set_hash == hashlib.sha256(b"".join(map(bytes.fromhex, one.hashes))).hexdigest() != other.set_hash
    assert len({one.root, other.root, Hashed.of(["a b", "c"], bytes([1] * 32)).root}) == 3


def test_a_guess_without_the_secret_meets_no_hash():
    secret, text = bytes(range(32)), "Jane Roe, born 1 April 1970"
    found = Hashed.of([text], secret).hashes[0]
    salt = document_salt(secret, text)
    assert found == document_hash(salt, text)
    assert found not in {hashlib.sha256(normalised(text)).hexdigest(), document_hash(b"", text)}
    assert document_salt(secret, "another") != salt
