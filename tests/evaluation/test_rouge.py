"""ROUGE-L by hand, and against the rouge-score package."""

import random
import sys

import pytest
from rouge_score.rouge_scorer import RougeScorer

from unteach.data.documents import split_words
from unteach.evaluation import rouge_l
from unteach.evaluation.rouge import _stemming_scorer, longest_common_subsequence, rouge_l_recall_stemmed


def test_hand_computed_value():
    # expected: the cat sat on the mat (6 words), output: the cat lay on a mat (6 words)
    # common subsequence: the cat on mat = 4, so P = R = 4/6 and F = 2/3
    assert rouge_l("The cat sat on the mat.", "the cat lay on a mat") == pytest.approx(2 / 3, abs=1e-15)


def test_precision_and_recall_differ():
    # LCS 2; P = 2/4, R = 2/2, F = 2·(1/2)·1 / (3/2) = 2/3
    assert rouge_l("10 women", "10 women and men") == pytest.approx(2 / 3, abs=1e-15)


@pytest.mark.parametrize(("expected", "output"), [("", "a word"), ("a word", ""), ("", ""), ("...", "..."), ("a", "b")])
def test_nothing_in_common_is_zero(expected, output):
    assert rouge_l(expected, output) == 0.0


def test_one_word_texts():
    assert rouge_l("1472", "1472") == 1.0
    assert rouge_l("1472", "1473") == 0.0


def test_equals_the_rouge_score_package_on_random_texts():
    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    generator = random.Random(0)
    alphabet = ["the", "cat", "Sat", "on", "é", "naïve", "3.14", "don't", "-", "…", "ΩMEGA", "K", "İst", "a_b", "“x”"]
    alphabet.append("\n\n")
    for _ in range(500):
        expected = " ".join(generator.choices(alphabet, k=generator.randrange(30)))
        output = "".join(word + generator.choice(["", " "]) for word in generator.choices(alphabet, k=20))
        assert rouge_l(expected, output) == pytest.approx(scorer.score(expected, output)["rougeL"].fmeasure, abs=1e-15)


def test_common_subsequence_equals_the_textbook_table():
    generator = random.Random(1)
    for _ in range(200):
        first, second = (generator.choices("abcd", k=generator.randrange(12)) for _ in range(2))
        table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i, a in enumerate(first):
            for j, b in enumerate(second):
                table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
        assert longest_common_subsequence(first, second) == table[-1][-1]


def test_other_scripts_need_unicode_words():
    greek, chinese = "η γάτα κάθισε στο χαλί", "猫坐在垫子上"
    assert rouge_l(greek, greek) == 0.0
    assert rouge_l(greek, greek, words="unicode") == 1.0
    assert split_words(chinese + "abc 12", "unicode") == [*chinese, "abc", "12"]
    assert rouge_l(chinese, "猫站在垫子上", words="unicode") == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match=r"'klingon'.*'latin' and 'unicode'"):
        split_words("a", "klingon")


def test_stemmed_recall_is_the_form_of_tofu():
    # stems: author write book | the author writes many books -> LCS 3 of 3 expected words
    assert rouge_l_recall_stemmed("authors writing books", "the author writes many books") == 1.0
    assert rouge_l_recall_stemmed("authors writing books", "") == 0.0


def test_without_the_stemmer_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)  # as where it is not installed
    _stemming_scorer.cache_clear()
    with pytest.raises(ValueError, match="pip install rouge-score"):
        rouge_l_recall_stemmed("a", "a")
