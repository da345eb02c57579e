"""What a run measures: kept documents among it, and membership only against documents of the same kind."""

from __future__ import annotations

import pytest

from unteach.config import ForgetConfig
from unteach.corpora import micro
from unteach.data import Documents
from unteach.job.inputs import Inputs
from unteach.job.probes import run_probes
from unteach.models import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("micro:target")


def texts(part, count):
    chosen = micro.documents(part)[:count]
    return Documents(part, chosen, [f"{part} {n}" for n in range(len(chosen))], [])


def probes(tokenizer, *, watched=None, holdout=None, **settings):
    config = ForgetConfig(model="micro:target", probes=8, **settings).chosen()
    inputs = Inputs(None, tokenizer, texts("forget", 6), texts("general", 4), holdout=holdout)
    return run_probes(inputs, texts("general", 4), watched, config, 256, parity=watched is not None)


def test_the_embedded_benchmark_measures_kept_documents_beside_its_own(tokenizer):
    found = probes(tokenizer, documents="micro:forget")
    assert found.final.verbatim_retain == micro.probes("retain", "measure")[:8]
    assert found.start.verbatim_retain == found.stop.verbatim_retain == ()
    assert found.final.membership_holdout


def test_own_documents_are_measured_on_what_was_given(tokenizer):
    alone = probes(tokenizer, documents="x").final
    assert (alone.verbatim_retain, alone.membership_retain, alone.membership_holdout) == ((), (), ())
    assert alone.membership_forget
    kept = probes(tokenizer, documents="x", watched=texts("retain", 3), holdout=texts("holdout", 5)).final
    assert {probe.document for probe in kept.verbatim_retain} == {0, 1, 2}
    assert (len(kept.membership_retain), len(kept.membership_holdout)) == (3, 5)
    short = Documents("short", ["a word"], ["1"], [])
    assert probes(tokenizer, documents="x", watched=short).final.verbatim_retain == (), "too short for a passage"
