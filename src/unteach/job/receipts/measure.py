"""Measure a model again as a receipt's run did: the same passages, questions and seeds, cut from the texts given."""

from __future__ import annotations

import dataclasses
from typing import Any

from unteach.config import ForgetConfig, Method, Stop
from unteach.errors import InputError
from unteach.evaluation.metrics import RAW_AUC
from unteach.evaluation.scores import Scores
from unteach.job.inputs import Inputs, read_texts
from unteach.job.receipts.receipt import Receipt
from unteach.job.run import ForgetJob
from unteach.job.run_folder import RunFolder
from unteach.models import load_model
from unteach.models.threads import with_threads
from unteach.settings import from_values

__all__ = ["measured_again", "settings_of"]


def settings_of(receipt: Receipt) -> ForgetConfig:
    """The settings of a receipt's run; an ``InputError`` where this version knows them no more."""
    return from_values(ForgetConfig, receipt.content["settings"])


def measured_again(receipt: Receipt, model: str, documents: str | None = None) -> Scores:
    """Everything that the run measured at its end, of this model; ``documents`` where they are elsewhere now."""
    given = settings_of(receipt)
    only_measuring: dict[str, Any] = {"method": Method(), "phases": (), "stop": Stop(), "base": None, "reference": None}
    config = dataclasses.replace(given, **only_measuring, documents=documents or given.documents, device="auto")
    if config.documents == "-":
        raise InputError("documents came from standard input: say where they are, --documents DIR")
    texts = read_texts(config)
    loaded, tokenizer = load_model(model, device=config.resolved_device())
    job = ForgetJob(Inputs(loaded, tokenizer, **texts), with_threads(config, _quietly), None, say=_quietly)
    with RunFolder(None, False, job.shared, private=True) as job.folder:
        job.read_texts()
        reference = receipt.content["scores"].get("reference", {}).get(RAW_AUC)
        level = {"reference_scores": reference["value"]} if reference else {}
        return job.evaluate(loaded, job.probes.final, **level)


def _quietly(line: str) -> None:
    """Says nothing: what the texts are was said by the run itself."""
