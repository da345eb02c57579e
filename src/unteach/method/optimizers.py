"""The optimizers a run can use by name, each with a teacher: what ``unteach forget --optimizer NAME`` knows.

To add one, register it here: a class like ``MeanTeacher`` or ``AnchoredAdamW`` with ``teacher_weights()``, ``step()``,
``state_dict()`` and ``last_grad_norm``. Settings that ``config.Method`` has no field for reach it as
``--optimizer-options KEY=VALUE``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unteach.method.anchored_adamw import AnchoredAdamW
from unteach.method.mean_teacher import MeanTeacher

__all__ = ["OPTIMIZERS", "OptimizerKind", "make_optimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """One registered optimizer."""

    summary: str
    """For people."""
    build: Callable[..., Any]
    """``(parameters, **settings)``."""
    settings: tuple[str, ...]
    """The fields of ``config.Method`` that it takes."""
    label: str
    """How results and tables call it."""

    def unknown(self, name: str, options: Iterable[str]) -> list[str]:
        """A line for each option that the optimizer called ``name`` does not take."""
        known = [p for p in list(inspect.signature(self.build).parameters)[1:] if p not in self.settings]
        allowed = ", ".join(known) or "none"
        return [f"optimizer {name!r} has no setting {o!r}: allowed are {allowed}" for o in options if o not in known]


OPTIMIZERS: dict[str, OptimizerKind] = {
    "mean_teacher": OptimizerKind(
        summary="the paper's algorithm: a teacher that slides after the student",
        build=MeanTeacher,
        settings=("lr", "momentum", "teacher_rate", "damping", "clip"),
        label="mt",
    ),
    "adamw": OptimizerKind(
        summary="the baselines, held to the frozen initial model",
        build=AnchoredAdamW,
        settings=("lr", "betas", "weight_decay", "clip", "warmup"),
        label="adamw",
    ),
}


def make_optimizer(parameters: Iterable[Tensor], method: Any) -> Any:
    """The optimizer of a method (``config.Method``) whose numbers are all given.

    Raises:
        ValueError: A number is None still.
    """
    kind = OPTIMIZERS[method.optimizer]
    settings = {name: getattr(method, name) for name in kind.settings}
    if settings.get("warmup", 0) is None:
        del settings["warmup"]
    for name in ("lr", "teacher_rate", "damping"):
        if name in settings and settings[name] is None:
            raise ValueError(f"{name} is None: measure it first with calibrate()")
    return kind.build(parameters, **settings, **method.optimizer_options)
