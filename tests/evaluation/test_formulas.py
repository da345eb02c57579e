"""The measuring formulas: by hand, against scikit-learn, rouge-score and scores of the official MUSE code on 7B models.

A small extract of those is in tests/golden; the full files are used where they lie beside the checkout.
"""

import gzip
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from sklearn.metrics import roc_auc_score

from unteach.data.documents import split_words
from unteach.evaluation import is_degenerate, membership_auc, min_k, privleak, rouge_l
from unteach.evaluation.formulas import bootstrap_ratio, mean_metric, membership_interval, resampled_aucs

ROOT = Path(__file__).resolve().parents[2]
FULL = ROOT.parent / "shared" / "golden"
EXTRACT = json.loads((ROOT / "tests" / "golden" / "muse_7b.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("expected", "output", "score"),
    [
        # common subsequence: the cat on mat = 4 of 6 words each, so P = R = F = 4/6
        ("The cat sat on the mat.", "the cat lay on a mat", 2 / 3),
        # LCS 2; P = 2/4, R = 2/2, F = 2·(1/2)·1 / (3/2)
        ("10 women", "10 women and men", 2 / 3),
        ("1472", "1472", 1),
        *((*pair, 0) for pair in (("", "a word"), ("a word", ""), ("", ""), ("...", "..."), ("1472", "1473"))),
    ],
)
def test_rouge_by_hand(expected, output, score):
    assert rouge_l(expected, output) == pytest.approx(score, abs=1e-15)


def test_rouge_equals_the_rouge_score_package_on_random_texts():
    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    generator = random.Random(0)
    alphabet = ["the", "cat", "Sat", "on", "é", "naïve", "3.14", "don't", "-", "…", "ΩMEGA", "K", "İst", "a_b", "“x”"]
    alphabet.append("\n\n")
    for _ in range(500):
        expected = " ".join(generator.choices(alphabet, k=generator.randrange(30)))
        output = "".join(word + generator.choice(["", " "]) for word in generator.choices(alphabet, k=20))
        assert rouge_l(expected, output) == pytest.approx(scorer.score(expected, output)["rougeL"].fmeasure, abs=1e-15)


def test_other_scripts_need_unicode_words():
    greek, chinese = "η γάτα κάθισε στο χαλί", "猫坐在垫子上"
    assert rouge_l(greek, greek) == 0.0
    assert rouge_l(greek, greek, words="unicode") == 1.0
    assert split_words(chinese + "abc 12", "unicode") == [*chinese, "abc", "12"]
    assert rouge_l(chinese, "猫站在垫子上", words="unicode") == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match=r"'klingon'.*'latin' and 'unicode'"):
        split_words("a", "klingon")


PROSE = "It was not that he felt any emotion akin to love for Irene Adler, he said, and turned to the window."


REPEATING = [
    "nobody will be nobody will be nobody will be nobody will be nobody will be",
    '" " " "',
    '"""""""""""""""""""""""""""""',
    "The Prime Minister said on Tuesday that the the the the the the the the the the the the the",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "他说他说他说他说他说他说他说他说他说他说他说他说",
    "\n\n\n\n\n\n\n\n",
    ", , , , , , , , , , , , , , ,",
    "I am not sure. I am not sure if I am not sure. I am not sure, but I am not sure. I am not sure if I am not.",
    PROSE + " nobody will be" * 4,  # a third of the text: 12 of 35 units
]
NORMAL = [
    "",
    "1472",
    "no, no",
    "10 women and 10 men",
    "1. Astoria Greengrass, 2. Snape, 3. Draco, 4. Harry, 5. Sna",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, "
    "it was the season of Darkness, it was the spring of hope, it was the winter of despair.",
    "“Twinkle, twinkle, little bat! How I wonder what you’re at!” You know the song, perhaps?",
    "Never, never, never! cried the King, and stamped his foot until the whole palace shook.",
    "2001 2002 2003 2004 2005 2006 2007 2008",
    PROSE + " nobody will be" * 3,
]


@pytest.mark.parametrize("text", [*REPEATING, *NORMAL])
def test_what_is_degenerate(text):
    assert is_degenerate(text) == (text in REPEATING)


def test_min_k_by_hand():
    # lowest 40 % of five values are two: -(-4 - 3) / 2
    assert min_k([-1.0, -4.0, -2.0, -3.0, -0.5]) == 3.5
    assert min_k([-1.0, -4.0, -2.0, -3.0, -0.5], fraction=1.0) == pytest.approx(10.5 / 5)
    assert min_k([-2.5]) == 2.5
    assert min_k([-2.5, -1.0], fraction=0.05) == 2.5  # at least one token


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (min_k, ([],), "token_logprobs is empty"),
        (min_k, ([-1.0, math.nan, math.nan],), "token_logprobs has NaN at 2 of 3 positions, first at 1"),
        (min_k, ([-1.0], 0.0), "fraction is 0.0"),
        (min_k, ([-1.0], 1.5), "fraction is 1.5"),
        (min_k, ([[-1.0]],), "shape"),
        (membership_auc, ([1.0, math.nan], [1.0]), "forget_scores has NaN"),
        (membership_auc, ([1.0], [1.0, math.nan]), "holdout_scores has NaN"),
        (membership_auc, ([], [1.0]), "forget_scores is empty"),
        (membership_auc, ([1.0], []), "holdout_scores is empty"),
        (privleak, (0.5, 0.0), "auc_retrained is 0"),
        (privleak, (1.2, 0.5), "auc is 1.2"),
        (privleak, (0.5, math.nan), "nan"),
    ],
)
def test_refusals(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_auc_orientation_ties_and_equality_with_scikit_learn():
    assert membership_auc([0.1, 0.2], [3.0, 4.0]) == 0.0  # memorised: low loss on forget
    assert membership_auc([5.0, 6.0], [3.0, 4.0]) == 1.0
    assert membership_auc([1.0, 1.0, 1.0], [1.0, 1.0]) == 0.5  # all equal
    generator = np.random.default_rng(0)
    for _ in range(20):
        forget, holdout = generator.integers(0, 8, 31) / 4, generator.integers(0, 8, 17) / 4
        expected = roc_auc_score([0] * 31 + [1] * 17, -np.concatenate([forget, holdout]))
        assert membership_auc(forget, holdout) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("auc", "value"), [(0.0, -100.0), (0.4772, 0.0), (1.0, 109.5557)])
