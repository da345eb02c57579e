"""What readings say: intervals, controls, and when a model held."""

import pytest

from unteach.audits import Reading
from unteach.audits.judging import FEWEST, figures, judge

HALF = (0.0, 1.0) * 30
NONE = (0.0,) * 60
ALL = (1.0,) * 60


def reading(scores, **given):
    return Reading(**{"line": "recites", "at": 0, "scores": scores} | given)


def judged(after, control=None, holdout=None, **given):
    after, control, holdout = ([each] if each else None for each in (after, control, holdout))
    return judge(after, control, holdout, [], over="steps", control_name="reference", seed=0) | given


def test_figures_are_means_with_intervals():
    (found,) = figures([reading(HALF)], seed=0)
    assert (found["value"], found["count"], found["unit"]) == (50.0, 60, "percent")
    assert 30 < found["low"] < 45 < 55 < found["high"] < 70
    (auc,) = figures([reading((1.0, 2.0, 3.0), against=(0.0, 2.0, 9.0))], seed=0)
    assert auc["value"] == pytest.approx((1 + 1.5 + 2) / 9, abs=1e-4)
    assert auc["unit"] == "auc"


def test_held_against_a_model_item_by_item():
    equal = judged(reading(HALF), reading(HALF))
    assert equal["held"] is True
    assert equal["beyond"][0]["low"] == equal["beyond"][0]["high"] == 0.0, "the same items are drawn for both"
    leaked = judged(reading(ALL), reading(HALF))
    assert leaked["held"] is False
    assert leaked["note"].startswith("beyond the control: recites, steps 0: 100.0 (reference 50.0")


def test_few_items_show_a_leak_and_never_its_absence():
    few = FEWEST - 1
    assert judged(reading(NONE[:few]), reading(NONE[:few]))["held"] is None
    assert judged(reading(ALL[:few]), reading(NONE[:few]))["held"] is False
    assert judged(reading(NONE[:FEWEST]), reading(NONE[:FEWEST]))["held"] is True


def test_saying_less_than_the_control_is_no_proof():
    """A model that refuses, or is broken, recites less than one that never saw the documents."""
    found = judged(reading(NONE), reading(HALF))
    assert found["held"] is None
    assert found["note"].startswith("says less than the control, which may hide what is there")


def test_noise_is_neither():
    assert judged(reading(HALF), None, reading(HALF))["held"] is None, "other items: the interval is wide"


def test_without_a_model_chance_is_the_control_then_holdout():
    by_chance = judged(reading(ALL, chance=NONE), None, reading(ALL))
    assert (by_chance["held"], by_chance["control"][0]["value"]) == (False, 0.0)
    by_holdout = judged(reading(ALL), None, reading(ALL))
    assert (by_holdout["held"], by_holdout["compared_with"]) == (True, "holdout or chance")
    empty = judge([], None, None, [], over="steps", control_name="", seed=0)
    assert (empty["held"], empty["note"]) == (None, "not measured: the documents give nothing to ask")
    nothing = judged(reading(ALL))
    assert nothing["held"] is None
    assert "--reference" in nothing["note"]


@pytest.mark.parametrize("side", [-1, 1])
def test_an_auc_is_two_sided(side):
    texts = tuple(float(place) for place in range(60))
    apart = reading(tuple(side * 100 + text for text in texts), against=texts, chance=0.5, two_sided=True)
    found = judged(apart)
    assert found["held"] is False
    assert found["control"][0]["value"] == 0.5
    same = reading(texts * 5, against=texts * 5, chance=0.5, two_sided=True)
    assert judged(same)["held"] is True


def test_one_line_that_leaks_is_enough():
    after = [reading(NONE), reading(ALL, at=1)]
    control = [reading(NONE), reading(NONE, at=1)]
    found = judge(after, control, None, [], over="steps", control_name="base", seed=0)
    assert [entry["held"] for entry in found["beyond"]] == [True, False]
    assert found["held"] is False
    assert "recites, steps 1" in found["note"]
