"""The rule by which a run ends, from what could be measured; and what a run says of its method before it begins."""

from __future__ import annotations

import math
from collections.abc import Mapping

from unteach.config import ForgetConfig
from unteach.evaluation.metrics import RAW_AUC
from unteach.job.inputs import Inputs
from unteach.training.stopping import Condition, StopRule, parse_rule, stop_at

__all__ = ["choice", "saw_the_documents", "stop_rule"]

MORE_DEGENERATE = 5.0
"""By so many points the share of degenerate output may have risen when a run stops by itself."""
LEAST_BAND = 0.05
"""An AUC may lie so far beyond that of never-seen text, or one standard error of it, if that is more."""
RECITES = 20.0
"""A base model that recites the documents by so many points better than never-seen text has likely seen them."""
LOSS_AUC = "auc_forget_holdout_ppl"


def stop_rule(
    config: ForgetConfig,
    before: Mapping[str, float],
    others: Mapping[str, Mapping[str, float]],
    *,
    parity: bool,
    texts: tuple[int, int],
) -> StopRule:
    """The rule that the config names, or that the documents are where never-seen ones are.

    Args:
        config: Its ``stop.metric`` is taken where there is one.
        before: Scores of the model before the run, ``verbmem_holdout`` among them.
        others: Scores of the ``reference`` and of the ``base`` model, where there are any.
        parity: Whether membership and knowledge count, too, as far as they were measured.
        texts: How many forget and holdout texts the membership AUC compares.
    """
    if config.stop.metric:
        return parse_rule(config.stop.metric, before, others)
    reference = others.get("reference")
    value, why = before["verbmem_holdout"], "never-seen documents before the run"
    if reference is not None:
        value, why = reference["verbmem_f"], "the reference model's"
    if not parity:
        looping = before["degenerate"] + MORE_DEGENERATE if config.method.loops_every else None  # else it may not fall
        return stop_at("verbmem_f", "<=", value, why, most_degenerate=looping)
    high = before.get("verbmem_holdout_high", value) if reference is None else reference.get("verbmem_f_high", value)
    conditions = [Condition("verbmem_f", "<=", max(value, high), f"{why}, within the interval", scale=10.0)]
    if RAW_AUC in before:
        forget, holdout = texts
        band = max(LEAST_BAND, math.sqrt((forget + holdout + 1) / (12 * forget * holdout)))
        centre, whose = (0.5, "never-seen text") if reference is None else (reference[RAW_AUC], "the reference model's")
        conditions.append(Condition(RAW_AUC, ">=", centre, whose, limit=centre + band, scale=0.1))
        loss = 0.5 if reference is None else reference[LOSS_AUC]
        conditions.append(Condition(LOSS_AUC, ">=", loss - band, whose, scale=0.1))
    never_saw = others.get("reference") or others.get("base") or {}
    if "knowmem_f" in before and "knowmem_f_high" in never_saw:
        whose = (
            f"a model that never saw the documents has {never_saw['knowmem_f']:.3g}, at most this within its interval"
        )
        conditions.append(Condition("knowmem_f", "<=", never_saw["knowmem_f_high"], whose, scale=10.0))
    return StopRule(tuple(conditions))


def saw_the_documents(base: Mapping[str, float], before: Mapping[str, float]) -> str | None:
    """A warning where the base model recites the documents, as one would that had seen them; else None."""
    if base["verbmem_f"] <= before["verbmem_holdout"] + RECITES:
        return None
    return (
        f"warning: the base model recites the documents (ROUGE-L {base['verbmem_f']:.3g}, never-seen text "
        f"{before['verbmem_holdout']:.3g}): it seems to have seen them, and what it knows of them will stay"
    )


def choice(config: ForgetConfig, inputs: Inputs, *, parity: bool) -> str:
    """The method in one line, and what more could be given."""
    method = config.method
    held = "general text" if inputs.keep is None else "general text and keep documents"
    line = f"{method.optimizer} with {method.loss}, held on {held}"
    missing = []
    if inputs.keep is None:
        missing.append("--keep, documents like these to be kept, to end knowledge and membership, too")
    elif inputs.base is None:
        missing.append("--base, a model that never saw the documents, to leave no trace in the wording")
    if inputs.holdout is None and parity:
        missing.append("--holdout, documents like these that the model never saw, to see whether they are detectable")
    return line + (f"; give {'; and '.join(missing)}" if missing else "")
