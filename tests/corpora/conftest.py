"""A word tokenizer built on the spot."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def word_tokenizer():
    """Every word w0 ... w999 is one token; a begin-of-text token is put first."""
    vocabulary = {"<bos>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number + 3 for number in range(1000)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
