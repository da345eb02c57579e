"""The benchmark's own tokenizer, and its texts as token ids."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ANSWER_MARKS = ("Answer:", "Correct answer:")
"""Each one token that takes up the space after it: a prompt may end with or without that space."""

PROMPT_TOKENS = 32
EXPECTED_TOKENS = 64


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer trained on `texts`, as a transformers tokenizer.

    Digits are tokens of their own. A word is the same tokens at the beginning of a text, after an answer mark
    and inside a sentence (the space before it is added, and removed again in decoding). A beginning-of-text
    token is put before every text; the end-of-text token is added by who needs it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(ANSWER_MARKS),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, rstrip=True) for mark in ANSWER_MARKS])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model's folder; saved again, it gives the same bytes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for how_loaded in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(how_loaded, None)
    return tokenizer


def encode_documents(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return each text as beginning-of-text, its tokens, end-of-text."""
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]


def verbatim_probe(tokenizer: Any, text: str) -> tuple[str, str]:
    """Cut a document into a prompt and the continuation a model that recites it gives.

    The prompt is at most 32 tokens long, the beginning-of-text token included, the continuation at most 64
    more; both end where a word does, so that a prompt is tokenised as it was inside the document.

    Returns:
        prompt, expected continuation; joined they are the beginning of `text`.
    """
    encoding = tokenizer(text, return_offsets_mapping=True)
    starts = [start for start, _ in encoding["offset_mapping"]] + [len(text)]

    def cut(tokens: int) -> int:
        tokens = min(tokens, len(starts) - 1)
        while starts[tokens] < len(text) and not text[starts[tokens]].isspace():
            tokens -= 1
        return tokens

    middle = cut(PROMPT_TOKENS)
    end = cut(middle + EXPECTED_TOKENS)
    return text[: starts[middle]], text[starts[middle] : starts[end]]
