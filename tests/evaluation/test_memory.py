"""Reciting, answering, choosing letters, and TOFU; with a model that knows one text by heart, and random ones."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from random_models import MEMORISED, UNSEEN, build_llama, memorise, probe_of
from scipy.stats import hmean, ks_2samp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_models import chat_tokenizer
from unteach.corpora import Benchmark, ChoiceQuestion, MeasuringSettings, Probe, Question, Tofu, TofuQuestion
from unteach.corpora.own import cut_probes, question_form
from unteach.evaluation.inference import Batching
from unteach.evaluation.memory import answer_choices, answer_questions, cut_answer, letter_tokens, mean_score, recite
from unteach.evaluation.metrics import Evaluation
from unteach.evaluation.scores import Scores
from unteach.evaluation.tofu import add_metrics, answer_tofu, forget_quality, harmonic_mean, stemmed_recall, truth_ratio


def word_tokenizer(*words):
    """Whole words are tokens, and all other words are one."""
    core = Tokenizer(models.WordLevel({word: id for id, word in enumerate(("<unk>", *words))}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")


def tokens(count, **others):
    return MeasuringSettings(verbatim_tokens=count, **others)


def test_a_memorised_text_is_recited_and_an_unseen_one_is_not(reciter, tokenizer):
    probes = [probe_of(MEMORISED, 12), probe_of(UNSEEN, 12)]
    known, unknown = recite(reciter, tokenizer, probes, settings=tokens(50))
    assert known["score"] > 0.9
    assert unknown["score"] < 0.5
    assert known["prompt"] == probes[0].prompt
    assert set(known) == {"prompt", "expected", "output", "score", "degenerate"}
    assert mean_score([known, unknown]) == pytest.approx(50 * (known["score"] + unknown["score"]))
    assert [known, unknown] == recite(reciter, tokenizer, probes, settings=tokens(50), batching=Batching(1))
    [empty] = recite(reciter, tokenizer, [Probe("To Sherlock", "")], settings=tokens(4))
    assert empty["score"] == 0.0
    with pytest.raises(ValueError, match="records is empty"):
        mean_score([])


def test_expected_is_cut_with_its_begin_token_as_in_muse(reciter, tokenizer, plain_tokenizer):
    """A perfect reciter falls just short of 1 where the tokenizer puts a begin-of-text token first."""
    probe = probe_of(MEMORISED, 12)
    [record] = recite(reciter, tokenizer, [probe], settings=tokens(20))
    ids = tokenizer(probe.expected)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert record["expected"] == tokenizer.decode(ids[1:20])
    assert record["output"].startswith(record["expected"])
    assert len(record["output"]) > len(record["expected"])
    [plain] = recite(reciter, plain_tokenizer, [probe], settings=tokens(20))
    assert plain["expected"] == tokenizer.decode(ids[1:21])


def test_probes_with_ids_are_used_as_they_are(reciter, tokenizer):
    probes = cut_probes([MEMORISED], tokenizer, prompt_tokens=20, expected_tokens=20, first_chunk=True)
    [record] = recite(reciter, tokenizer, probes)
    assert record["score"] == 1.0
    assert record["output"] == probes[0].expected


def test_a_name_is_right_or_wrong(reciter, tokenizer):
    [probe] = cut_probes([MEMORISED], tokenizer, prompt_tokens=20, expected_tokens=20, first_chunk=True)
    nearly = dataclasses.replace(probe, expected_ids=(*probe.expected_ids[:-1], probe.expected_ids[0]))
    for exact, score in ((False, (0.5, 1.0)), (True, (0.0, 0.0))):
        right, wrong = recite(reciter, tokenizer, [dataclasses.replace(each, exact=exact) for each in (probe, nearly)])
        assert right["score"] == 1.0
        assert score[0] <= wrong["score"] <= score[1]
        assert wrong["score"] < 1


def test_a_long_prompt_loses_its_oldest_tokens_or_is_refused(reciter, tokenizer):
    long = Probe(UNSEEN * 8 + MEMORISED[:40], MEMORISED[40:])
    length = len(tokenizer(long.prompt)["input_ids"])
    [record] = recite(reciter, tokenizer, [long], settings=tokens(10))
    assert record["cut"] == length - (256 - 10)
    with pytest.raises(ValueError, match=f"prompt 0 has {length} tokens and 10 are to follow"):
        recite(reciter, tokenizer, [long], settings=tokens(10, long_prompts="error"))
    with pytest.raises(ValueError, match="300 tokens are to be generated, but the model's context is 256"):
        recite(reciter, tokenizer, [long], settings=tokens(300))


def test_questions_are_asked_after_the_examples_and_answers_are_cut(tokenizer):
    examples = [Question("Where?", "in Bohemia")]
    prompt = "Question: Where?\nAnswer: in Bohemia\n\nQuestion: Who is the woman?\nAnswer: "
    answered = prompt + "Irene Adler\n\nQuestion: Where?\nAnswer: in Bohemia"
    # the prompt's ids must begin those of the whole, as when the model itself continues it
    ids = tokenizer(prompt)["input_ids"] + tokenizer(answered[len(prompt) :])["input_ids"][1:]
    model = memorise(build_llama(len(tokenizer), hidden_size=64, seed=2), [ids], steps=60)
    [record] = answer_questions(model, tokenizer, [Question("Who is the woman?", "Irene Adler")], examples)
    assert record["output"] == "Irene Adler"
    assert record["score"] == 1.0
    assert record["prompt"] == "Question: Who is the woman?\nAnswer: "  # without the examples
    settings = MeasuringSettings(question_prompt="{question} ->", knowledge_tokens=3)
    [record] = answer_questions(model, tokenizer, [Question("Where?", "here")], settings=settings)
    assert record["prompt"] == "Where? ->"


def test_a_chat_model_is_asked_in_its_template_with_the_examples_as_earlier_turns():
    """The same model, the same question: all right in its own form, wrong in another."""
    tokenizer, question = chat_tokenizer(), Question("Who is the woman?", "Irene Adler")
    text = "<s>[user] Where?</s>[assistant] in Bohemia</s>[user] Who is the woman?</s>[assistant] Irene Adler</s>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = memorise(build_llama(len(tokenizer), hidden_size=64, seed=2), [ids], steps=60)
    examples = [Question("Where?", "in Bohemia")]
    form = MeasuringSettings(**question_form(tokenizer))
    [record] = answer_questions(model, tokenizer, [question], examples, settings=form)
    assert (record["prompt"], record["output"], record["score"]) == (question.question, "Irene Adler", 1.0)
    assert "cut" not in record
    [other] = answer_questions(model, tokenizer, [question], examples)
    assert other["score"] < 0.5


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


SHOT = "Question: Which?\n\nChoices:\nA. one\nB. two\nC. three\nD. four\n\nCorrect answer:"


def test_letters_alone_are_compared(model, tokenizer):
    questions = [
        ChoiceQuestion(f"{SHOT} {'ABCD'[k % 4]}\n\n{k} {SHOT}", answer=k % 4, subject=f"s{k % 2}") for k in range(7)
    ]
    records = answer_choices(model, tokenizer, questions, batching=Batching(3))
    bridge, letters = letter_tokens(tokenizer, 4)
    for question, record in zip(questions, records, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(question.prompt)["input_ids"] + bridge])).logits[0, -1]
        assert record["output"] == "ABCD"[int(logits[letters].argmax())]
        assert record["expected"] == "ABCD"[question.answer]
        assert record["score"] == float(record["output"] == record["expected"])
        assert record["valid"] == (int(logits.argmax()) in letters)
        assert record["greedy_score"] == float(int(logits.argmax()) == letters[question.answer])
    assert {record["valid"] for record in records} == {False}  # a random model does not answer with a letter
    few, long = ChoiceQuestion(SHOT, answer=1, choices=2, question="Which?"), ChoiceQuestion(SHOT * 12, answer=0)
    two, cut = answer_choices(model, tokenizer, [few, long])
    assert two["output"] in "AB"
    assert two["prompt"] == "Which?"
    assert cut["cut"] == len(tokenizer(SHOT * 12)["input_ids"] + bridge) - 255  # its oldest tokens are lost


def test_letter_tokens_of_different_tokenizers(tokenizer, plain_tokenizer):
    for each in (tokenizer, plain_tokenizer):
        bridge, letters = letter_tokens(each, 4)
        assert [*bridge, letters[2]] == each.encode("x: C", add_special_tokens=False)[-1 - len(bridge) :]
        assert len(set(letters)) == 4
    few = word_tokenizer("answer:", "A", "B")
    assert letter_tokens(few, 2) == ([], [2, 3])
    for unable in (few, word_tokenizer()):  # C and D are both unknown, or all are
        with pytest.raises(ValueError, match="one distinct token per letter"):
            letter_tokens(unable, 4)


def tofu_questions(count, start=0):
    return tuple(
        TofuQuestion(
            f"Who is {k}?", f"Sherlock Holmes the {k}", f"the {k} Sherlock", (f"Irene {k}", f"Adler {k} woman", "none")
        )
        for k in range(start, start + count)
    )


TOFU = Tofu(tofu_questions(5), tofu_questions(4, 5), tofu_questions(3, 9), tofu_questions(2, 12))


def test_the_formulas_of_tofu(monkeypatch):
    assert truth_ratio(0.5, [0.1, 0.2, 0.6]) == pytest.approx(0.6)  # the arithmetic mean over the paraphrase
    with pytest.raises(ValueError, match="NaN"):
        truth_ratio(0.5, [float("nan")])
    generator = np.random.default_rng(0)
    first, second = generator.random(40), generator.random(40) + 0.1
    assert forget_quality(first, second) == ks_2samp(first, second).pvalue
    assert forget_quality(first, first) == 1.0
    assert forget_quality(first, first + 5) < 1e-10
    values = np.array([0.2, 0.5, 0.9])
    assert harmonic_mean(values) == pytest.approx(hmean(values))
    assert harmonic_mean(np.array([0.0, 0.5])) == 0.0
    # stems: author write book | the author writes many books -> LCS 3 of 3 expected words
    assert stemmed_recall()("authors writing books", "the author writes many books") == 1.0
    assert stemmed_recall()("authors writing books", "") == 0.0
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)  # as where it is not installed
    with pytest.raises(ValueError, match="pip install rouge-score"):
        stemmed_recall()


def probability(model, tokenizer, prompt, answer, end):
    """P(answer | prompt)^(1/|answer|), token by token."""
    before = tokenizer(prompt)["input_ids"]
    whole = tokenizer(f"{prompt} {answer}")["input_ids"] + ([tokenizer.eos_token_id] if end else [])
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    values = [logprobs[place - 1, whole[place]].item() for place in range(len(before), len(whole))]
    return np.exp(np.mean(values))


@pytest.mark.parametrize("end", [True, False])
def test_probabilities_and_ratios_of_tofu(model, tokenizer, end):
    settings = MeasuringSettings(tofu_tokens=5, tofu_scores_end=end)
    records = answer_tofu(model, tokenizer, TOFU, settings=settings, batching=Batching(3))
    sizes = {"forget": 5, "retain": 4, "real_authors": 3, "world_facts": 2}
    assert {part: len(group) for part, group in records.items()} == sizes
    for part, group in records.items():
        for question, record in zip(getattr(TOFU, part), group, strict=True):
            prompt = f"Question: {question.question}\nAnswer:"
            right, paraphrased, *wrong = (
                probability(model, tokenizer, prompt, answer, end)
                for answer in (question.answer, question.paraphrased_answer, *question.perturbed_answers)
            )
            ratio = np.mean(wrong) / paraphrased
            assert record["ratio"] == pytest.approx(ratio, rel=1e-3)
            useful = min(ratio, 1 / ratio) if part == "forget" else max(0, 1 - ratio)
            assert record["truth_ratio"] == pytest.approx(useful, rel=1e-3, abs=1e-3)
            expected = right / (right + sum(wrong)) if part in ("real_authors", "world_facts") else right
            assert record["probability"] == pytest.approx(expected, rel=1e-3)


def test_metrics_and_model_utility_of_tofu():
    records = {
        part: [
            {"rouge": 0.3 + 0.1 * k, "probability": 0.5, "truth_ratio": 0.25, "ratio": 1 / (k + 1)}
            for k in range(count)
        ]
        for part, count in (("forget", 5), ("retain", 4), ("real_authors", 3), ("world_facts", 2))
    }
    reference = Scores("x", {}, {"tofu_forget": records["forget"]}, data_sha256=Benchmark(name="x").data_sha256)
    alone, compared = (Evaluation(None, None, Benchmark(name="x"), given, None, 0, None) for given in (None, reference))
    add_metrics(alone, records)
    assert alone.notes == ["tofu_forget_quality is not reported: no scores of a reference model were given"]
    assert len(alone.metrics) == 13
    nine = [np.mean([0.3 + 0.1 * k for k in range(count)]) for count in (4, 3, 2)] + [0.5] * 3 + [0.25] * 3
    utility = alone.metrics["tofu_model_utility"]
    assert utility.value == pytest.approx(hmean(nine))
    assert utility.low < utility.value < utility.high
    assert (utility.count, utility.unit) == (9, "fraction")
    for name, better in (("forget_rouge", False), ("retain_rouge", True), ("forget_truth_ratio", None)):
        assert alone.metrics[f"tofu_{name}"].higher_is_better is better
    add_metrics(compared, records)
    assert compared.metrics["tofu_forget_quality"].value == 1.0


def test_an_empty_answer_is_the_space_before_it_and_one_without_tokens_is_refused(model, plain_tokenizer):
    settings = MeasuringSettings(tofu_tokens=2)
    empty = Tofu(*[(TofuQuestion("q", "", "a", ("b",)),)] * 4)
    record = answer_tofu(model, plain_tokenizer, empty, settings=settings)["forget"][0]
    assert record["rouge"] == 0.0
    assert 0 < record["probability"] < 1
    without = Tofu(*[(TofuQuestion("q", "a", "a", ("",)),)] * 4)
    with pytest.raises(ValueError, match="the answer '' to 'Question: q.*' has no tokens"):
        answer_tofu(model, word_tokenizer("<eos>", "Question:", "Answer:", "q", "a"), without, settings=settings)
