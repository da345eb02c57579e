"""Make a language model forget chosen documents and keep everything else."""

from typing import Any

from unteach.divergences import DIVERGENCES, divergence
from unteach.losses import LOSSES, forget_loss
from unteach.mean_teacher import MeanTeacher

__all__ = ["DIVERGENCES", "LOSSES", "MeanTeacher", "divergence", "evaluate", "forget", "forget_loss"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``forget`` and ``evaluate`` are imported at first use: they need Transformers, the rest only torch."""
    if name == "forget":
        from unteach.job import forget

        return forget
    if name == "evaluate":
        from unteach.evaluation.suite import evaluate

        return evaluate
    raise AttributeError(f"module 'unteach' has no attribute {name!r}")
