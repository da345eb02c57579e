"""Probes cut from documents, their halves, and questions from files."""

import copy
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tiny_models import CHAT_TEMPLATE
from unteach.corpora import Benchmark, MeasuringSettings, Probe, Question
from unteach.corpora.own import (
    cut_probes,
    names_in,
    own_benchmark,
    read_questions,
    split_probes,
    take_examples,
    with_names,
)
from unteach.data import Documents, tokenise
from unteach.data.documents import decode
from unteach.models import load_tokenizer


def of_words(words):
    """A tokenizer whose tokens are words; a begin-of-text token is put first."""
    vocabulary = {word: number for number, word in enumerate(["<bos>", "<eos>", "<unk>", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="module")
def word_tokenizer():
    return of_words(f"w{number}" for number in range(1000))


def document(first, count):
    return " ".join(f"w{number}" for number in range(first, first + count))


DOCUMENTS = [document(100 * number, 99) for number in range(5)]  # 100 tokens each with <bos>


def test_windows_begin_at_chunk_starts_and_stay_inside(word_tokenizer):
    probes = cut_probes(DOCUMENTS, word_tokenizer, prompt_tokens=20, expected_tokens=10, chunk_tokens=40, count=1000)
    assert len(probes) == 15  # chunks of 40, 40 and 22 tokens, each with <bos>, in each of five documents
    chunks = learned(DOCUMENTS[1:2], word_tokenizer, 40)
    second = [probe for probe in probes if probe.document == 1]
    assert [[*probe.prompt_ids, *probe.expected_ids] for probe in second] == [chunk[:30] for chunk in chunks]
    assert [len(probe.prompt_ids) for probe in second] == [20, 20, 14]  # shorter: divided alike, 22 · 20 // 30
    assert second[1].prompt == word_tokenizer.decode(chunks[1][1:20])
    assert second[1].expected == word_tokenizer.decode(chunks[1][20:30])
    probes = cut_probes(DOCUMENTS[:1], word_tokenizer, prompt_tokens=20, expected_tokens=10)  # by default in a row
    ids = word_tokenizer(DOCUMENTS[0])["input_ids"]
    assert [probe.prompt_ids[0] for probe in probes] == [ids[0], ids[30], ids[60]]  # 10 tokens are left over


def learned(documents, tokenizer, max_tokens, mode="chunk"):
    """The sequences that a run trains on."""
    return tokenise(Documents("documents", list(documents)), tokenizer, mode=mode, max_tokens=max_tokens).sequences


@pytest.mark.parametrize("mode", ["chunk", "truncate"])
def test_every_window_is_the_beginning_of_what_was_learned(word_tokenizer, mode):
    sequences = learned(DOCUMENTS, word_tokenizer, 40, mode)
    options = {"prompt_tokens": 20, "expected_tokens": 10, "chunk_tokens": 40, "count": 1000, "later_passages": True}
    for options["first_chunk"] in (mode == "truncate", True):
        for probe in cut_probes(DOCUMENTS, word_tokenizer, **options):
            whole = [*probe.prompt_ids, *probe.expected_ids]
            assert whole in [sequence[: len(whole)] for sequence in sequences]
    reached = {
        probe.prompt_ids[1] for probe in cut_probes(DOCUMENTS, word_tokenizer, **options | {"first_chunk": False})
    }
    assert (reached <= {sequence[1] for sequence in sequences}) == (mode == "chunk")


def test_few_documents_give_many_probes_deeper_in_their_chunks(word_tokenizer):
    options = {"prompt_tokens": 20, "expected_tokens": 10, "chunk_tokens": 80}
    assert len(cut_probes(DOCUMENTS[:1], word_tokenizer, count=100, **options)) < 5
    probes = cut_probes(DOCUMENTS[:1], word_tokenizer, count=100, later_passages=True, **options)
    chunks = learned(DOCUMENTS[:1], word_tokenizer, 80)
    windows = [[*probe.prompt_ids, *probe.expected_ids] for probe in probes]  # none reaches into the next chunk
    starts = {(next(n for n, c in enumerate(chunks) if c[: len(ids)] == ids), len(ids)) for ids in windows}
    full = [probe for probe in probes if len(probe.expected_ids) == 10]
    assert len(starts) == len(probes), "every expected passage is another one"
    assert {(len(probe.prompt_ids) - 20) % 10 for probe in full} == {0}
    first = cut_probes(DOCUMENTS, word_tokenizer, count=len(DOCUMENTS), later_passages=True, **options)
    assert {len(probe.prompt_ids) + len(probe.expected_ids) for probe in first} <= {*range(31)}, "shallow ones first"


def test_documents_are_encoded_once_for_training_probes_and_membership(word_tokenizer, monkeypatch):
    """The same probes and texts as from plain texts, and the tokenizer reads each document a single time."""
    options = {"prompt_tokens": 20, "expected_tokens": 10, "chunk_tokens": 40, "seed": 3, "count": 7}
    expected = own_benchmark(word_tokenizer, DOCUMENTS, holdout_documents=DOCUMENTS, **options)
    read, encode = [], PreTrainedTokenizerFast.__call__

    def counting(tokenizer, texts, **options):
        read.extend([texts] if isinstance(texts, str) else texts)
        return encode(tokenizer, texts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counting)
    documents = Documents("documents", DOCUMENTS)
    tokenise(documents, word_tokenizer, mode="chunk", max_tokens=40)
    assert own_benchmark(word_tokenizer, documents, holdout_documents=documents, **options) == expected
    assert sorted(text for text in read if text != "a") == sorted(DOCUMENTS)  # "a" asks for the special ids


def test_choice_is_spread_over_documents_and_depends_on_the_seed_alone(word_tokenizer):
    options = {"prompt_tokens": 10, "expected_tokens": 10, "count": 5}
    first = cut_probes(DOCUMENTS, word_tokenizer, seed=1, **options)
    assert sorted(probe.document for probe in first) == [0, 1, 2, 3, 4]
    assert first == cut_probes(DOCUMENTS, word_tokenizer, seed=1, **options)
    assert first != cut_probes(DOCUMENTS, word_tokenizer, seed=2, **options)
    seven = cut_probes(DOCUMENTS, word_tokenizer, seed=1, prompt_tokens=10, expected_tokens=10, count=7)
    assert set(first) < set(seven)


def test_short_documents_and_refusals(word_tokenizer):
    probes = cut_probes([document(0, 5), document(0, 15), ""], word_tokenizer)
    assert [probe.document for probe in probes] == [1]
    assert len(probes[0].prompt_ids) == 16 * 128 // 192
    for texts, options, message in (
        (["w1"], {}, "none of 1 documents has 16 tokens"),
        *((DOCUMENTS, {name: 0}, f"{name} is 0") for name in ("count", "prompt_tokens", "expected_tokens")),
    ):
        with pytest.raises(ValueError, match=message):
            cut_probes(texts, word_tokenizer, **options)


@pytest.mark.parametrize(("documents", "count"), [(5, 100), (5, 5), (1, 100)])
def test_halves_share_no_passage_and_watch_every_document(word_tokenizer, documents, count):
    """Where documents have several probes, both halves watch each of them; with one each, the documents are divided."""
    probes = cut_probes(DOCUMENTS[:documents], word_tokenizer, count=count, prompt_tokens=10, expected_tokens=10)
    first, second = split_probes(probes)
    assert sorted(first + second, key=probes.index) == list(probes)
    assert len(first) - len(second) == len(probes) % 2
    watched = [{probe.document for probe in half} for half in (first, second)]
    assert watched[0] | watched[1] == set(range(documents))
    assert watched[0] & watched[1] == (set() if count == documents else set(range(documents)))
    assert (first, second) == split_probes(probes) != split_probes(probes, seed=1)
    with pytest.raises(ValueError, match="there are 1 probes"):
        split_probes(probes[:1])


RECORD = "Vera Falk lives at 27 Linden Street. Her number, 48213, is Zorn's: in May 1987 Vera owed Šárka 1,250 crowns."


def test_names_and_numbers_of_a_passage_are_asked_for_one_by_one():
    """Not the first word of a sentence, nor one that the prompt tells already; the prompt is all that stands before."""
    tokenizer = load_tokenizer("micro:target")
    ids = tuple(tokenizer(RECORD)["input_ids"])
    for start in (1, 4):
        names = names_in(Probe("", "", ids[:start], ids[start:], document=3), tokenizer)
        expected = ["27", "Linden", "Street", "48213", "Zorn's", "May", "1987", "Šárka", "1,250"]
        assert [name.expected for name in names][-len(expected) :] == expected
        for name in names:
            whole = (*name.prompt_ids, *name.expected_ids)
            assert whole == ids[: len(whole)]
            assert decode(tokenizer, whole).strip() == RECORD[: RECORD.index(name.expected) + len(name.expected)]
            assert decode(tokenizer, name.prompt_ids) == name.prompt
            assert name.exact
            assert name.document == 3
    assert names_in(Probe("", "", ids[:-8], ids[-8:-4]), tokenizer) == [], "a number that goes on in another passage"


def test_names_beside_passages_in_the_share_that_is_asked_for():
    tokenizer = load_tokenizer("micro:target")
    passages = cut_probes([RECORD] * 3, tokenizer, prompt_tokens=8, expected_tokens=8, later_passages=True)
    both = with_names(passages, tokenizer, 1000)
    names = [probe for probe in both if probe.exact]
    assert both[: len(passages)] == passages
    assert {name.document for name in names} == {0, 1, 2}
    assert len(with_names(passages, tokenizer, len(passages) + 2)) == len(passages) + 2
    for share in (0.0, 0.25, 0.5):
        chosen = with_names(passages, tokenizer, 8, share)
        assert (len(chosen), sum(probe.exact for probe in chosen)) == (8, 8 * share)
        assert len(set(chosen)) == 8
    assert len(with_names(passages, tokenizer, 1000, 0.5)) == 2 * len(passages)


def test_questions_from_a_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"q{number}", "answer": number} for number in range(30)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    questions = read_questions(path)
    assert questions[3] == Question("q3", "3")
    scored, examples = take_examples(questions, shots=5)
    assert (len(scored), len(examples)) == (25, 5)
    assert not set(scored) & set(examples)
    assert take_examples(questions[:19], shots=5) == (questions[:19], ())
    for content, message in (
        ('{"question": "q"}', "row 1 has no answer; it has question"),
        ('{"question": "q", "answer": "a"}\n{"question": "q"\n', r"questions\.jsonl, line 2: broken JSON"),
        ("", "there is no question in it"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_questions(path)
    with pytest.raises(ValueError, match="cannot read this kind of file"):
        read_questions(tmp_path / "questions.txt")
    (tmp_path / "questions.csv").write_text('question,answer\n"Where, when?",here\n', encoding="utf-8")
    assert read_questions(tmp_path / "questions.csv") == (Question("Where, when?", "here"),)


def test_benchmark_of_own_documents(word_tokenizer):
    benchmark = own_benchmark(
        word_tokenizer,
        DOCUMENTS,
        holdout_documents=[document(500, 60), "w1 w2"],
        forget_questions=[Question("q", "a")],
        general_texts=[document(700, 40)] * 3,
        count=4,
    )
    counts = {name: len(part) for name, part in vars(benchmark).items() if isinstance(part, tuple) and part}
    documents = {"verbatim_forget": 4, "verbatim_holdout": 1, "membership_forget": 4, "membership_holdout": 1}
    assert counts == documents | {"knowledge_forget": 1, "general_texts": 3, "notes": 2}
    assert "both are of the same kind" in benchmark.notes[0]
    alone = own_benchmark(word_tokenizer, DOCUMENTS)
    assert (alone.membership_forget, alone.verbatim_holdout, alone.settings.words) == ((), (), "latin")


def test_other_scripts_are_counted():
    benchmark = own_benchmark(of_words(["λόγος"]), [" ".join(["λόγος"] * 40)])
    assert benchmark.settings.words == "unicode"
    assert "words of every script" in benchmark.notes[0]


def test_questions_are_asked_in_the_models_own_form_or_as_told(word_tokenizer):
    asked = {"forget_questions": [Question("Who?", "Adler")]}
    plain = own_benchmark(word_tokenizer, DOCUMENTS, **asked)
    assert plain.settings.question_prompt == MeasuringSettings().question_prompt
    assert "questions are asked as 'Question: {question}\\nAnswer: '" in plain.notes
    speaking = copy.deepcopy(word_tokenizer)
    speaking.chat_template = CHAT_TEMPLATE
    chat = own_benchmark(speaking, DOCUMENTS, **asked)
    assert chat.settings.chat_questions
    assert "questions are asked as user turns of the tokenizer's chat template" in chat.notes
    assert chat.data_sha256 != plain.data_sha256
    assert own_benchmark(speaking, DOCUMENTS).settings == MeasuringSettings(membership_tokens=1024), "nothing is asked"
    told = own_benchmark(speaking, DOCUMENTS, question_template=r"Q{1}: {question}\nA:", **asked).settings
    assert not told.chat_questions
    assert told.question_prompt.format(question="Who?") == "Q{1}: Who?\nA:"
    assert told.question_example.format(question="Who?", answer="I") == "Q{1}: Who?\nA: I\n\n"
    assert told.answer_ends == ("\n\n", "\nQ{1}:")


def test_hashes_of_benchmarks_from_before_chat_questions_stay():
    assert Benchmark("b").data_sha256 == "851dabfd79f00ba6f2d430d4fd1a8503aca712881669d893083b2645030e7e74"
