"""The mean-teacher optimizer: Algorithms 1 and 2 of the paper as one ``torch.optim.Optimizer``.

A student θ follows an unlearning loss and is held by a divergence, and by damping, to a teacher θ' that slides after
it. Together they approximate slow natural-gradient descent (Theorem 1; ``theory.py`` checks it numerically).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unteach.errors import InputError
from unteach.method import tensors
from unteach.method.divergences import compute_dtype
from unteach.method.tensors import global_norm, local_part, reshard_gathered_modules

__all__ = ["MeanTeacher"]

BUCKET_ELEMENTS = 2**26
"""Weights handled by one foreach call: bounds the temporary memory of a step to a few times this, in float32."""


class MeanTeacher(Optimizer):
    """Student–teacher descent with clipping, damping, momentum and a sliding teacher.

    With g the gradient of αL(θ) + D(θ, θ') (what ``backward`` left in ``.grad``), one step is::

        l  = min(1, clip / ‖g‖)                      ‖·‖ over all parameters of all groups
        v  ← μ v + l (g + λ (θ - θ'))
        θ  ← θ - η v
        θ' ← (1 - l η κ) θ' + l η κ θ                (the new θ)

    ``clip=None`` is Algorithm 1 (l = 1), otherwise Algorithm 2. The teacher starts as the student at the first use.

    Args:
        params: Parameters or parameter groups. A parameter without a gradient is left alone by a step, as in every
            torch optimizer: its value, momentum and teacher stay.
        lr: η, the learning rate.
        momentum: μ in [0, 1).
        teacher_rate: κ. The teacher moves by a share l η κ of its way to the student in each step; η κ is at most 1.
        damping: λ, the weight of ½‖θ - θ'‖².
        clip: c, the largest norm of g, or None. One value for all groups.

    Student, teacher and momentum are kept in float32 (float64 for float64 parameters). For parameters in half precision
    the exact student is kept too, under ``state[p]["student"]``, and each step writes it, rounded, into the parameter:
    a single update is far smaller than the rounding of bfloat16 and would be lost. The module still *computes* with
    rounded weights, in which student and teacher may look the same, so prefer float32 parameters with autocast.

    Differs from the paper: Alg. 2 prints l = 1 / max(‖g‖, c), which equals ours at c = 1 only; ours is what its text
    says. As in the authors' code, the norm is taken without the damping term, and l scales the gradient, the damping
    and the teacher rate.
    """

    # At class level, so that copies and unpickled optimizers, which torch sets up without __init__, have them too.
    last_grad_norm: float | None = None
    """‖g‖ of the last step, before clipping and without the damping term."""
    last_clip_factor: float | None = None
    """l of the last step."""
    state_bits = 32
    """Of each number of teacher and momentum; a state saved with others is refused."""
    _inside_teacher_weights = False

    def __init__(
        self, params: Iterable[Any], lr: float = 5e-4, momentum: float = 0.95, teacher_rate: float = 10.0,
        damping: float = 5.0, clip: float | None = 1.0,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "momentum": momentum, "teacher_rate": teacher_rate, "damping": damping, "clip": clip}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with their own ``lr``, ``momentum``, ``teacher_rate`` or ``damping`` if given."""
        self._refuse_inside_teacher_weights("add_param_group()")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group)
            first = self.param_groups[0]["clip"]
            if group["clip"] != first:
                why = "the norm is taken over all parameters, so give one clip for all groups"
                raise ValueError(f"clip is {group['clip']} here and {first} in the first group: {why}")
            for dtype in (p.dtype for p in group["params"] if not p.is_floating_point()):
                raise ValueError(f"a parameter has dtype {dtype}: only floating-point parameters can be optimized")
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients at hand.

        Raises:
            FloatingPointError: A gradient is infinite or not a number. Nothing has been changed.
        """
        self._refuse_inside_teacher_weights("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        active = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for group, parameters in active:
            check_settings(group)
            for layout in (p.grad.layout for p in parameters if p.grad.layout != torch.strided):
                raise ValueError(f"a gradient has layout {layout}: use dense ones (sparse=False in the embedding)")
        norm = global_norm([p.grad for _, parameters in active for p in parameters])
        clip_factor = self._clip_factor(norm)
        for group, parameters in active:
            for bucket in _buckets(parameters):
                self._step_bucket(bucket, group, clip_factor)
        self.last_grad_norm, self.last_clip_factor = norm, clip_factor
        return loss

    def _clip_factor(self, norm: float) -> float:
        """l, or a ``FloatingPointError`` where the norm is not finite."""
        if not norm < torch.inf:
            raise FloatingPointError(
                f"the gradient norm is {norm}: the step was refused and nothing was changed. {self._first_non_finite()}"
            )
        clip = self.param_groups[0]["clip"]
        return 1.0 if clip is None or norm <= clip else clip / norm

    def _step_bucket(self, parameters: list[Tensor], group: dict[str, Any], clip_factor: float) -> None:
        """One step of parameters of one device and dtype."""
        for parameter in parameters:
            self._initialise(parameter)
        student = [local_part(self.state[p].get("student", p)) for p in parameters]
        teacher = [local_part(self.state[p]["teacher"]) for p in parameters]
        momentum = [local_part(self.state[p]["momentum"]) for p in parameters]
        gradient = [local_part(p.grad).to(v.dtype) for p, v in zip(parameters, momentum, strict=True)]  # type: ignore[arg-type]
        lists = (student, teacher, momentum, gradient)
        step = tensors.fused_step if tensors.is_fusible(*lists) else plain_step
        slide = clip_factor * group["lr"] * group["teacher_rate"]
        step(*lists, group["lr"], group["momentum"], clip_factor, group["damping"], slide)
        if "student" in self.state[parameters[0]]:
            torch._foreach_copy_([local_part(p) for p in parameters], student)

    @contextmanager
    def teacher_weights(self) -> Iterator[None]:
        """Let the module compute with the teacher's weights θ'; on leaving, even by an exception, the student is back.

        Values are exchanged in place, so the same (compiled, sharded) module serves both and no second one is needed.
        Inside, gradients are off, and ``step``, saving, loading and a second ``teacher_weights`` raise.
        """
        self._refuse_inside_teacher_weights("teacher_weights()")
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        exchanged: list[list[Tensor]] = []
        self._inside_teacher_weights = True
        try:
            with torch.no_grad():
                reshard_gathered_modules(parameters)
                for parameter in parameters:
                    self._initialise(parameter)
                for bucket in _buckets(parameters):
                    self._exchange(bucket, entering=True)
                    exchanged.append(bucket)
                yield
        finally:
            with torch.no_grad():
                for bucket in exchanged:
                    self._exchange(bucket, entering=False)
                reshard_gathered_modules(parameters)
            self._inside_teacher_weights = False

    def _exchange(self, parameters: list[Tensor], *, entering: bool) -> None:
        """Exchange parameters and teacher; half-precision parameters are overwritten, the state has their student."""
        values = [local_part(p) for p in parameters]
        teacher = [local_part(self.state[p]["teacher"]) for p in parameters]
        if "student" in self.state[parameters[0]]:
            student = [local_part(self.state[p]["student"]) for p in parameters]
            torch._foreach_copy_(values, teacher if entering else student)
        else:
            tensors.exchange(values, teacher)

    def state_dict(self) -> dict[str, Any]:
        """The state as any torch optimizer gives it: ``teacher``, ``momentum`` and, if half, ``student``."""
        self._refuse_inside_teacher_weights("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, bit for bit.

        The base class casts state to the parameter's dtype, which would round a float32 teacher to bfloat16, and may
        keep the given tensors themselves, which the next step would change. So each is copied here, in its own dtype.
        """
        self._refuse_inside_teacher_weights("load_state_dict()")
        saved = state_dict.get("state_bits", 32)
        if saved != self.state_bits:
            raise InputError(
                f"state_bits is {self.state_bits}: the saved teacher and momentum have {saved}, set it to {saved}"
            )
        super().load_state_dict(state_dict | {"state": {}})
        identifiers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for identifier, parameter in zip(identifiers, parameters, strict=True):
            for name, value in state_dict["state"].get(identifier, {}).items():
                shape, dtype = self._kept_as(name, parameter)
                if value.shape != shape:
                    raise ValueError(
                        f"the saved {name} of parameter {identifier} has shape {list(value.shape)}, the parameter "
                        f"{list(parameter.shape)}: load the state of the same model"
                    )
                self.state[parameter][name] = value.detach().to(parameter.device, dtype, copy=True)

    def _kept_as(self, name: str, parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of a named part of a parameter's state."""
        return parameter.shape, compute_dtype(parameter)

    def _initialise(self, parameter: Tensor) -> None:
        """Create the state of a parameter at its first use: θ' = θ and v = 0."""
        state, dtype = self.state[parameter], compute_dtype(parameter)
        if not state:
            state["teacher"] = parameter.detach().to(dtype, copy=True)
            state["momentum"] = torch.zeros_like(state["teacher"])
            if dtype != parameter.dtype:
                state["student"] = state["teacher"].clone()

    def _first_non_finite(self) -> str:
        """Say which gradient is to blame, as far as this rank can see."""
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                gradient = self._gradient_of(parameter)
                if gradient is not None and not local_part(gradient).isfinite().all():
                    return f"First at parameter {index} of group {number}, shape {list(parameter.shape)}."
        return "All gradients on this process are finite."

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        return parameter.grad

    def _refuse_inside_teacher_weights(self, call: str) -> None:
        if self._inside_teacher_weights:
            raise RuntimeError(
                f"{call} was called inside teacher_weights(): the module holds the teacher; leave it first"
            )


def plain_step(
    student: list[Tensor], teacher: list[Tensor], momentum: list[Tensor], gradient: list[Tensor],
    lr: float, decay: float, clip_factor: float, damping: float, slide: float,
) -> None:  # fmt: skip
    """One step of Algorithm 2, in place, in plain PyTorch: the reference for ``tensors.fused_step``.

    θ, θ', v and g (not changed) with η ``lr``, μ ``decay``, l ``clip_factor``, λ ``damping`` and l η κ ``slide``, the
    teacher's share of the way to the new student.
    """
    torch._foreach_mul_(momentum, decay)
    torch._foreach_add_(momentum, gradient, alpha=clip_factor)
    if damping != 0:
        displacement = torch._foreach_sub(student, teacher)
        torch._foreach_add_(momentum, displacement, alpha=clip_factor * damping)
    torch._foreach_add_(student, momentum, alpha=-lr)
    if slide != 0:
        torch._foreach_lerp_(teacher, student, slide)


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in lists of one device, dtype and gradient dtype, each of about ``BUCKET_ELEMENTS`` weights."""
    started: dict[tuple, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind = (parameter.device, parameter.dtype, None if parameter.grad is None else parameter.grad.dtype)
        bucket, elements = started.pop(kind, ([], 0))
        bucket.append(parameter)
        elements += local_part(parameter).numel()
        if elements >= BUCKET_ELEMENTS:
            yield bucket
        else:
            started[kind] = bucket, elements
    yield from (bucket for bucket, _ in started.values())


def check_settings(group: dict[str, Any]) -> None:
    """Raise unless the settings of a group make sense; run at every step, since schedulers change them."""
    for name in ("lr", "teacher_rate", "damping"):
        if not 0 <= group[name] < torch.inf:
            raise ValueError(f"{name} is {group[name]}: it must be zero or positive, and finite")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum is {group['momentum']}: it must be at least 0 and below 1")
    if group["lr"] * group["teacher_rate"] > 1:
        raise ValueError(
            f"lr · teacher_rate is {group['lr'] * group['teacher_rate']:g}: it must be at most 1, "
            "or the teacher overshoots the student; lower teacher_rate"
        )
    if group["clip"] is not None and not 0 < group["clip"] < torch.inf:
        raise ValueError(f"clip is {group['clip']}: it must be positive, or None for no clipping")
