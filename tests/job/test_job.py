"""The stop rule that a run makes for itself."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from unteach.config import ForgetConfig
from unteach.corpora import micro
from unteach.evaluation.verbmem import recite
from unteach.job.probes import Probes
from unteach.job.run import _scores_before, _stop_rule
from unteach.models import load_model


def test_without_a_reference_a_run_stops_where_never_seen_text_is_recited() -> None:
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
    assert before["verbmem_holdout"] == pytest.approx(statistics.mean(recited))
    rule = _stop_rule(ForgetConfig(model=""), before, None)
    assert rule is not None
    assert rule.value == before["verbmem_holdout"]
    assert "never-seen documents before the run" in str(rule)
    with_reference = _stop_rule(ForgetConfig(model=""), before, {"verbmem_f": 12.0})
    assert with_reference is not None
    assert with_reference.value == 12.0
