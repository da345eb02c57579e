"""The optimizers a run can use, each with a teacher: the mean teacher, and AdamW held to the frozen initial model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from unteach.config import Method
from unteach.method.anchored_adamw import AnchoredAdamW
from unteach.method.mean_teacher import MeanTeacher

__all__ = ["make_optimizer"]


def make_optimizer(parameters: Iterable[Tensor], method: Method) -> MeanTeacher | AnchoredAdamW:
    """The optimizer of a method whose numbers are all given."""
    if method.optimizer == "adamw":
        return AnchoredAdamW(
            parameters,
            lr=_given(method, "lr"),
            betas=method.betas,
            weight_decay=method.weight_decay,
            clip=method.clip,
            warmup=method.warmup,
        )
    return MeanTeacher(
        parameters,
        lr=_given(method, "lr"),
        momentum=method.momentum,
        teacher_rate=_given(method, "teacher_rate"),
        damping=_given(method, "damping"),
        clip=method.clip,
    )


def _given(method: Method, name: str) -> float:
    value = getattr(method, name)
    if value is None:
        raise ValueError(f"{name} is None: measure it first with calibrate()")
    return value
