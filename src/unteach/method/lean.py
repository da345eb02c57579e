"""The mean teacher in 16 bits: 8 bytes a trained weight, and 2 for its gradient, where ``MeanTeacher`` needs 12 and 4.

The student stays in float32. The teacher is kept as the way to the student, u = θ - θ', in float16 with a scale for
each block, and so is the momentum; each micro-batch's gradient is added to a sum in bfloat16 and freed while the
backward pass goes on. All are rounded at random (``rounding.py``), so that small steps add up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unteach.method.mean_teacher import MeanTeacher, check_settings
from unteach.method.rounding import add_rounded, blocks_of, key_of, lean_step, tiles, unpacked
from unteach.method.tensors import global_norm, is_sharded

__all__ = ["LeanMeanTeacher", "ReleasedGradients"]

_GRADIENT, _MOMENTUM, _DISPLACEMENT = range(3)
"""What is rounded, as a part of the key of its random bits."""


class ReleasedGradients:
    """The sum of several backward passes' gradients, in bfloat16, taken from each parameter as soon as it has its own.

    Inside ``collecting()``, a gradient that ``backward`` leaves in ``.grad`` is added here and freed, so that no more
    than one (of compiled blocks: those of one block) is there in float32. The n-th addition to a parameter is rounded
    by (seed, step, parameter, n) alone.
    """

    def __init__(self, parameters: Iterable[Tensor], seed: int = 0) -> None:
        self.seed, self.step = seed, 0
        self.numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self.sums: dict[Tensor, Tensor] = {}
        self._added: dict[Tensor, int] = {}
        for parameter in self.numbers:
            _check_parameter(parameter)

    def clear(self) -> None:
        """Forget all sums, and free them."""
        self.sums, self._added = {}, {}

    def values(self) -> list[Tensor]:
        """The sums, of parameters that had a gradient, in the order of these."""
        return [self.sums[parameter] for parameter in self.numbers if parameter in self.sums]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, gradients are taken as they come."""
        trained = [parameter for parameter in self.numbers if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(self.take) for parameter in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def take(self, parameter: Tensor) -> None:
        """Add a parameter's gradient, if it has one, and free it."""
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise ValueError(f"a gradient has layout {gradient.layout}: use dense ones (sparse=False in the embedding)")
        if parameter not in self.sums:
            self.sums[parameter] = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)
        count = self._added.get(parameter, 0)
        key = key_of(self.seed, self.step, self.numbers[parameter], _GRADIENT, count)
        add_rounded(self.sums[parameter].view(-1), gradient.reshape(-1), key)
        self._added[parameter], parameter.grad = count + 1, None

    def unscale(self, scale: float) -> None:
        """Divide by a power of two, which is exact."""
        if scale != 1 and self.sums:
            torch._foreach_mul_(self.values(), 1 / scale)


