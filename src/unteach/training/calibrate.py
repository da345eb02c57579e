"""Set alpha, lr, teacher_rate and damping from two measurements on the model itself.

The paper's numbers suit 7B models only. By Theorem 1 a step moves the teacher by κη·α H_λ̄⁻¹g along the forget gradient
g, where λ̄ = λ + (1-μ)κ/(1-ηκ). So ‖g‖, the loss L and the curvature c = gᵀHg/‖g‖² of the divergence in that direction
say what the other numbers must be for a wished number of steps N, in any model and under any scaling of its weights:

- κη = 5/N: the teacher's memory is a fifth of the run.
- ηc = 0.4 (1-μ): the student settles along g within a few steps.
- λ = c/10, so that λ̄ is 0.46 c for N = 40 and 0.23 c for N = 100: a longer run is nearer to the natural gradient.
- α: most directions are far less curved than g's. There the teacher moves by κηα‖g‖/λ̄ a step, and in N steps should
  move by 0.573 times the distance L/‖∇L‖ at which the loss of all tokens would be zero if it fell straight on. (g
  itself is the gradient of the tokens that the loss looks at, see ``token_share``.)

``docs/scaling.md`` shows the measurements behind the constants. The forget loss is measured as NLUL, whatever the run's
loss is: those of LL and NPO vanish at the start and would say nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unteach.config import ForgetConfig, Method
from unteach.data import ForgetBatches, GeneralText
from unteach.errors import InputError
from unteach.method.divergences import NLL
from unteach.method.lean import ReleasedGradients
from unteach.method.optimizers import OPTIMIZERS
from unteach.method.tensors import global_norm, local_part
from unteach.method.theory import effective_damping
from unteach.method.vocab_head import Head
from unteach.models.distributed import inside, parts_of_rank, ranks, sum_over_ranks
from unteach.models.precision import resolved_precision
from unteach.training.fitting import halving
from unteach.training.passes import (
    HeldText,
    LogOddsOfModel,
    Pull,
    computing,
    held_term,
    in_micro_batches,
    read,
    read_change,
)
from unteach.training.step import FARTHEST, accumulate

__all__ = [
    "Measured",
    "calibrated",
    "curvatures",
    "is_complete",
    "measure",
    "noise_warning",
    "numbers",
    "rounding_noise",
]

TEACHER_MEMORY = 5.0
DAMPING_SHARE, STEP_SHARE = 0.1, 0.4
TEACHER_WAY = 0.573
WEIGHT_SHARE, COOLDOWN = 0.0055, 150
"""AdamW moves every weight by about its learning rate: this share of their size (root mean square), at first, falling
over so many steps, or over the expected ones if they are more."""
ADAMW_ALPHA = 0.2
SMALLEST_DIVERGENCE, IN_BF16 = 1e-4, 1e-3
"""The step along g is made long enough for this much divergence, far above rounding: bf16's alone makes 9e-5 on the
embedded model, and is subtracted, too."""
POWER_STEPS = 12
NOISE_SAMPLE = 4
"""Sequences of each kind on which rounding is measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What calibration measures at the start of a run."""

    loss: float
    """NLUL of the forget text, of the tokens that the loss looks at."""
    gradient_norm: float
    """‖g‖."""
    curvature: float
    """c = gᵀHg/‖g‖² of the divergence on general text."""
    distance: float
    """NLUL of all tokens divided by its gradient's norm."""
    weight: float = math.nan
    """The size of a weight in a matrix: the root of their mean square."""


def is_complete(method: Method) -> bool:
    """Whether every number of a method is given."""
    measured = {"lr", "teacher_rate", "damping"} & {*OPTIMIZERS[method.optimizer].settings}
    return all(getattr(method, name) is not None for name in ("alpha", *measured))


