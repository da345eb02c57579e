"""Measuring: what a model still recites, knows and leaks, and whether it is still whole."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unteach.evaluation.membership import membership_auc, min_k, privleak
    from unteach.evaluation.repetition import is_degenerate
    from unteach.evaluation.rouge import rouge_l
    from unteach.evaluation.scores import Scores
    from unteach.evaluation.suite import evaluate

__all__ = ["Scores", "evaluate", "is_degenerate", "membership_auc", "min_k", "privleak", "rouge_l"]

_HOMES = {"Scores": "scores", "evaluate": "suite", "is_degenerate": "repetition", "rouge_l": "rouge"}


def __getattr__(name: str) -> Any:
    """Public names are imported at their first use: a report, which reads no model, does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'unteach.evaluation' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unteach.evaluation.{_HOMES.get(name, 'membership')}"), name)
