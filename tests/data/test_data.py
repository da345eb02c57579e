from __future__ import annotations

import random
import string
from collections import Counter

import numpy as np
import pytest
import torch

from tiny_models import SENTENCES, small_tokenizer
from unteach.data import Documents, ForgetBatches, GeneralText, overlap, pad, special_ids, tokenise
from unteach.data.overlap import MARGIN, SharedPassages
from unteach.errors import InputError

TEXT = " ".join(SENTENCES)


def words(count: int, seed: int) -> str:
    """Different random words for every seed."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=7)) for _ in range(count))


# Token sequences.


def test_special_ids_are_what_the_tokenizer_adds() -> None:
    assert [special_ids(small_tokenizer(begin=begin)) for begin in (True, False)] == [([0], []), ([], [])]


def test_truncate_keeps_the_beginning_as_the_tokenizer_gives_it() -> None:
    tokenizer = small_tokenizer()
    whole = tokenizer(TEXT)["input_ids"]
    tokens = tokenise(Documents("d", [TEXT, "The"]), tokenizer, mode="truncate", max_tokens=20)
    assert tokens.sequences == [whole[:20], tokenizer("The")["input_ids"]]
    count, left = 20 + len(tokens.sequences[1]), len(whole) - 20
    expected = {"documents": 2, "skipped": 0, "sequences": 2, "tokens": count, "cut": 1, "left_out": left}
    assert tokens.counts == expected
    assert tokens.summary() == (f"2 documents, {count} tokens in 2 sequences; 1 documents cut, {left} tokens left out")


@pytest.mark.parametrize("begin", [True, False])
def test_chunks_hold_every_token_once_and_begin_like_a_text(begin: bool) -> None:
    tokenizer = small_tokenizer(begin=begin)
    bare = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    tokens = tokenise(Documents("d", [TEXT]), tokenizer, mode="chunk", max_tokens=16)
    before = [0] if begin else []
    assert all(sequence[: len(before)] == before for sequence in tokens.sequences)
    joined = [token for sequence in tokens.sequences for token in sequence[len(before) :]]
    left_out = tokens.counts["left_out"]
    assert joined == bare[: len(bare) - left_out]
    assert left_out <= (0 if begin else 1)  # an end of one token can only be used after a begin-of-text id
    assert {len(sequence) for sequence in tokens.sequences[:-1]} == {16}


def test_documents_under_two_tokens_are_skipped_and_counted() -> None:
    tokenizer = small_tokenizer(begin=False)
    documents = Documents("d", ["a", TEXT, "b"], ["first", "second", "third"], [("zeroth", "empty")])
    tokens = tokenise(documents, tokenizer, mode="chunk", max_tokens=512)
    assert tokens.sequences == [tokenizer(TEXT)["input_ids"]]
    reason = "shorter than two tokens"
    assert tokens.skipped == [("zeroth", "empty"), ("first", reason), ("third", reason)]
    assert (tokens.counts["documents"], tokens.counts["skipped"]) == (1, 3)
    assert tokens.summary().endswith("; 3 skipped (1 empty, 2 shorter than two tokens)")
    with pytest.raises(InputError, match=r"'x': no document has two tokens or more: 1 skipped \(1 shorter than two"):
        tokenise(Documents("x", ["a"]), tokenizer, mode="truncate", max_tokens=8)


def test_long_inputs_are_tokenised_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents("d", [TEXT[:length] for length in range(20, 60)])
    whole = tokenise(documents, small_tokenizer(), mode="truncate", max_tokens=30)
    monkeypatch.setattr("unteach.data.documents._TOGETHER", 100)
    assert tokenise(documents, small_tokenizer(), mode="truncate", max_tokens=30).sequences == whole.sequences


def test_wrong_settings_name_what_is_allowed() -> None:
    documents, tokenizer, batches = Documents("d", [TEXT]), small_tokenizer(), ForgetBatches([[1, 2]], seed=0)
    for call, message in (
        (lambda: tokenise(documents, tokenizer, mode="cut", max_tokens=8), "mode is 'cut', must be one of truncate, "),
        (lambda: tokenise(documents, tokenizer, mode="chunk", max_tokens=1), "max_tokens is 1, must be at least 2"),
        (lambda: GeneralText(documents, tokenizer, tokens=1), "tokens is 1, must be at least 2"),
        (lambda: batches.batch(0, 0), "size is 0"),
        (lambda: batches.batch(-1, 2), "step is -1"),
        (lambda: ForgetBatches([], seed=0), "no sequence"),
        (lambda: documents.set_aside(1, 0), "count is 1, must be at least 0 and less than the 1 documents"),
        (lambda: Documents("name", ["a", "b"], ["only one"]), "labels are 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# Forget batches.


@pytest.mark.parametrize(("count", "size"), [(10, 4), (7, 7), (23, 5), (5, 1)])
def test_every_epoch_has_every_sequence_once(count: int, size: int) -> None:
    batches = ForgetBatches([[number, number] for number in range(count)], seed=0)
    row = [sequence[0] for step in range(4 * count) for sequence in batches.batch(step, size)]
    epochs = [row[start : start + count] for start in range(0, 4 * count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert batches.steps_per_epoch(size) == -(-count // size)
    seen = {number for step in range(batches.steps_per_epoch(size)) for number in batches.numbers(step, size)}
    assert seen == set(range(count))


def test_forget_batches_are_a_function_of_seed_and_step() -> None:
    sequences = [[number, 1] for number in range(50)]
    forwards = [ForgetBatches(sequences, seed=3).batch(step, 8) for step in range(40)]
    fresh = ForgetBatches(sequences, seed=3)
    backwards = [fresh.batch(step, 8) for step in reversed(range(40))]
    assert forwards == backwards[::-1]
    assert forwards != [ForgetBatches(sequences, seed=4).batch(step, 8) for step in range(40)]


def test_fewer_sequences_than_the_batch_size_are_all_taken_once() -> None:
    batches = ForgetBatches([[1, 2], [3, 4], [5, 6]], seed=0)
    assert all(sorted(batches.batch(step, 40)) == [[1, 2], [3, 4], [5, 6]] for step in range(5))


def test_no_global_random_state_is_touched() -> None:
    state = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    ForgetBatches([[1, 2]] * 9, seed=0).batch(3, 4)
    GeneralText([TEXT] * 9, small_tokenizer(), tokens=16, exclude=["x"]).batch(3, 4)
    Documents("d", ["a", "b"]).set_aside(1, 0)
    assert random.getstate() == state[0]
    assert (np.random.get_state()[1] == state[1]).all()
    assert torch.equal(torch.get_rng_state(), state[2])


# General text.


def test_general_chunks_are_the_joined_documents_cut_without_padding() -> None:
    tokenizer = small_tokenizer()
    general = GeneralText(Documents("g", SENTENCES), tokenizer, tokens=16)
    joined: list[int] = []
    for sentence in SENTENCES:
        joined += ([1, 0] if joined else []) + tokenizer(sentence, add_special_tokens=False)["input_ids"]
    count = len(joined) // 15
    assert general.chunks.shape == (count, 16)
    assert general.chunks.dtype == np.int32
    assert (general.chunks[:, 0] == 0).all()
    assert general.chunks[:, 1:].ravel().tolist() == joined[: count * 15]
    left = len(joined) - 15 * count
    assert general.counts == {"documents": 3, "chunks": count, "tokens": 16 * count, "left_out": left}
    assert general.summary() == f"3 documents, {16 * count} tokens in {count} chunks"
    without = GeneralText(SENTENCES, small_tokenizer(begin=False), tokens=16)
    assert (without.chunks == 1).sum() == 2  # the end-of-text id between three documents


def test_general_batches_are_independent_draws_by_seed_and_step() -> None:
    texts = [words(20, seed) for seed in range(60)]
    general, again, other = (GeneralText(texts, small_tokenizer(), tokens=16, seed=seed) for seed in (5, 5, 6))
    batches = [general.batch(step, 8) for step in range(200)]
    assert again.batch(150, 8) == batches[150]
    assert all(len({tuple(chunk) for chunk in batch}) == 8 for batch in batches)
    drawn = Counter(tuple(chunk) for batch in batches for chunk in batch)
    assert len(general) == 609  # of which 1,600 draws show 1 - exp(-1600/609) = 93 %
    assert 0.9 * 609 < len(drawn) < 0.96 * 609
    assert batches[0] not in (batches[1], other.batch(0, 8))
    assert len(general.batch(0, 10**6)) == len(general)


def test_too_little_general_text_is_refused() -> None:
    with pytest.raises(InputError, match=r"general is 'g': .* tokens of text, must be at least the 511 of one chunk"):
        GeneralText(Documents("g", SENTENCES), small_tokenizer())
    text = words(100, 0)
    with pytest.raises(InputError, match=r"0 tokens of text \(1 passages \(100 words\) in 1 documents are shared"):
        GeneralText(Documents("g", [text]), small_tokenizer(), exclude=Documents("f", [text]))


# Overlap.


def test_shared_passages_are_found_whatever_the_case_and_punctuation() -> None:
    article = words(40, 1).split()
    changed = "«" + ",\n".join(article[10:30]).upper() + "!»"
    for text, expected in (
        (f"{words(5, 2)} {changed} {words(5, 3)}", [(5, 25)]),
        (" ".join(article[10:22]), []),  # 12 words in a row are not enough
        (" ".join(article[10:23]), [(0, 13)]),
        (" ".join(reversed(article)), []),
        (words(200, 4), []),
        ("", []),
        (" ".join([*article[:13], "other", *article[14:30]]), [(0, 13), (14, 30)]),
    ):
        assert SharedPassages([" ".join(article)]).find(text) == expected
    accented = " ".join(f"cafe\u0301{number}" for number in range(13))
    assert SharedPassages([accented]).find(accented.replace("e\u0301", "é")) == [(0, 13)]
    chinese = "昨日下午市政府宣布新的图书馆将于明年春天开放"
    assert SharedPassages([chinese]).find(f"报道。{chinese}") == [(2, 24)]


def test_short_forget_documents_are_looked_for_whole() -> None:
    passages = SharedPassages(["Anna Berg lives at 12 Elm Street", "too short to find"])
    assert passages.find("They say Anna Berg lives at 12 Elm street, too short to find.") == [(2, 9)]


def test_shared_passages_are_cut_out_with_what_stands_around_them() -> None:
    article, before, after = words(30, 1), words(MARGIN + 80, 2), words(MARGIN + 20, 3)
    general = Documents("g", [words(50, 4), f"{before} {article} {after}", article, words(60, 5)])
    report, cleaned = overlap(Documents("f", [article]), general)
    kept = " ".join(before.split()[:80])
    assert cleaned.texts == [general.texts[0], kept, general.texts[3]]
    assert cleaned.labels == ["document 1", "document 2", "document 4"]
    assert (report.documents, report.passages, report.words, report.dropped) == (2, 2, 60, 1)
    assert report.cut_words == (MARGIN + 30 + MARGIN + 20) + 30
    assert report.summary() == (
        f"2 passages (60 words) in 2 documents are shared with the forget documents: {report.cut_words} words cut out,"
        " 1 documents dropped"
    )
    report, cleaned = overlap(Documents("f", [words(30, 9)]), general)
    assert cleaned.texts == general.texts
    assert report.summary() == "no passage shared with the forget documents"


def test_general_chunks_hold_nothing_of_the_forget_documents() -> None:
    tokenizer = small_tokenizer()
    articles = [words(100, seed) for seed in range(5)]
    texts = [words(400, 100 + seed) for seed in range(20)]
    mixed = [f"{text} {articles[seed]}" if seed < 5 else text for seed, text in enumerate(texts)]
    general = GeneralText(mixed, tokenizer, tokens=32, exclude=Documents("f", articles))
    assert general.counts["documents"] == 20
    decoded = tokenizer.decode([token for chunk in general.chunks.tolist() for token in chunk[1:]])
    assert not any(word in decoded for article in articles for word in article.split())
    assert texts[10].split()[50] in decoded
    assert " ".join(texts[0].split()[:200]) in decoded
    assert "5 passages (500 words) in 5 documents are shared" in general.summary()


def test_pad_fills_up_on_the_right() -> None:
    input_ids, lengths = pad([[5, 6, 7], [8, 9]], pad_id=3)
    assert input_ids.tolist() == [[5, 6, 7], [8, 9, 3]]
    assert lengths.tolist() == [3, 2]
    assert input_ids.dtype == lengths.dtype == torch.int64
