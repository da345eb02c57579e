"""The shipped tokenizer, benchmark and models."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from unteach.corpora import micro


@pytest.fixture(scope="session")
def micro_tokenizer():
    return AutoTokenizer.from_pretrained(micro.model_folder("base"))


@pytest.fixture(scope="session")
def micro_benchmark():
    return micro.load_benchmark()


@pytest.fixture(scope="session")
def micro_model():
    """A function from the name of an embedded model to the model."""

    @functools.cache
    def load(name):
        return AutoModelForCausalLM.from_pretrained(micro.model_folder(name), dtype=torch.float32)

    return load
