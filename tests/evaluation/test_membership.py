"""Min-k, AUC and PrivLeak: by hand, against scikit-learn, and at the edges."""

import math
import zlib

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from unteach.evaluation import membership_auc, min_k, privleak
from unteach.evaluation.membership import SCORES, auc_interval, privleak_interval, resampled_aucs, text_scores


def test_min_k_by_hand():
    # lowest 40 % of five values are two: -(-4 - 3) / 2
    assert min_k([-1.0, -4.0, -2.0, -3.0, -0.5]) == 3.5
    assert min_k([-1.0, -4.0, -2.0, -3.0, -0.5], fraction=1.0) == pytest.approx(10.5 / 5)


def test_min_k_of_one_token_is_its_loss():
    assert min_k([-2.5]) == 2.5
    assert min_k([-2.5, -1.0], fraction=0.05) == 2.5


@pytest.mark.parametrize(
    ("values", "fraction", "message"),
    [
        ([], 0.4, "token_logprobs is empty"),
        ([-1.0, math.nan, math.nan], 0.4, "NaN at 2 of 3 positions, first at 1"),
        ([-1.0], 0.0, "fraction is 0.0"),
        ([-1.0], 1.5, "fraction is 1.5"),
        ([[-1.0]], 0.4, "shape"),
    ],
)
def test_min_k_refuses(values, fraction, message):
    with pytest.raises(ValueError, match=message):
        min_k(values, fraction)


def test_auc_orientation_ties_and_equality_with_scikit_learn():
    assert membership_auc([0.1, 0.2], [3.0, 4.0]) == 0.0  # memorised: low loss on forget
    assert membership_auc([5.0, 6.0], [3.0, 4.0]) == 1.0
    assert membership_auc([1.0, 1.0, 1.0], [1.0, 1.0]) == 0.5  # all equal
    assert membership_auc([1.0], [1.0]) == 0.5
    generator = np.random.default_rng(0)
    for _ in range(20):
        forget, holdout = generator.integers(0, 8, 31) / 4, generator.integers(0, 8, 17) / 4
        expected = roc_auc_score([0] * 31 + [1] * 17, -np.concatenate([forget, holdout]))
        assert membership_auc(forget, holdout) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("position", [0, 1])
def test_auc_refuses_nan_and_empty(position):
    lists = [[1.0, 2.0], [1.0, 2.0]]
    name = ("forget_scores", "holdout_scores")[position]
    for bad, message in (([1.0, math.nan], f"{name} has NaN"), ([], f"{name} is empty")):
        arguments = list(lists)
        arguments[position] = bad
        with pytest.raises(ValueError, match=message):
            membership_auc(*arguments)


def test_privleak_values_and_bounds():
    assert privleak(0.0, 0.4772) == -100.0
    assert privleak(0.4772, 0.4772) == 0.0
    assert privleak(1.0, 0.4772) == pytest.approx(109.5557, abs=1e-4)
    for arguments, message in (
        ((0.5, 0.0), "auc_retrained is 0"),
        ((1.2, 0.5), "auc is 1.2"),
        ((0.5, math.nan), "nan"),
    ):
        with pytest.raises(ValueError, match=message):
            privleak(*arguments)


def test_scores_of_one_text():
    text = "Some Text, some text."
    scores = text_scores(text, [-1.0, -3.0], [-4.0])
    assert tuple(scores) == SCORES
    assert scores["ppl"] == 2.0
    assert scores["ppl_lower"] == 0.5
    assert scores["ppl_zlib"] == 2.0 / len(zlib.compress(text.encode()))
    assert scores["min_5"] == scores["min_40"] == 3.0
    assert "ppl_lower" not in text_scores(text, [-1.0])


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
    low, high = auc_interval(forget, holdout)
    assert low < membership_auc(forget, holdout) < high
    assert 0.1 < high - low < 0.25  # about ±0.08
    assert auc_interval([1.0], holdout) == (None, None)
    assert auc_interval([1.0] * 5, [1.0] * 5) == (0.5, 0.5)
    same = privleak_interval((forget, holdout), (forget, holdout))
    assert same == (0.0, 0.0)  # the same model resampled together has no noise
    fixed = privleak_interval((forget, holdout), 0.5)
    assert fixed[0] < 0 < fixed[1]