def calibrated(method: Method, measured: Measured, expected_steps: int) -> Method:
    """The method with every number given: those that were None follow from the measurement."""
    if method.optimizer != "mean_teacher":
        falls = method.lr is None and not OPTIMIZERS[method.optimizer].unknown(method.optimizer, ["cooldown"])
        falling = {"cooldown": max(COOLDOWN, expected_steps)} if falls else {}
        return dataclasses.replace(
            method,
            lr=method.lr or WEIGHT_SHARE * measured.weight,
            alpha=method.alpha or ADAMW_ALPHA,
            optimizer_options=falling | dict(method.optimizer_options),
        )
    slide = min(0.5, TEACHER_MEMORY / expected_steps)  # κη
    damping = DAMPING_SHARE * measured.curvature if method.damping is None else method.damping
    lr = method.lr or STEP_SHARE * (1 - method.momentum) / measured.curvature
    teacher_rate = slide / lr if method.teacher_rate is None else method.teacher_rate
    if not 0 < lr * teacher_rate < 1:
        if method.alpha is None:
            raise InputError(
                f"teacher_rate is {teacher_rate:g} and lr {lr:g}: alpha is measured only for a teacher that slides, lr "
                "· teacher_rate between 0 and 1; give alpha too"
            )
        return dataclasses.replace(method, lr=lr, teacher_rate=teacher_rate, damping=damping)
    effective = effective_damping(damping, teacher_rate, lr, method.momentum)
    pace = lr * teacher_rate * measured.gradient_norm / effective
    alpha = method.alpha or TEACHER_WAY * measured.distance / (pace * expected_steps)
    return dataclasses.replace(method, alpha=alpha, lr=lr, teacher_rate=teacher_rate, damping=damping)


def numbers(method: Method, measured: Measured) -> str:
    """What was measured, and the numbers of a method that follow from it, in a line."""
    found = f"measured: loss {measured.loss:.3g}, gradient norm {measured.gradient_norm:.3g}"
    if method.optimizer != "mean_teacher":
        return f"{found}, weights of size {measured.weight:.3g}; so lr {method.lr:.3g}; alpha is {method.alpha:.3g}"
    rates = f", teacher rate {method.teacher_rate:.3g}" if method.teacher_rate else ""
    rates += f", damping {method.damping:.3g}" if method.damping and method.teacher_rate else ""
    return f"{found}, curvature {measured.curvature:.3g}; so alpha {method.alpha:.3g}, lr {method.lr:.3g}{rates}"


def measure(
    model: Any, parameters: list[Tensor], forget: ForgetBatches, general: GeneralText, config: ForgetConfig
) -> Measured:
    """Loss and gradient of NLUL on a forget batch, and the divergence's curvature along that gradient.

    The model is left as it was, bit for bit. Batches are read in smaller parts where memory runs out.
    """
    return halving(config, functools.partial(_measure, model, parameters, forget, general))[0]


def _measure(
    model: Any, parameters: list[Tensor], forget: ForgetBatches, general: GeneralText, config: ForgetConfig
) -> Measured:
    """See ``measure``."""
    sequences = [forget.sequences[n] for n in forget.numbers(0, 2 * config.batch)]
    loss, signal, norm, direction = _gradient_of_halves(model, parameters, sequences, config, 1.0)
    distance = loss / signal if signal else math.nan
    share = config.method.token_share or 1.0
    if share < 1:
        loss, signal, norm, direction = _gradient_of_halves(model, parameters, sequences, config, share)
    if not 0 < norm < torch.inf:
        raise InputError(f"the forget gradient's norm is {norm}: the model gives no usable signal on these documents")

    held = _held(model, general.batch(0, config.general_batch), "kl", config.micro_batch, config)
    step, divergence = _moved(model, parameters, direction, held, config, 0.01 * distance / norm, 0.3 * distance / norm)
    curvature = max(2 * divergence / (step * norm) ** 2, 1e-12)
    matrices = [p.detach() for p in parameters if p.dim() > 1] or [p.detach() for p in parameters]
    weight = global_norm(matrices) / math.sqrt(sum(p.numel() for p in matrices))  # of all ranks, both
    return Measured(loss, signal, curvature, distance, weight)


def _gradient_of_halves(
    model: Any, parameters: list[Tensor], sequences: list[list[int]], config: ForgetConfig, share: float
) -> tuple[float, float, float, list[Tensor]]:
    """NLUL of sequences, ‖∇L‖ without and with the noise in it, and ∇L, from the gradients of two halves.

    The square of a mini-batch's gradient counts its noise as signal (34 where all documents of the embedded benchmark
    give 10.6); the product of two halves' gradients, whose noise is independent, does not. Where noise hides even its
    sign, the square is taken.
    """
    losses, halves = [], []
    released = _released(parameters, config)
    for half in (sequences[::2], sequences[1::2]) if len(sequences) > 1 else (sequences, sequences):
        losses.append(_forget_gradient(model, parameters, half, config, share, released))
        found = _taken(parameters, released)
        if any(gradient is None for gradient in found):
            remedy = "leave it out of the trainable weights"
            raise InputError(f"a trainable weight has no gradient from the forget text: {remedy}")
        halves.append([local_part(gradient) for gradient in found if gradient is not None])
    product = float(sum((a.double() * b.double()).sum() for a, b in zip(*halves, strict=True)))
    mean = [((a.float() + b) / 2).to(a.dtype) if a.dtype.itemsize == 2 else (a + b) / 2
            for a, b in zip(*halves, strict=True)]  # fmt: skip
    square = float(sum(value.double().square().sum() for value in mean))
    product, square = sum_over_ranks([product, square])
    return sum(losses) / 2, math.sqrt(product if product > 0 else square), math.sqrt(square), mean


