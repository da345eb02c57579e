"""Set alpha, lr, teacher_rate and damping from two measurements on the model itself.

The paper's numbers suit 7B models only. By Theorem 1 a step moves the teacher by κη·u, u = α ‖g‖ / (c + λ̄) along the
forget gradient g, where c = gᵀHg/‖g‖² is the curvature of the divergence in that direction and λ̄ = λ + (1-μ)κ/(1-ηκ).
So ‖g‖, the loss L and c say what the other numbers must be for a wished number of steps N, in any model and under any
scaling of its weights:

- κη = 5/N: the teacher's memory is a fifth of the run.
- λ̄ = 2c: curvature decides wherever it is larger than along g. A tenth of c is explicit damping λ, the rest comes from
  the sliding teacher, which gives η = (1-μ)κη / ((1-κη)(λ̄-λ)).
- α: at that pace a quarter of L/‖g‖, the distance at which the loss would be zero if it fell straight on, is gone in
  N/2 steps.

``docs/scaling.md`` shows the measurements behind the constants. The forget loss is measured as NLUL, whatever the run's
loss is: those of LL and NPO vanish at the start and would say nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unteach.config import ForgetConfig, Method
from unteach.data import ForgetBatches, GeneralText
from unteach.distributed import global_norm, inside, local_part, parts_of_rank, sum_over_ranks
from unteach.passes import forget_term, general_term, hidden_states, in_micro_batches, precision_of_pass
from unteach.vocab_head import Head

__all__ = ["Measured", "calibrated", "measure"]

TEACHER_MEMORY = 5.0
DAMPING_SHARE, EFFECTIVE_DAMPING = 0.1, 2.0
DISTANCE_SHARE = 0.25
ADAMW_LR, ADAMW_ALPHA = 1e-5, 0.05
SMALLEST_DIVERGENCE = 1e-4
"""The step along g is made long enough for this much divergence, far above rounding."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What calibration measures at the start of a run."""

    loss: float
    """NLUL on the forget text."""
    gradient_norm: float
    """‖g‖, its gradient's norm."""
    curvature: float
    """c = gᵀHg/‖g‖² of the divergence on general text."""


def calibrated(method: Method, measured: Measured, wished_steps: int) -> Method:
    """The method with every number given: those that were None follow from the measurement."""
    if method.optimizer == "adamw":
        return dataclasses.replace(method, lr=method.lr or ADAMW_LR, alpha=method.alpha or ADAMW_ALPHA)
    slide = min(0.5, TEACHER_MEMORY / wished_steps)  # κη
    damping = DAMPING_SHARE * measured.curvature if method.damping is None else method.damping
    from_teacher = max(EFFECTIVE_DAMPING * measured.curvature - damping, 1e-3 * measured.curvature)
    lr = method.lr or (1 - method.momentum) * slide / ((1 - slide) * from_teacher)
    teacher_rate = slide / lr if method.teacher_rate is None else method.teacher_rate
    effective = damping + (1 - method.momentum) * teacher_rate / (1 - lr * teacher_rate)
    distance = DISTANCE_SHARE * measured.loss / measured.gradient_norm
    pace = lr * teacher_rate * measured.gradient_norm / (measured.curvature + effective)
    alpha = method.alpha or distance / (pace * wished_steps / 2)
    return dataclasses.replace(method, alpha=alpha, lr=lr, teacher_rate=teacher_rate, damping=damping)


def measure(
    model: Any, parameters: list[Tensor], forget: ForgetBatches, general: GeneralText, config: ForgetConfig
) -> Measured:
    """Loss and gradient of NLUL on a forget batch, and the divergence's curvature along that gradient.

    The model is left as it was, bit for bit.
    """
    device = parameters[0].device
    numbers = forget.numbers(0, 2 * config.batch)
    total = sum(len(forget.sequences[n]) - 1 for n in numbers)
    loss_value = 0.0
    for p in parameters:
        p.grad = None
    with precision_of_pass(config.precision.forget, device):
        for part, weight in parts_of_rank(numbers, lambda x: in_micro_batches(x, config.micro_batch or config.batch)):
            loss, _, tokens = inside(model, forget_term, [forget.sequences[n] for n in part], Method())
            (weight * tokens / total * loss).backward()
            loss_value += weight * tokens / total * float(loss.detach())
    loss_value = sum_over_ranks([loss_value])[0]
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    if any(g is None for g in gradients):
        raise ValueError(
            "a trainable weight has no gradient from the forget text: leave it out of the trainable weights"
        )
    norm = global_norm([g for g in gradients if g is not None])
    direction = [local_part(g) for g in gradients if g is not None]
    if not 0 < norm < torch.inf:
        raise ValueError(f"the forget gradient's norm is {norm}: the model gives no usable signal on these documents")

    values = [local_part(p.detach()) for p in parameters]
    parts = parts_of_rank(general.batch(0, config.general_batch), lambda x: in_micro_batches(x, config.micro_batch))
    with torch.no_grad(), precision_of_pass(config.precision.divergence, device):
        hidden = [inside(model, hidden_states, part)[0] for part, _ in parts]
        head = inside(model, lambda model: Head.of(model).detached())
        start = [value.clone() for value in values]
        step = 0.01 * loss_value / norm
        while True:
            torch._foreach_add_(values, direction, alpha=-step / norm)
            terms = []
            for (chunks, weight), teacher in zip(parts, hidden, strict=True):
                term, tokens = inside(model, general_term, chunks, "kl", teacher, head)
                terms.append((weight * tokens * float(term), weight * tokens))
            torch._foreach_copy_(values, start)
            summed, counted = sum_over_ranks([sum(column) for column in zip(*terms, strict=True)])
            divergence = summed / counted
            if divergence >= SMALLEST_DIVERGENCE or step >= 0.3 * loss_value / norm:
                return Measured(loss_value, norm, max(2 * divergence / step**2, 1e-12))
            step *= 2
