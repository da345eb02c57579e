"""Multiple choice by the letters' logits."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unteach.corpora import ChoiceQuestion
from unteach.evaluation.inference import Batching
from unteach.evaluation.memory import answer_choices, letter_tokens

SHOT = "Question: Which?\n\nChoices:\nA. one\nB. two\nC. three\nD. four\n\nCorrect answer:"


def questions(count):
    return [
        ChoiceQuestion(f"{SHOT} {'ABCD'[k % 4]}\n\n{k} {SHOT}", answer=k % 4, subject=f"s{k % 2}") for k in range(count)
    ]


def test_letters_alone_are_compared(model, tokenizer):
    records = answer_choices(model, tokenizer, questions(7), batching=Batching(3))
    _, letters = letter_tokens(tokenizer, 4)
    for question, record in zip(questions(7), records, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(question.prompt)["input_ids"]])).logits[0, -1]
        assert record["output"] == "ABCD"[int(logits[letters].argmax())]
        assert record["expected"] == "ABCD"[question.answer]
        assert record["score"] == float(record["output"] == record["expected"])
        assert record["valid"] == (int(logits.argmax()) in letters)
        assert record["greedy_score"] == float(int(logits.argmax()) == letters[question.answer])
        assert not (record["greedy_score"] and not record["valid"])
    assert {record["valid"] for record in records} == {False}  # a random model does not answer with a letter


def test_fewer_choices(model, tokenizer):
    [record] = answer_choices(model, tokenizer, [ChoiceQuestion(SHOT, answer=1, choices=2, question="Which?")])
    assert record["output"] in "AB"
    assert record["prompt"] == "Which?"


def test_long_questions_lose_their_oldest_tokens(model, tokenizer):
    [record] = answer_choices(model, tokenizer, [ChoiceQuestion(SHOT * 12, answer=0)])
    assert record["cut"] == len(tokenizer(SHOT * 12)["input_ids"]) - 255


def test_letter_tokens_of_different_tokenizers(tokenizer, plain_tokenizer):
    for each in (tokenizer, plain_tokenizer):
        bridge, letters = letter_tokens(each, 4)
        assert [*bridge, letters[2]] == each.encode("x: C", add_special_tokens=False)[-1 - len(bridge) :]
        assert len(set(letters)) == 4
    words = Tokenizer(models.WordLevel({"<unk>": 0, "answer:": 1, "A": 2, "B": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    few = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert letter_tokens(few, 2) == ([], [2, 3])
    with pytest.raises(ValueError, match="one distinct token per letter"):
        letter_tokens(few, 4)  # C and D are both unknown
    none = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="one distinct token per letter"):
        letter_tokens(PreTrainedTokenizerFast(tokenizer_object=none, unk_token="<unk>"), 4)