def _moved(
    model: Any, parameters: list[Tensor], direction: list[Tensor], held: HeldText, config: ForgetConfig,
    step: float, longest: float,
) -> tuple[float, float]:  # fmt: skip
    """A step against a direction, doubled until the divergence it makes is far above rounding, and that divergence.

    Rounding in bf16 adds about as much at half the step, whose divergence is a quarter: from both follows what it is
    without. At 1e-4 and not so, the curvature measured was 1.6 to 1.9 times the true one.
    """
    values = [local_part(p.detach()) for p in parameters]
    coarse = resolved_precision(config.precision.divergence, values[0].device) == "bf16"

    def divergence_at(step: float) -> float:
        torch._foreach_add_(values, direction, alpha=-step)
        terms = []
        try:
            with computing(model, config.precision.divergence):
                for part, (_, weight) in enumerate(held.parts):
                    term, tokens = inside(model, held_term, held, part)
                    terms.append((weight * tokens * float(term), weight * tokens))
        finally:
            torch._foreach_copy_(values, start)
        summed, counted = sum_over_ranks([sum(column) for column in zip(*terms, strict=True)])
        return summed / counted

    with torch.no_grad():
        lean = config.state_bits == 16  # then there may be no room for a copy beside the weights
        start = [value.to("cpu" if lean else value.device, copy=True) for value in values]
        while (found := divergence_at(step)) < (IN_BF16 if coarse else SMALLEST_DIVERGENCE) and step < longest:
            step *= 2
        return step, 4 / 3 * (found - divergence_at(step / 2)) if coarse else found


def curvatures(
    model: Any, parameters: list[Tensor], general: GeneralText, config: ForgetConfig, seed: int = 0
) -> tuple[float, float]:
    """The divergence's curvature along a random direction, and the largest, to check a learning rate against.

    The first is vᵀHv of a random unit vector v, the mean of all curvatures; the second is found from there by
    ``POWER_STEPS`` steps of power iteration, v ← ∇D(θ + εv), which is Hεv. Heavy-ball steps are stable below
    η λ_max = 2 (1 + μ). The model is left as it was, bit for bit; for one process only.
    """
    held = _held(model, general.batch(0, config.general_batch), "kl", config.micro_batch, config)
    draws = torch.Generator().manual_seed(seed)
    way = [torch.randn(p.shape, generator=draws, dtype=torch.float64).to(p) for p in parameters]
    start = [p.detach().clone() for p in parameters]
    found: list[float] = []
    length = 1e-2 * global_norm(start)
    for _ in range(1 + POWER_STEPS):
        norm = global_norm(way)
        way = [part / norm for part in way]
        with torch.no_grad():
            torch._foreach_add_(parameters, way, alpha=length)
        accumulate(model, parameters, [], [held], 1.0, config)
        slope = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        found.append(float(sum((s.double() * w.double()).sum() for s, w in zip(slope, way, strict=True))) / length)
        way = slope
        length = math.sqrt(2e-4 / max(found[-1], 1e-12))  # for a divergence of 1e-4 there
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        for p in parameters:
            p.grad = None
    return found[0], found[-1]


def _held(
    model: Any, sequences: list[list[int]], divergence: str, micro_batch: int | None, config: ForgetConfig
) -> HeldText:
    """Text that is held to the model as it is now."""
    parts = parts_of_rank(range(len(sequences)), lambda numbers: in_micro_batches(numbers, micro_batch))
    reading = read(model, sequences, parts, config, config.precision.divergence)
    return HeldText(sequences=sequences, parts=parts, divergence=divergence, readings=[(1.0, reading)])


def noise_warning(
    model: Any, parameters: list[Tensor], forget: ForgetBatches, general: GeneralText, config: ForgetConfig
) -> str | None:
    """A line for people where rounding would hide the first steps' signal, see ``rounding_noise``; else None.

    In fp32, for sharded weights, and where no teacher is compared with, nothing is measured.
    """
    chosen = resolved_precision(config.precision.divergence, parameters[0].device)
    if chosen == "fp32" or ranks() > 1 or (*config.phases, config.method)[0].divergence == NLL:
        return None
    noise, signal = rounding_noise(model, parameters, forget, general, config)
    if noise <= signal:
        return None
    other = ", or divergence_form to tangent" if config.divergence_form == "difference" else ""
    return (
        f"warning: precision.divergence is {chosen}, whose rounding changes the gradient by {noise:.2g} where the "
        f"signal of the first steps is {signal:.2g}: set it to {'fp16 or fp32' if chosen == 'bf16' else 'fp32'}{other}"
    )


