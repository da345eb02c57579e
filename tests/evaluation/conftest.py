"""A tiny random Llama, one that knows a text by heart, and their tokenizers: nothing is downloaded."""

import pytest
from random_models import MEMORISED, build_llama, memorise

from tiny_models import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="session")
def plain_tokenizer():
    """The same vocabulary, but nothing is put before a text."""
    return small_tokenizer(begin=False)


@pytest.fixture(scope="session")
def model(tokenizer):
    return build_llama(400)


@pytest.fixture(scope="session")
def reciter(tokenizer):
    return memorise(build_llama(400, hidden_size=64), [tokenizer(MEMORISED)["input_ids"]])