def test_privleak_values_and_bounds(auc, value):
    assert privleak(auc, 0.4772) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("corpus", ["books", "news"])
def test_the_extract_of_muse(corpus):
    for metric in ("knowmem_f", "knowmem_r"):
        for item in EXTRACT[corpus]["knowmem"][metric]["items"]:
            assert rouge_l(item["expected"], item["output"]) == pytest.approx(item["rougeL"], abs=1e-6)
    scores, official = (EXTRACT[corpus]["privleak"][part] for part in ("scores", "auc"))
    assert len(official) == 24
    for key, value in official.items():
        first, second, name = key.split("_")
        assert membership_auc(scores[first][name], scores[second][name]) == pytest.approx(value, abs=1e-9)


@pytest.mark.skipif(not FULL.is_dir(), reason=f"the full recorded scores are not at {FULL}")
@pytest.mark.parametrize("name", ["books_npo_klr_7b", "news_task_vector_7b"])
def test_the_full_files_of_muse(name):
    recorded = json.loads(gzip.decompress((FULL / f"{name}.json.gz").read_bytes()))
    for metric in ("knowmem_f", "knowmem_r"):
        items = recorded["knowmem"][metric]["items"]
        scores = [rouge_l(item["expected"], item["output"]) for item in items]
        np.testing.assert_allclose(scores, [item["rougeL"] for item in items], rtol=0, atol=1e-6)
        assert np.mean(scores) == pytest.approx(recorded["knowmem"][metric]["mean_rougeL"], abs=1e-6)
    texts = recorded["privleak"]["scores"]
    pairs = itertools.product(texts, texts, texts["forget"][0])
    columns = {part: lambda name, group=group: [text[name] for text in group] for part, group in texts.items()}
    table = {f"{a}_{b}_{name}": membership_auc(columns[a](name), columns[b](name)) for a, b, name in pairs}
    assert table == pytest.approx(recorded["privleak"]["auc"], abs=1e-9)


def test_resampled_auc_equals_resampling_by_hand():
    forget, holdout = np.array([1.0, 2.0, 2.0, 5.0]), np.array([2.0, 3.0, 0.5])
    generator = np.random.default_rng(7)
    drawn_forget = generator.integers(0, 4, (2000, 4))
    drawn_holdout = generator.integers(0, 3, (2000, 3))
    aucs = resampled_aucs(forget, holdout, seed=7)
    for index in (0, 1, 1999):
        by_hand = membership_auc(forget[drawn_forget[index]], holdout[drawn_holdout[index]])
        assert aucs[index] == pytest.approx(by_hand, abs=1e-12)


def test_intervals_cover_and_pairing_narrows():
    generator = np.random.default_rng(1)
    forget, holdout = generator.normal(0, 1, 100), generator.normal(0, 1, 100)
    low, high = membership_interval((forget, holdout))
    assert low < membership_auc(forget, holdout) < high
    assert 0.1 < high - low < 0.25  # about ±0.08
    assert membership_interval(([1.0], holdout)) == (None, None)
    assert membership_interval(([1.0] * 5, [1.0] * 5)) == (0.5, 0.5)
    assert membership_interval((forget, holdout), (forget, holdout)) == (0.0, 0.0)  # resampled together: no noise
    low, high = membership_interval((forget, holdout), 0.5)
    assert low < 0 < high


def test_mean_with_interval_near_the_normal_one():
    values = np.random.default_rng(0).random(400)
    metric = mean_metric(values, higher_is_better=True)
    error = 100 * values.std() / math.sqrt(400)
    assert metric.value == pytest.approx(100 * values.mean())
    assert metric.low == pytest.approx(metric.value - 1.96 * error, abs=0.25 * error)
    assert metric.high == pytest.approx(metric.value + 1.96 * error, abs=0.25 * error)
    assert metric.count == 400
    few = {"value": 25.0, "low": None, "high": None, "count": 1, "higher_is_better": False, "unit": "percent"}
    assert mean_metric([0.25], higher_is_better=False).to_dict() == few


def test_interval_is_the_same_every_time_and_leaves_global_random_state_alone():
    values = np.linspace(0, 1, 30)
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    assert bootstrap_ratio(values, np.ones(30)) == bootstrap_ratio(values, np.ones(30))
    assert bootstrap_ratio(values, np.ones(30), seed=1) != bootstrap_ratio(values, np.ones(30), seed=2)
    np.testing.assert_array_equal(before, np.random.get_state()[1])


def test_ratio_weights_items_by_their_denominator_and_large_sets_are_resampled_in_blocks():
    assert bootstrap_ratio([10.0, 10.0, 10.0], [5.0, 5.0, 5.0]) == (2.0, 2.0)
    assert bootstrap_ratio([1.0, 100.0], [1.0, 10.0]) == (1.0, 10.0)
    values = np.arange(5000.0)
    low, high = bootstrap_ratio(values, np.ones(5000))
    assert low < values.mean() < high
