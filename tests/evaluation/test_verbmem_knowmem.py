"""Reciting and answering, with a model that knows one text by heart."""

import pytest
import torch
from random_models import MEMORISED, UNSEEN, build_llama, memorise

from unteach.corpora import MeasuringSettings, Probe, Question
from unteach.corpora.own import cut_probes
from unteach.evaluation.inference import Batching
from unteach.evaluation.memory import answer_questions, cut_answer, mean_score, recite


def probe_of(text, words):
    parts = text.split(" ")
    return Probe(" ".join(parts[:words]), " " + " ".join(parts[words:]))


def test_a_memorised_text_is_recited_and_an_unseen_one_is_not(reciter, tokenizer):
    known, unknown = recite(reciter, tokenizer, [probe_of(MEMORISED, 12), probe_of(UNSEEN, 12)], tokens=20)
    assert known["score"] > 0.9
    assert unknown["score"] < 0.5
    assert known["prompt"] == probe_of(MEMORISED, 12).prompt
    assert set(known) == {"prompt", "expected", "output", "score", "degenerate"}
    assert mean_score([known, unknown]) == pytest.approx(50 * (known["score"] + unknown["score"]))


def test_expected_is_cut_with_its_begin_token_as_in_muse(reciter, tokenizer, plain_tokenizer):
    """A perfect reciter falls just short of 1 where the tokenizer puts a begin-of-text token first."""
    probe = probe_of(MEMORISED, 12)
    [record] = recite(reciter, tokenizer, [probe], tokens=20)
    ids = tokenizer(probe.expected)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert record["expected"] == tokenizer.decode(ids[1:20])
    assert record["output"].startswith(record["expected"])
    assert len(record["output"]) > len(record["expected"])
    [plain] = recite(reciter, plain_tokenizer, [probe], tokens=20)
    assert plain["expected"] == tokenizer.decode(ids[1:21])


def test_probes_with_ids_are_used_as_they_are(reciter, tokenizer):
    probes = cut_probes([MEMORISED], tokenizer, prompt_tokens=20, expected_tokens=20, first_chunk=True)
    [record] = recite(reciter, tokenizer, probes)
    assert record["score"] == 1.0
    assert record["output"] == probes[0].expected


def test_reciting_between_training_steps_changes_nothing(reciter, tokenizer):
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    probes = [probe_of(MEMORISED, 5), probe_of(UNSEEN, 3)]
    first = recite(reciter, tokenizer, probes, tokens=8)
    assert torch.equal(state, torch.random.get_rng_state())
    assert first == recite(reciter, tokenizer, probes, tokens=8, batching=Batching(1))


def test_a_long_prompt_loses_its_oldest_tokens_or_is_refused(reciter, tokenizer):
    long = Probe(UNSEEN * 8 + MEMORISED[:40], MEMORISED[40:])
    length = len(tokenizer(long.prompt)["input_ids"])
    [record] = recite(reciter, tokenizer, [long], tokens=10)
    assert record["cut"] == length - (256 - 10)
    with pytest.raises(ValueError, match=f"prompt 0 has {length} tokens and 10 are to follow"):
        recite(reciter, tokenizer, [long], tokens=10, long_prompts="error")
    with pytest.raises(ValueError, match="300 tokens are to be generated, but the model's context is 256"):
        recite(reciter, tokenizer, [long], tokens=300)


def test_empty_expected_text_scores_zero(reciter, tokenizer):
    [record] = recite(reciter, tokenizer, [Probe("To Sherlock", "")], tokens=4)
    assert record["score"] == 0.0
    with pytest.raises(ValueError, match="records is empty"):
        mean_score([])


def test_questions_are_asked_after_the_examples_and_answers_are_cut(tokenizer):
    examples = [Question("Where?", "in Bohemia")]
    prompt = "Question: Where?\nAnswer: in Bohemia\n\nQuestion: Who is the woman?\nAnswer: "
    answered = prompt + "Irene Adler\n\nQuestion: Where?\nAnswer: in Bohemia"
    # the prompt's ids must begin those of the whole, as when the model itself continues it
    ids = tokenizer(prompt)["input_ids"] + tokenizer(answered[len(prompt) :])["input_ids"][1:]
    model = memorise(build_llama(len(tokenizer), hidden_size=64, seed=2), [ids])
    [record] = answer_questions(model, tokenizer, [Question("Who is the woman?", "Irene Adler")], examples)
    assert record["output"] == "Irene Adler"
    assert record["score"] == 1.0
    assert record["prompt"] == "Question: Who is the woman?\nAnswer: "  # without the examples


def test_templates_can_be_changed(model, tokenizer):
    settings = MeasuringSettings(question_prompt="{question} ->", knowledge_tokens=3)
    [record] = answer_questions(model, tokenizer, [Question("Where?", "here")], settings=settings)
    assert record["prompt"] == "Where? ->"


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("1472\n\nQuestion: Who", "1472"),
        ("1472\nQuestion: Who", "1472"),
        ("1472 Question: Who", "1472 "),
        ("\n\n1472", ""),
        ("a question of\nsome length", "a question of\nsome length"),
        ("", ""),
    ],
)
def test_where_answers_end(output, answer):
    assert cut_answer(output, MeasuringSettings().answer_ends) == answer
