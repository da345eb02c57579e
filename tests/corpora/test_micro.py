"""The embedded benchmark as it is shipped: texts, probes and questions that never change."""

import hashlib
import json

import pytest

from unteach.corpora import micro

DOCUMENTS = {
    "forget": "2b7d921bb1bfac919c4d55aeb7a44d8d6bf2088c74f2940423f3dea7da6cff7c",
    "retain": "204f1e7465c5a5bfce043a643a9d25192ace78c16904f2fb6a719ce418dc665b",
    "holdout": "1fd13c86357556578662b2cfece0054d2ae62e79a1d1ad8a16c989e043cd3cf1",
    "general": "1f210d286bacd9e9e14b60dc036d60773c06a7c28d8151f3b99a1201ea0e4623",
    "general_heldout": "5ff5123fa52b96426b5064f031cbfae8faebc88e40e32f586171e647891ff8ad",
    "forget_1": "27a88c21774a2711989580f19e5f103934ccb5fc2c485113720cf3db89d2be86",
    "forget_2": "535a7182b745f0c78912b1620bea0e00c518f4fe565555f3040356490a8da653",
    "forget_3": "ed213f4fb10d6264f6642860afe6763f69f0cd54de047cd6ed80fc4442b44e10",
    "forget_4": "013f960cb51100c644f8d7c79c7f482a130bda594fdb202171f2956bd574d1b3",
    "instruct": "141a159dd69c2bc234e2f7e7829782880edee1c373e5a98204b776f35474640d",
}
"""SHA-256 of the JSON list of each part's texts: the shipped models were trained and are measured on exactly these."""
BENCHMARKS = {
    "all": "4d49b3d825dc349c8014258a12f8c736353b96c3758f242b7f16151683a5f707",
    "stop": "a07045e844feb8436fa9121ac9ba1a7d4cfe999e1e50eb4e2212ec4fee83a159",
    "measure": "67ebed21d0fb3a02ef9209fa760659ba3b87f6955cedc7ecf95143565b67885b",
}
"""`data_sha256` of each half: cells of results name them."""


def test_texts_never_change():
    found = {part: hashlib.sha256(json.dumps(micro.documents(part)).encode()).hexdigest() for part in micro.DOCUMENTS}
    assert found == DOCUMENTS


@pytest.mark.parametrize("half", BENCHMARKS)
def test_the_benchmark_never_changes(half):
    benchmark = micro.load_benchmark(half)
    assert benchmark.data_sha256 == BENCHMARKS[half]
    assert benchmark.notes == ("micro is a benchmark of fictional texts with the schema of MUSE; it is not MUSE",)


def test_questions_and_probes_beside_the_benchmark():
    assert len(micro.questions("pretraining")) == 200
    assert len(micro.questions("unasked")) == 360
    assert len(micro.probes("retain")) == 240
    assert not set(micro.questions("unasked")) & set(micro.questions("pretraining"))
