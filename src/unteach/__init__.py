"""Make a language model forget chosen documents and keep everything else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unteach.config import ForgetConfig
    from unteach.evaluation.suite import evaluate
    from unteach.job import forget
    from unteach.method.divergences import DIVERGENCES, divergence
    from unteach.method.losses import LOSSES, forget_loss
    from unteach.method.mean_teacher import MeanTeacher

__all__ = ["DIVERGENCES", "LOSSES", "ForgetConfig", "MeanTeacher", "divergence", "evaluate", "forget", "forget_loss"]
__version__ = "0.2.0"

_HOMES = {
    "DIVERGENCES": "unteach.method.divergences",
    "divergence": "unteach.method.divergences",
    "LOSSES": "unteach.method.losses",
    "forget_loss": "unteach.method.losses",
    "MeanTeacher": "unteach.method.mean_teacher",
    "ForgetConfig": "unteach.config",
    "evaluate": "unteach.evaluation.suite",
    "forget": "unteach.job",
}


def __getattr__(name: str) -> Any:
    """Public names are imported at their first use, so that ``import unteach`` waits for no library."""
    if name not in _HOMES:
        raise AttributeError(f"module 'unteach' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