class LeanMeanTeacher(MeanTeacher):
    """``MeanTeacher`` with its state in 16 bits, for float32 parameters that are not sharded.

    One step is::

        l = min(1, clip / ‖g‖)             the norm of the very gradient that is used
        v ← μ v + l (g + λ u)
        θ ← θ - η v
        u ← (1 - l η κ) (u - η v)          so that θ' = θ - u slides after θ by a share l η κ

    Args:
        params: As for ``MeanTeacher``. Their gradients are found in ``gradients``, or in ``.grad`` where that was left.
        seed: Of the random bits of rounding, together with the number of the step.

    Attributes:
        gradients: What the next step is made with; let backward passes run inside ``gradients.collecting()``.
        steps_taken: Part of the saved state, so that a resumed run rounds as it would have.
    """

    state_bits = 16

    def __init__(
        self, params: Iterable[Any], lr: float = 5e-4, momentum: float = 0.95, teacher_rate: float = 10.0,
        damping: float = 5.0, clip: float | None = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, momentum, teacher_rate, damping, clip)
        self.seed, self.steps_taken = seed, 0
        self.gradients = ReleasedGradients(self._parameters(), seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients at hand; see ``MeanTeacher.step``."""
        self._refuse_inside_teacher_weights("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_settings(group)
        for parameter in self.gradients.numbers:  # of backward passes outside of ``collecting()``
            self.gradients.take(parameter)
        norm = global_norm(self.gradients.values())
        factor = self._clip_factor(norm)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.gradients.sums:
                    self._step_parameter(parameter, group, factor)
        self.steps_taken += 1
        self.gradients.step = self.steps_taken
        self.last_grad_norm, self.last_clip_factor = norm, factor
        return loss

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any], factor: float) -> None:
        self._initialise(parameter)
        state, drawn = self.state[parameter], (self.seed, self.steps_taken, self.gradients.numbers[parameter])
        lean_step(
            parameter.detach().view(-1),
            (state["displacement"].view(-1), state["scale"]),
            (state["momentum"].view(-1), state["momentum_scale"]),
            self.gradients.sums[parameter].view(-1), group["lr"], group["momentum"], factor, group["damping"],
            factor * group["lr"] * group["teacher_rate"], (key_of(*drawn, _MOMENTUM), key_of(*drawn, _DISPLACEMENT)),
        )  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and free them."""
        super().zero_grad(set_to_none)
        self.gradients.clear()

    @contextmanager
    def teacher_weights(self, besides: Collection[Tensor] = ()) -> Iterator[None]:
        """Let the module compute with the teacher's weights; on leaving, even by an exception, the student is back.

        θ - u is written into the parameters, and θ, set aside for as long, is copied back: nothing is rounded. That
        takes 4 bytes a weight, at a time without gradients. Parameters ``besides`` are left alone, for a pass that
        reads them rounded: give it ``teacher_value`` of each.
        """
        self._refuse_inside_teacher_weights("teacher_weights()")
        left_alone = set(besides)
        parameters = [p for p in self._parameters() if p.requires_grad and p not in left_alone]
        set_aside: list[tuple[Tensor, Tensor]] = []
        self._inside_teacher_weights = True
        try:
            with torch.no_grad():
                for parameter in parameters:
                    if self.state[parameter]:  # else the teacher is the student
                        set_aside.append((parameter, parameter.detach().clone()))
                        self._write_teacher(parameter, parameter.detach())
                yield
        finally:
            with torch.no_grad():
                for parameter, student in set_aside:
                    parameter.copy_(student)
            self._inside_teacher_weights = False

    @torch.no_grad()
    def teacher_value(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """θ - u of a parameter as a new tensor, computed in float32 and rounded to nearest."""
        value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if not self.state[parameter]:
            return value.copy_(parameter)
        self._write_teacher(parameter, value)
        return value

    def _write_teacher(self, parameter: Tensor, into: Tensor) -> None:
        state, student, flat = self.state[parameter], parameter.detach().view(-1), into.view(-1)
        displacement = state["displacement"].view(-1)
        for part, blocks in tiles(len(student)):
            flat[part] = student[part] - unpacked(displacement[part], state["scale"][blocks])

    def state_dict(self) -> dict[str, Any]:
        """``displacement`` and ``momentum`` with the scales of their blocks, and how many steps were taken."""
        return super().state_dict() | {"state_bits": self.state_bits, "steps_taken": self.steps_taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, bit for bit; that of ``MeanTeacher`` is refused."""
        super().load_state_dict(state_dict)
        self.steps_taken = self.gradients.step = state_dict["steps_taken"]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has; the base class knows no other attributes."""
        own = {"seed": self.seed, "steps_taken": self.steps_taken, "gradients": self.gradients}
        return super().__getstate__() | own

    def _kept_as(self, name: str, parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
        if name.endswith("scale"):
            return torch.Size([blocks_of(parameter.numel())]), torch.float32
        return parameter.shape, torch.float16

    def _initialise(self, parameter: Tensor) -> None:
        """Create the state of a parameter at its first step: u = 0 and v = 0."""
        state = self.state[parameter]
        if not state:
            for name in ("displacement", "scale", "momentum", "momentum_scale"):
                shape, dtype = self._kept_as(name, parameter)
                state[name] = torch.zeros(shape, dtype=dtype, device=parameter.device)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        return self.gradients.sums.get(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see ``MeanTeacher.add_param_group``."""
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                _check_parameter(parameter)
        except ValueError:
            self.param_groups.pop()
            raise
        if hasattr(self, "gradients"):  # not in __init__
            self.gradients.numbers = {parameter: number for number, parameter in enumerate(self._parameters())}


def _check_parameter(parameter: Tensor) -> None:
    """Raise unless a parameter can have its state in 16 bits."""
    whole = "leave state_bits at 32"
    if is_sharded(parameter):
        raise ValueError(f"a parameter is sharded over several processes: {whole}")
    if parameter.dtype != torch.float32:
        raise ValueError(f"a parameter has dtype {parameter.dtype}: a state in 16 bits is for float32, {whole}")
    if not parameter.is_contiguous():
        raise ValueError(f"a parameter of shape {list(parameter.shape)} is not contiguous: {whole}")
