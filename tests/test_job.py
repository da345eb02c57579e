"""The stop rule that a run makes for itself."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest

from unteach.config import ForgetConfig
from unteach.corpora import micro
from unteach.evaluation.verbmem import recite
from unteach.job import _scores_before, _stop_rule
from unteach.models import load_model
from unteach.probes import Probes


def test_without_a_reference_recital_may_be_one_standard_error_above_never_seen_text() -> None:
    model, tokenizer = load_model("micro:target", device="cpu")
    whole = micro.load_benchmark("stop")
    start = dataclasses.replace(
        whole,
        verbatim_forget=whole.verbatim_forget[:2],
        verbatim_holdout=whole.verbatim_holdout[:5],
        general_texts=whole.general_texts[:1],
        **dict.fromkeys(("knowledge_forget", "knowledge_retain", "multiple_choice"), ()),
        **dict.fromkeys(("membership_forget", "membership_retain", "membership_holdout"), ()),
    )
    probes = Probes(start=start, stop=dataclasses.replace(start, verbatim_holdout=()), final=start)
    before = _scores_before(model, tokenizer, probes, {"seed": 0, "progress": False})

    recited = [100 * item["score"] for item in recite(model, tokenizer, start.verbatim_holdout)]
    error = statistics.stdev(recited) * math.sqrt(1 / 5 + 1 / 2)
    assert error > 1
    assert before["verbmem_holdout"] == pytest.approx(statistics.mean(recited))
    assert before["recital_error"] == pytest.approx(error)
    rule = _stop_rule(ForgetConfig(model=""), before, None)
    assert rule is not None
    assert rule.value == pytest.approx(statistics.mean(recited) + error)
    assert f"never-seen documents before the run {statistics.mean(recited):.4g}, and one standard error" in str(rule)
    with_reference = _stop_rule(ForgetConfig(model=""), before, {"verbmem_f": 12.0})
    assert with_reference is not None
    assert with_reference.value == 12.0
