"""The optimizers a run can use by name, each with a teacher: what ``unteach forget --optimizer NAME`` knows.

To add one, register it here: a class like ``MeanTeacher`` or ``AnchoredAdamW`` with ``teacher_weights()``, ``step()``,
``state_dict()`` and ``last_grad_norm``. Settings that ``config.Method`` has no field for reach it as
``--optimizer-options KEY=VALUE``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unteach.errors import shown
from unteach.method.lean import LeanMeanTeacher
from unteach.method.mean_teacher import MeanTeacher
from unteach.method.registry import kind_problems
from unteach.method.tensors import global_norm, local_part, other_weights

__all__ = ["OPTIMIZERS", "AnchoredAdamW", "OptimizerKind", "make_optimizer"]


class AnchoredAdamW(torch.optim.AdamW):
    """AdamW as the paper runs its baselines: clipped, warmed up, with a teacher that never moves.

    The teacher is the model at the first use, so ``teacher_weights()`` works as it does for ``MeanTeacher`` and the
    loop has one path. For ``warmup`` steps the learning rate is a share ``warmup_share`` of ``lr`` (the authors' code:
    0.01), then it rises linearly for as many. With a ``cooldown`` it falls linearly after that, in so many steps, to a
    tenth. 0: it stays.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0,
        clip: float | None = 1.0, warmup: int = 100, cooldown: int = 0, warmup_share: float = 0.1,
    ) -> None:  # fmt: skip
        parameters = list(params)
        on_gpu = bool(parameters) and all(isinstance(p, Tensor) and p.device.type == "cuda" for p in parameters)
        # On a GPU in one kernel: otherwise the square roots of all second moments are held at once.
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=on_gpu or None)
        self.peak_lr, self.clip, self.warmup, self.cooldown, self.steps_taken = lr, clip, warmup, cooldown, 0
        self.warmup_share = warmup_share
        self.last_grad_norm: float | None = None
        self.last_clip_factor: float | None = None
        self._teacher: list[Tensor] | None = None
        self._inside_teacher_weights = False

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        risen = min(1.0, max(0.0, (step - self.warmup) / self.warmup)) if self.warmup else 1.0
        fallen = min(1.0, max(0, step - 2 * self.warmup) / self.cooldown) if self.cooldown else 0.0
        return self.peak_lr * min(self.warmup_share + (1 - self.warmup_share) * risen, 0.1 + 0.9 * (1 - fallen))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Clip, set the learning rate, step. Non-finite gradients are refused and change nothing."""
        if self._inside_teacher_weights:
            raise RuntimeError(
                "step() was called inside teacher_weights(): the module holds the teacher; leave it first"
            )
        self._frozen()  # the teacher is the model before the first step
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        norm = global_norm(gradients)
        if not norm < torch.inf:
            raise FloatingPointError(f"the gradient norm is {norm}: the step was refused and nothing was changed")
        factor = 1.0 if self.clip is None or norm <= self.clip else self.clip / norm
        if factor < 1:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)
        for group in self.param_groups:
            group["lr"] = self.learning_rate(self.steps_taken)
        super().step()
        self.steps_taken += 1
        self.last_grad_norm, self.last_clip_factor = norm, factor

    @contextmanager
    def teacher_weights(self) -> Iterator[None]:
        """Let the module compute with the frozen initial weights; see ``MeanTeacher.teacher_weights``."""
        if self._inside_teacher_weights:
            raise RuntimeError("teacher_weights() was called inside teacher_weights(): leave it first")
        self._inside_teacher_weights = True
        try:
            with other_weights(self._parameters(), self._frozen()):
                yield
        finally:
            self._inside_teacher_weights = False

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, the steps taken and the teacher."""
        return super().state_dict() | {"steps_taken": self.steps_taken, "teacher": self._frozen()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self.steps_taken = state_dict["steps_taken"]
        parameters = self._parameters()
        self._teacher = [t.to(p.device, copy=True) for t, p in zip(state_dict["teacher"], parameters, strict=True)]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _frozen(self) -> list[Tensor]:
        if self._teacher is None:
            self._teacher = [p.detach().clone() for p in self._parameters()]
        return self._teacher


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One registered optimizer, built by ``build(parameters, **settings)``."""

    build: Callable[..., Any]
    label: str
    """How results and tables call it."""
    settings: tuple[str, ...]
    """The fields of ``config.Method`` that it takes."""

    def unknown(self, name: str, options: Iterable[str]) -> list[str]:
        """A line for each option that the optimizer called ``name`` does not take."""
        known = [p for p in list(inspect.signature(self.build).parameters)[1:] if p not in self.settings]
        line = f"optimizer {name!r} has no setting {{}}: allowed are {', '.join(known) or 'none'}"
        return [line.format(shown(option)) for option in options if option not in known]

    def problems(self, name: str, options: Mapping[str, Any]) -> list[str]:
        """A line for each option that the optimizer called ``name`` does not take, or not with such a value."""
        return self.unknown(name, options) or kind_problems(inspect.signature(self.build), options)


OPTIMIZERS: dict[str, OptimizerKind] = {
    "mean_teacher": OptimizerKind(MeanTeacher, "mt", ("lr", "momentum", "teacher_rate", "damping", "clip")),
    "adamw": OptimizerKind(AnchoredAdamW, "adamw", ("lr", "betas", "weight_decay", "clip", "warmup")),
}


def make_optimizer(parameters: Iterable[Tensor], method: Any, state_bits: int = 32, seed: int = 0) -> Any:
    """The optimizer of a method (``config.Method``) whose numbers are all given; else a ``ValueError`` is raised.

    With 16 ``state_bits`` it is the lean mean teacher, whose rounding draws from the ``seed``.
    """
    kind = OPTIMIZERS[method.optimizer]
    settings = {name: getattr(method, name) for name in kind.settings}
    if settings.get("warmup", 0) is None:
        del settings["warmup"]
    for name in {"lr", "teacher_rate", "damping"} & settings.keys():
        if settings[name] is None:
            raise ValueError(f"{name} is None: measure it first with calibrate()")
    if state_bits == 16:
        return LeanMeanTeacher(parameters, **settings, **method.optimizer_options, seed=seed)
    return kind.build(parameters, **settings, **method.optimizer_options)
