"""Words encoded once give the ids of the whole texts, for every kind of tokenizer; and others are encoded whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_models import SENTENCES, small_tokenizer
from unteach.data import Documents, encoding
from unteach.data.encoding import _SPLITS, encode_texts, encodes_word_by_word
from unteach.models import load_tokenizer

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PARTS = [
    "a", "b", "The", "bridge", "'s", "'", "’ll", "  ", " ", " ", "\n", "\n\n", "\t", "\r\n", "5", "12", ",", "..", "é",
    "e\u0301", "\u0301", "日本", "\u00a0", "\u2028", "\u3000", "\x1c", "\x85", "😀", "<s>", "</s>", "Answer:",
    "Correct", "Correct answer:", "<mask>", "_", "-",
]  # fmt: skip
TEXTS = st.lists(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), min_size=1, max_size=6)


def made(*cutters, normalizer=None, added=(), dropout=None):
    """A small BPE tokenizer with these pre-tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(cutters))
    tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if dropout:
        content = json.loads(tokenizer.to_str())
        content["model"]["dropout"] = dropout
        tokenizer = Tokenizer.from_str(json.dumps(content))
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    result.add_tokens([AddedToken(word, **how) for word, how in added])
    return result


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


WORD_BY_WORD = {
    "small": lambda: small_tokenizer(),
    "micro": lambda: load_tokenizer("micro:target"),
    "GPT-2 with a space": lambda: made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits first": lambda: made(pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Llama 3": lambda: made(split(_SPLITS[0]), BYTES),
    "Qwen 2": lambda: made(split(_SPLITS[1]), BYTES, normalizer=normalizers.NFC()),
    "greedy tokens": lambda: made(
        split(_SPLITS[0]),
        BYTES,
        added=[("<mask>", {"lstrip": True}), ("Answer:", {"single_word": True}), ("Correct answer:", {"rstrip": True})],
    ),
}
WHOLE = {
    "another expression": lambda: made(split(r"\S+ \S+|\s+|\S+"), BYTES),
    "another normalizer": lambda: made(split(_SPLITS[0]), BYTES, normalizer=normalizers.NFKC()),
    "words of a corpus": lambda: made(pre_tokenizers.Metaspace()),
    "digits alone": lambda: made(pre_tokenizers.Digits(True)),
    "random merges": lambda: made(split(_SPLITS[0]), BYTES, dropout=0.5),
    "many greedy tokens": lambda: made(
        split(_SPLITS[0]), BYTES, added=[(f"<{number}>", {"rstrip": True}) for number in range(20)]
    ),
}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in WORD_BY_WORD.items()}


@pytest.mark.parametrize("name", WORD_BY_WORD)
def test_words_give_the_ids_of_whole_texts(name, tokenizers):
    tokenizer = tokenizers[name]
    assert encodes_word_by_word(tokenizer)

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(texts=TEXTS, block=st.sampled_from([1, 7, 10**6]))
    def same(texts, block):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(encoding, "BLOCK", block)
            patched.setattr(encoding, "CHECKED", 0)  # else a difference would be found and avoided
            assert encode_texts(tokenizer, texts) == tokenizer(texts, add_special_tokens=False)["input_ids"]

    same()


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_encoded_whole(name):
    tokenizer = WHOLE[name]()
    assert not encodes_word_by_word(tokenizer)
    if name != "random merges":
        texts = ["The bridge was closed  on Monday.", "a b", "é 5"]
        assert encode_texts(tokenizer, texts) == tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_that_differs_all_the_same_is_found_out(monkeypatch):
    tokenizer = WHOLE["another expression"]()
    texts = ["The bridge was closed on Monday, and the council met."] * 3
    right = tokenizer(texts, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(encoding, "encodes_word_by_word", lambda tokenizer: True)
    assert encode_texts(tokenizer, texts) == right
    monkeypatch.setattr(encoding, "CHECKED", 0)
    assert encode_texts(tokenizer, texts) != right, "the comparison is what found it"


def test_words_are_forgotten_and_learned_again(monkeypatch, tokenizers):
    monkeypatch.setattr(encoding, "MOST_WORDS", 5)
    monkeypatch.setattr(encoding, "BLOCK", 20)
    texts = [f"{sentence} {number}" for number, sentence in enumerate(SENTENCES)]
    assert encode_texts(tokenizers["micro"], texts) == tokenizers["micro"](texts, add_special_tokens=False)["input_ids"]


def test_ids_behave_as_lists():
    texts = ["The bridge.", "", "a b c"]
    ids, lists = (
        Documents("d", texts).encode(small_tokenizer()),
        [small_tokenizer()(t, add_special_tokens=False).input_ids for t in texts],
    )
    assert (len(ids), list(ids), ids[-1], ids[:2]) == (3, lists, lists[-1], lists[:2])
    assert (ids.ids.itemsize, ids.lengths.tolist()) == (4, [len(each) for each in lists])
    with pytest.raises(IndexError):
        ids[3]
