"""Many records and long documents: work and memory before the first step grow with the input, and no faster."""

import importlib
import json
import tracemalloc

import numpy as np
import pytest

from steps import GENERAL
from tiny_models import SENTENCES, small_tokenizer
from unteach.corpora import own
from unteach.corpora.own import cut_probes
from unteach.data import Documents, ForgetBatches, GeneralText, batches, encoding, overlap, read_documents, tokenise
from unteach.data.overlap import SharedPassages
from unteach.job.inputs import Inputs

WORDS = " ".join(SENTENCES).split()


def records(count):
    """So many texts of the same words in any order."""
    draws = np.random.default_rng(0).integers(len(WORDS), size=(count, 24))
    return [" ".join(WORDS[number] for number in row) for row in draws.tolist()]


def prepared(documents):
    """What happens to documents before the first step, once they are read."""
    tokenizer = small_tokenizer()
    tokens = tokenise(documents, tokenizer, mode="chunk", max_tokens=64)
    general = GeneralText(GENERAL[:40], tokenizer, tokens=48, exclude=documents)
    return tokens, general, cut_probes(documents, tokenizer, count=8, chunk_tokens=64, later_passages=True)


def peak(documents):
    """Bytes of Python and NumPy at the most, while documents are prepared."""
    tracemalloc.start()
    try:
        prepared(documents)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_each_word_is_tokenised_once(monkeypatch):
    """Four times the records: no more text for the tokenizer."""
    seen = []
    whole = encoding._whole

    def counting(tokenizer, texts):
        seen.append(sum(map(len, texts)))
        return whole(tokenizer, texts)

    monkeypatch.setattr(encoding, "_whole", counting)
    work = []
    for count in (500, 2000):
        seen.clear()
        Documents("d", records(count)).encode(small_tokenizer())
        work.append(sum(seen))
    assert work[0] == work[1] < 2 * encoding.CHECKED


@pytest.mark.parametrize("kind", ["records", "one document"])
def test_memory_is_a_few_bytes_a_token(kind, monkeypatch):
    """Lists of ids took 36 bytes a token and more; these are four, and a few more while they are put together."""
    monkeypatch.setattr(encoding, "BLOCK", 2**14)  # what is worked on at once is small beside what is kept
    comparing = importlib.import_module("unteach.data.overlap")
    monkeypatch.setattr(comparing, "_BEGINNING", 12)
    monkeypatch.setattr(comparing, "_REST", np.uint64(52))
    monkeypatch.setattr(own, "MOST_CUT", 200)
    sizes = []
    for count in (300, 1200):
        texts = records(count)
        documents = Documents("d", texts if kind == "records" else ["\n".join(texts)])
        tokens = sum(documents.encode(small_tokenizer()).lengths)
        documents._encoded = None
        sizes.append((tokens, peak(documents)))
    (fewer, low), (more, high) = sizes
    assert more > 3.9 * fewer
    assert (high - low) / (more - fewer) < 12


def test_sequences_are_those_of_whole_lists():
    """Put together when asked for, they are what cutting the list of ids gives, ids before and after included."""
    tokenizer = small_tokenizer()
    documents = Documents("d", ["", *records(5), "a", " ".join(records(9))])
    for before, after in (([], []), ([7], []), ([7, 8], [9]), ([7], [9, 9, 9])):
        for mode in ("chunk", "truncate"):
            for longest in (5, 16, 64):
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(batches, "special_ids", lambda tokenizer, ids=(before, after): ids)
                    tokens = tokenise(documents, tokenizer, mode=mode, max_tokens=longest)
                room, expected = longest - len(before), []
                for ids in documents.encode(tokenizer):
                    rest = [*ids, *after] if ids else []
                    pieces = [before + rest[start : start + room] for start in range(0, len(rest), room)]
                    expected += [piece for piece in pieces[: 1 if mode == "truncate" else None] if len(piece) > 1]
                assert tokens.sequences == expected
                assert tokens.sequences.lengths.tolist() == list(map(len, expected))
                assert tokens.counts["tokens"] == sum(map(len, expected))


def test_passages_of_a_sample_are_passages_of_the_documents(monkeypatch):
    monkeypatch.setattr(own, "MOST_CUT", 50)
    texts = [*records(300), *(["too short"] * 300)]
    documents, tokenizer = Documents("d", texts), small_tokenizer()
    sizes = {"prompt_tokens": 16, "expected_tokens": 8, "chunk_tokens": 64, "first_chunk": True}
    probes = cut_probes(documents, tokenizer, count=12, **sizes)
    assert len({probe.document for probe in probes}) == 12
    for probe in probes:
        whole = tokenizer(texts[probe.document])["input_ids"]
        assert [*probe.prompt_ids, *probe.expected_ids] == whole[:24]
    again = cut_probes(documents, tokenizer, count=12, **sizes, seed=1)
    assert {probe.document for probe in again} != {probe.document for probe in probes}


def test_what_is_shared_is_found_with_the_few_numbers_that_matter(monkeypatch):
    """The forget documents' numbers are kept only where the other text has them; what is cut out is the same."""
    forget = [*records(60), " ".join(records(200)), "A note of seven words in all.", "Über die Brücke " * 9]
    others = Documents("g", [*records(80)[55:], forget[60][3000:6000], "x y z " * 99, forget[61], forget[62] + " ä"])
    monkeypatch.setattr(encoding, "BLOCK", 500)
    few, every = SharedPassages(forget, others.texts), SharedPassages(forget)
    assert [few.find(text) for text in others.texts] == [every.find(text) for text in others.texts]
    assert sum(bool(few.find(text)) for text in others.texts) > 7
    assert few._known[13]._sorted.size < every._known[13]._sorted.size / 2
    report, left = overlap(forget, others)
    assert report.documents > 7
    assert "x y z " * 99 in left.texts


def test_only_the_sequences_that_are_drawn_are_read_before_the_first_step(monkeypatch):
    """In the order of the draws, so that a run with more steps has the same and some more."""
    monkeypatch.setattr(batches, "FEW_SEQUENCES", 10)
    many, few = (ForgetBatches([[1, 2, 3]] * count, seed=0) for count in (30, 10))
    assert few.drawn(2, 4) is None
    assert many.drawn(3, 4) == [number for step in range(3) for number in many.numbers(step, 4)]
    assert many.drawn(5, 4)[:12] == many.drawn(3, 4)
    assert sorted(many.drawn(99, 4)) == list(range(30))


def test_words_are_counted_no_further_than_matters(tmp_path):
    for count, little in ((1999, True), (2000, False), (50_000, False)):
        (tmp_path / "d.jsonl").write_text(json.dumps({"text": "a " * count}) + "\n")
        documents = read_documents(str(tmp_path / "d.jsonl"))
        assert Inputs(None, None, documents, documents).little is little
