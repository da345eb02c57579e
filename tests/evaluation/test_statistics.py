"""Bootstrap intervals."""

import math

import numpy as np
import pytest

from unteach.evaluation.statistics import bootstrap_ratio, checked, mean_metric


def test_mean_with_interval_near_the_normal_one():
    values = np.random.default_rng(0).random(400)
    metric = mean_metric(values, higher_is_better=True)
    error = 100 * values.std() / math.sqrt(400)
    assert metric.value == pytest.approx(100 * values.mean())
    assert metric.low == pytest.approx(metric.value - 1.96 * error, abs=0.25 * error)
    assert metric.high == pytest.approx(metric.value + 1.96 * error, abs=0.25 * error)
    assert metric.count == 400


def test_interval_is_the_same_every_time_and_leaves_global_random_state_alone():
    values = np.linspace(0, 1, 30)
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    assert bootstrap_ratio(values, np.ones(30)) == bootstrap_ratio(values, np.ones(30))
    assert bootstrap_ratio(values, np.ones(30), seed=1) != bootstrap_ratio(values, np.ones(30), seed=2)
    np.testing.assert_array_equal(before, np.random.get_state()[1])


def test_ratio_weights_items_by_their_denominator():
    low, high = bootstrap_ratio([10.0, 10.0, 10.0], [5.0, 5.0, 5.0])
    assert low == high == 2.0
    low, high = bootstrap_ratio([1.0, 100.0], [1.0, 10.0])
    assert low == 1.0
    assert high == 10.0


def test_few_items():
    assert mean_metric([0.25], higher_is_better=False).to_dict() == {
        "value": 25.0,
        "low": None,
        "high": None,
        "count": 1,
        "higher_is_better": False,
        "unit": "percent",
    }
    with pytest.raises(ValueError, match="scores is empty"):
        mean_metric([], higher_is_better=None)


def test_large_sets_are_resampled_in_blocks():
    values = np.arange(5000.0)
    low, high = bootstrap_ratio(values, np.ones(5000))
    assert low < values.mean() < high


def test_checked_names_the_list_and_the_place():
    with pytest.raises(ValueError, match="losses has NaN at 1 of 2 positions, first at 1"):
        checked([0.0, math.nan], "losses")
