"""Measuring: what a model still recites, knows and leaks, and whether it is still whole."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unteach.evaluation.formulas import is_degenerate, membership_auc, min_k, privleak, rouge_l
    from unteach.evaluation.scores import Scores, evaluate

__all__ = ["Scores", "evaluate", "is_degenerate", "membership_auc", "min_k", "privleak", "rouge_l"]


def __getattr__(name: str) -> Any:
    """Public names are imported at their first use: a report, which reads no model, does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'unteach.evaluation' has no attribute {name!r}")
    home = "scores" if name in ("Scores", "evaluate") else "formulas"
    return getattr(importlib.import_module(f"unteach.evaluation.{home}"), name)