def rounding_noise(
    model: Any, parameters: list[Tensor], forget: ForgetBatches, general: GeneralText, config: ForgetConfig
) -> tuple[float, float]:
    """How much rounding changes the divergence's gradient in the first steps, and the signal that it adds to.

    Student and teacher are the same network but for the first steps' way, which is taken along the forget gradient g:
    1/(1-μ) steps of the mean teacher, one of AdamW. There the gradient is computed in the run's precision and in fp32:
    the noise is ‖∇D computed - ∇D in fp32‖, the signal α‖g‖, g that of NLUL, both on a few sequences. The model is left
    as it was, bit for bit.
    """
    method = (*config.phases, config.method)[0]
    exact_config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, divergence="fp32"))
    sample = min(NOISE_SAMPLE, config.micro_batch or NOISE_SAMPLE)
    sequences = [forget.sequences[n] for n in forget.numbers(0, min(sample, config.batch))]
    released = _released(parameters, config)
    _forget_gradient(model, parameters, sequences, config, config.method.token_share or 1.0, released)
    direction = _taken(parameters, released)
    norm = global_norm([gradient for gradient in direction if gradient is not None])
    signal = (method.alpha or 1.0) * norm
    text = general.batch(0, min(sample, config.general_batch))
    chosen, exact = (_held(model, text, method.divergence, None, c) for c in (config, exact_config))
    head = Head.of(model).detached()
    start = [p.detach().to("cpu" if released else p.device, copy=True) for p in parameters]
    lr = method.lr or 0.0
    if method.optimizer == "adamw":  # moves each weight by lr
        way = lr * math.sqrt(sum(p.numel() for p in parameters)) * (0.1 if method.warmup else 1.0)
    else:
        way = lr * (signal if method.clip is None else min(signal, method.clip)) / (1 - method.momentum)
    with torch.no_grad():
        for p, gradient in zip(parameters, direction, strict=True):
            if gradient is not None and norm:
                p.sub_(gradient, alpha=way / norm)
    del direction
    try:
        if config.divergence_form == "tangent":
            moved = [p.detach() - before for p, before in zip(parameters, start, strict=True)]
            used = resolved_precision(config.precision.divergence, parameters[0].device)
            near = read_change(model, parameters, moved, head, [chosen], used, farthest=FARTHEST[used])
            if near is not None:
                chosen = dataclasses.replace(chosen, readings=[(1.0, near[0])])
        accumulate(model, parameters, [], [chosen], 1.0, config, released=released)
        rounded = _taken(parameters, released)
        accumulate(model, parameters, [], [exact], 1.0, exact_config, released=released)
        pairs = zip(_taken(parameters, released), rounded, strict=True)
        return global_norm([e - r for e, r in pairs if e is not None and r is not None]), signal
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        for p in parameters:
            p.grad = None


def _released(parameters: list[Tensor], config: ForgetConfig) -> ReleasedGradients | None:
    """Where gradients are kept in 16 bits, a place for them."""
    return ReleasedGradients(parameters, config.seed) if config.state_bits == 16 else None


def _taken(parameters: list[Tensor], released: ReleasedGradients | None) -> list[Tensor | None]:
    """The gradients of the last ``accumulate``, which nothing else holds any longer."""
    if released is not None:
        found = [released.sums.get(p) for p in parameters]
        released.clear()
        return found
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def _forget_gradient(
    model: Any, parameters: list[Tensor], sequences: list[list[int]], config: ForgetConfig, share_of_tokens: float,
    released: ReleasedGradients | None = None,
) -> float:  # fmt: skip
    """NLUL of sequences, its gradient left in ``.grad``, or in ``released``."""
    chosen = None
    if share_of_tokens < 1:
        initial = LogOddsOfModel(model, sequences, config)
        chosen = initial.least_sure(range(len(sequences)), share_of_tokens)
    size = config.micro_batch or config.batch
    parts = parts_of_rank(range(len(sequences)), lambda numbers: in_micro_batches(numbers, size))
    pull = Pull(sequences=sequences, parts=parts, loss="nlul", chosen=chosen)
    return accumulate(model, parameters, [pull], [], 1.0, config, released=released)["forget_loss"]
