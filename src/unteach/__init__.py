"""Make a language model forget chosen documents and keep everything else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unteach.config import ForgetConfig, Method, Precision, Stop
    from unteach.errors import InputError
    from unteach.evaluation import evaluate
    from unteach.job import ForgetResult, forget
    from unteach.method.divergences import DIVERGENCES, divergence
    from unteach.method.losses import LOSSES, forget_loss
    from unteach.method.mean_teacher import MeanTeacher

__all__ = [
    "DIVERGENCES", "LOSSES", "ForgetConfig", "ForgetResult", "InputError", "MeanTeacher", "Method", "Precision", "Stop",
    "divergence", "evaluate", "forget", "forget_loss",
]  # fmt: skip
__version__ = "0.2.0"

_HOMES = {
    "config": ["ForgetConfig", "Method", "Precision", "Stop"],
    "errors": ["InputError"],
    "evaluation.scores": ["evaluate"],
    "job": ["ForgetResult", "forget"],
    "method.divergences": ["DIVERGENCES", "divergence"],
    "method.losses": ["LOSSES", "forget_loss"],
    "method.mean_teacher": ["MeanTeacher"],
}


def __getattr__(name: str) -> Any:
    """Public names are imported at their first use, so that ``import unteach`` waits for no library."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"unteach.{module}"), name)
    raise AttributeError(f"module 'unteach' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
