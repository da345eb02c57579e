"""A tiny random Llama and a tokenizer trained on the spot: nothing is downloaded."""

import pytest
from random_models import MEMORISED, build_llama, memorise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name.",
    "In his eyes she eclipses and predominates the whole of her sex. It was not that he felt any emotion.",
    "Question: Who is the woman?\nAnswer: Irene Adler\n\nQuestion: Where?\nAnswer: in Bohemia\n\n",
    "Choices:\nA. one\nB. two\nC. three\nD. four\n\nCorrect answer: A\n\nCorrect answer: B C D",
]


@pytest.fixture(scope="session")
def tokenizer():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT * 4, trainer)
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")


@pytest.fixture(scope="session")
def plain_tokenizer(tokenizer):
    """The same vocabulary, but nothing is put before a text."""
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


@pytest.fixture(scope="session")
def model(tokenizer):
    return build_llama(len(tokenizer))


@pytest.fixture(scope="session")
def reciter(tokenizer):
    """A model that knows one text by heart."""
    return memorise(build_llama(len(tokenizer), hidden_size=64), [tokenizer(MEMORISED)["input_ids"]])
