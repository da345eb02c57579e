"""What a run stops at, and what it says before it begins."""

from __future__ import annotations

import pytest

from unteach.config import ForgetConfig, Method
from unteach.data import Documents
from unteach.job.inputs import Inputs
from unteach.job.stop_rule import choice, saw_the_documents, stop_rule

BEFORE = {
    "verbmem_f": 99.0,
    "verbmem_holdout": 12.0,
    "degenerate": 1.0,
    "nll_general": 3.0,
    "knowmem_f": 90.0,
    "auc_forget_holdout_min_40": 0.01,
    "auc_forget_holdout_ppl": 0.02,
}
NEVER_SAW = {
    "verbmem_f": 17.0,
    "knowmem_f": 3.0,
    "knowmem_f_high": 7.0,
    "auc_forget_holdout_min_40": 0.55,
    "auc_forget_holdout_ppl": 0.54,
}


def rule_of(others=None, *, parity=False, before=BEFORE, **settings):
    config = ForgetConfig(model="", **settings).chosen()
    return stop_rule(config, before, others or {}, parity=parity, texts=(64, 64))


def test_without_a_reference_a_run_stops_where_never_seen_text_is_recited():
    rule = rule_of()
    assert [(c.metric, c.comparison, c.value) for c in rule.conditions] == [("verbmem_f", "<=", 12.0)]
    assert "never-seen documents before the run" in str(rule)
    assert rule.most_degenerate == 6.0
    assert rule_of(method=Method(optimizer="adamw")).most_degenerate is None
    assert rule_of({"reference": NEVER_SAW}).conditions[0].value == 17.0


def test_parity_is_recital_membership_and_knowledge_as_far_as_they_are_measured():
    rule = rule_of({"base": NEVER_SAW}, parity=True)
    assert rule.metrics == ["verbmem_f", "auc_forget_holdout_min_40", "auc_forget_holdout_ppl", "knowmem_f"]
    membership = rule.conditions[1]
    assert (membership.value, membership.limit) == (0.5, pytest.approx(0.5512, abs=1e-3))
    assert rule.conditions[3].value == 7.0
    parity = {"verbmem_f": 12.0, "auc_forget_holdout_min_40": 0.51, "auc_forget_holdout_ppl": 0.5, "knowmem_f": 5.0}
    assert rule.crossed(parity)
    assert rule.distance(parity) == 0
    assert rule.unmet(parity | {"auc_forget_holdout_min_40": 0.8}) == [f"{membership} is 0.8"], (
        "overshoot is not parity"
    )
    assert not rule.crossed(parity | {"knowmem_f": 8.0})
    assert rule_of({"reference": NEVER_SAW}, parity=True).conditions[1].value == 0.55
    recital_alone = {name: BEFORE[name] for name in ("verbmem_f", "verbmem_holdout", "degenerate", "nll_general")}
    assert rule_of(parity=True, before=recital_alone).metrics == ["verbmem_f"]
    assert rule_of(parity=True).metrics == ["verbmem_f", "auc_forget_holdout_min_40", "auc_forget_holdout_ppl"]


def test_a_base_model_that_recites_the_documents_is_noticed():
    assert saw_the_documents(NEVER_SAW, BEFORE) is None
    assert "seems to have seen them" in str(saw_the_documents({"verbmem_f": 60.0}, BEFORE))


def test_the_method_follows_from_what_is_given():
    some = Documents("d", ["a"], ["1"], [])

    def line(**given):
        named = dict.fromkeys(given, "x")
        config = ForgetConfig(
            model="m", **{k: v for k, v in named.items() if k in ("keep", "base", "holdout")}
        ).chosen()
        return choice(config, Inputs(None, None, some, some, **given), parity="keep" in given)

    assert line().startswith("mean_teacher with nlul, held on general text; give --keep")
    assert line(keep=some).startswith("adamw with nlul, held on general text and keep documents; give --base")
    assert line(keep=some, base=object(), holdout=some) == ("adamw with match, held on general text and keep documents")
    assert "--holdout" in line(keep=some, base=object())
