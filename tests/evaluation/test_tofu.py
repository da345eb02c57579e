"""TOFU's formulas by hand, and its measurement on a tiny model."""

import numpy as np
import pytest
import torch
from scipy.stats import hmean, ks_2samp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unteach.corpora import MeasuringSettings, Tofu, TofuQuestion
from unteach.evaluation.inference import Batching
from unteach.evaluation.tofu import answer_tofu, forget_quality, harmonic_mean, tofu_metrics, truth_ratio


def questions(count, start=0):
    return tuple(
        TofuQuestion(
            f"Who is {k}?", f"Sherlock Holmes the {k}", f"the {k} Sherlock", (f"Irene {k}", f"Adler {k} woman", "none")
        )
        for k in range(start, start + count)
    )


TOFU = Tofu(forget=questions(5), retain=questions(4, 5), real_authors=questions(3, 9), world_facts=questions(2, 12))


def test_truth_ratio_is_the_arithmetic_mean_over_the_paraphrase():
    assert truth_ratio(0.5, [0.1, 0.2, 0.6]) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="NaN"):
        truth_ratio(0.5, [float("nan")])
    with pytest.raises(ValueError, match="empty"):
        truth_ratio(0.5, [])


def test_forget_quality_is_the_p_value_of_the_ks_test():
    generator = np.random.default_rng(0)
    first, second = generator.random(40), generator.random(40) + 0.1
    assert forget_quality(first, second) == ks_2samp(first, second).pvalue
    assert forget_quality(first, first) == 1.0
    assert forget_quality(first, first + 5) < 1e-10


def test_harmonic_mean():
    values = np.array([0.2, 0.5, 0.9])
    assert harmonic_mean(values) == pytest.approx(hmean(values))
    assert harmonic_mean(np.array([0.0, 0.5])) == 0.0


def probability(model, tokenizer, prompt, answer, end):
    """P(answer | prompt)^(1/|answer|), token by token."""
    before = tokenizer(prompt)["input_ids"]
    whole = tokenizer(f"{prompt} {answer}")["input_ids"] + ([tokenizer.eos_token_id] if end else [])
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    values = [logprobs[place - 1, whole[place]].item() for place in range(len(before), len(whole))]
    return np.exp(np.mean(values))


@pytest.mark.parametrize("end", [True, False])
def test_probabilities_and_ratios(model, tokenizer, end):
    settings = MeasuringSettings(tofu_tokens=5, tofu_scores_end=end)
    records = answer_tofu(model, tokenizer, TOFU, settings=settings, batching=Batching(3))
    assert {part: len(group) for part, group in records.items()} == {
        "forget": 5,
        "retain": 4,
        "real_authors": 3,
        "world_facts": 2,
    }
    for part, group in records.items():
        for question, record in zip(getattr(TOFU, part), group, strict=True):
            prompt = f"Question: {question.question}\nAnswer:"
            right, paraphrased, *wrong = (
                probability(model, tokenizer, prompt, answer, end)
                for answer in (question.answer, question.paraphrased_answer, *question.perturbed_answers)
            )
            ratio = np.mean(wrong) / paraphrased
            assert record["ratio"] == pytest.approx(ratio, rel=1e-3)
            if part == "forget":
                assert record["truth_ratio"] == pytest.approx(min(ratio, 1 / ratio), rel=1e-3)
            else:
                assert record["truth_ratio"] == pytest.approx(max(0, 1 - ratio), rel=1e-3, abs=1e-3)
            expected = right / (right + sum(wrong)) if part in ("real_authors", "world_facts") else right
            assert record["probability"] == pytest.approx(expected, rel=1e-3)


def test_metrics_and_model_utility(model, tokenizer):
    records = answer_tofu(model, tokenizer, TOFU, settings=MeasuringSettings(tofu_tokens=5))
    for group in records.values():
        for place, record in enumerate(group):
            record |= {"rouge": 0.3 + 0.1 * place, "probability": 0.5, "truth_ratio": 0.25}
    metrics = tofu_metrics(records, None)
    assert len(metrics) == 13
    nine = [np.mean([0.3 + 0.1 * k for k in range(count)]) for count in (4, 3, 2)] + [0.5] * 3 + [0.25] * 3
    utility = metrics["tofu_model_utility"]
    assert utility.value == pytest.approx(hmean(nine))
    assert utility.low < utility.value < utility.high
    assert utility.count == 9
    assert metrics["tofu_forget_rouge"].higher_is_better is False
    assert metrics["tofu_retain_rouge"].higher_is_better is True
    assert metrics["tofu_forget_truth_ratio"].higher_is_better is None
    with_reference = tofu_metrics(records, [record["ratio"] for record in records["forget"]])
    assert with_reference["tofu_forget_quality"].value == 1.0


def test_an_empty_answer_is_the_space_before_it(model, plain_tokenizer):
    empty = Tofu(*[(TofuQuestion("q", "", "a", ("b",)),)] * 4)
    record = answer_tofu(model, plain_tokenizer, empty, settings=MeasuringSettings(tofu_tokens=2))["forget"][0]
    assert record["rouge"] == 0.0
    assert 0 < record["probability"] < 1


def test_an_answer_without_tokens_is_refused(model):
    words = {"<unk>": 0, "<eos>": 1, "Question:": 2, "Answer:": 3, "q": 4, "a": 5}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    word_tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    empty = Tofu(*[(TofuQuestion("q", "a", "a", ("",)),)] * 4)
    with pytest.raises(ValueError, match="the answer '' to 'Question: q.*' has no tokens"):
        answer_tofu(model, word_tokenizer, empty, settings=MeasuringSettings(tofu_tokens=2))
