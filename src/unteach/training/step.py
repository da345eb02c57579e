"""One step of the paper's Algorithm 2: the gradient of αL + D over micro-batches, then ``optimizer.step()``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.method.divergences import NLL
from unteach.method.lean import LeanMeanTeacher, ReleasedGradients
from unteach.method.tensors import global_norm, local_part
from unteach.method.vocab_head import Head
from unteach.models.distributed import inside, sum_over_ranks
from unteach.models.precision import resolved_precision
from unteach.training.passes import (
    HeldText,
    Pull,
    Reading,
    computing,
    forget_term,
    held_term,
    read_as_teacher,
    read_change,
)

__all__ = ["accumulate", "add_without_conflict", "loss_scale", "train_step", "unscale_gradients"]

SCALED_TOKEN = 2**8
"""What a single token's share of the loss is multiplied by in float16: see ``loss_scale``."""
FARTHEST = {"bf16": 0.03, "fp16": 0.01, "tf32": 0.01, "fp32": 5e-5}
"""Nats per token up to which the teacher is near enough for ``divergence_form`` tangent: beyond, the network's bending
counts for more than a difference's rounding (docs/decisions.md)."""
SCALE_STEP = 2**6
"""Where a loss scale was too much for float16, it is divided by this and tried again."""


def train_step(
    model: Any, optimizer: Any, pulls: Sequence[Pull], held: Sequence[HeldText], alpha: float, config: ForgetConfig,
    *, project: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Pull the student away from some texts and hold it to its teacher on others.

    Args:
        model: The student; inside ``optimizer.teacher_weights()``, the teacher.
        optimizer: One of ``method.optimizers``. Its gradients are cleared, used, and cleared again.
        pulls: What to forget: the documents first, then perhaps the model's own loops.
        held: Texts on which the student is held to the teacher, and to whom else they name already.
        alpha: α, the weight of the forget loss.
        config: Precision, compilation and the like.
        project: Take from the forget gradient what goes against that of the held texts, see ``add_without_conflict``.

    Returns:
        What a log wants to know of the step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    # 1. The teacher reads the held texts; only its last hidden states are kept.
    if any(text.divergence != NLL for text in held):  # that one needs no teacher
        taught = _taught(model, optimizer, parameters, held, config)
        held = [
            dataclasses.replace(text, readings=[(text.weight, reading), *text.readings])
            for text, reading in zip(held, taught, strict=True)
        ]

    # 2. The student reads the forget texts, αL, and 3. the held texts, D.
    released = optimizer.gradients if isinstance(optimizer, LeanMeanTeacher) else None
    terms = accumulate(model, parameters, pulls, held, alpha, config, project=project, released=released)

    # 4. Clip, damp, add momentum, step; the teacher slides after.
    try:
        optimizer.step()
    except torch.OutOfMemoryError:  # no smaller batch helps, and some weights may have moved: not to be made again
        better = "go on from the last checkpoint on a device with more, or set trainable to blocks"
        raise InputError(f"the device's memory ran out in the optimizer's step: {better}") from None
    optimizer.zero_grad()  # an evaluation, and the teacher's next reading, can use the memory
    return terms | {
        "grad_norm": optimizer.last_grad_norm,
        "clip_factor": optimizer.last_clip_factor,
        "lr": optimizer.param_groups[0]["lr"],
        "tokens": sum(len(s) - 1 for s in pulls[0].sequences) + sum(text.tokens for text in held),
    }


def _taught(
    model: Any, optimizer: Any, parameters: Sequence[Tensor], held: Sequence[HeldText], config: ForgetConfig
) -> list[Reading]:
    """The teacher's readings of the held texts, or by how much the student's differ (``divergence_form``)."""
    if config.divergence_form == "tangent":
        way = [parameter.detach().clone() for parameter in parameters]
        with optimizer.teacher_weights():
            torch._foreach_sub_(way, [parameter.detach() for parameter in parameters])
            head = Head.of(model).detached()
        precision = resolved_precision(config.precision.divergence, parameters[0].device)
        taught = read_change(model, parameters, way, head, held, precision, farthest=FARTHEST[precision])
        if taught is not None:
            return taught
        del way  # too far
    return read_as_teacher(model, optimizer, held, config)


def accumulate(
    model: Any, parameters: Sequence[Tensor], pulls: Sequence[Pull], held: Sequence[HeldText], alpha: float,
    config: ForgetConfig, *, project: bool = False, released: ReleasedGradients | None = None,
) -> dict[str, float]:  # fmt: skip
    """Leave the gradient of α Σ L + Σ D in the parameters' ``.grad``, micro-batch by micro-batch.

    If given, it is left in ``released`` instead, and weights are rounded whenever they are met, both for their memory.

    Each loss and divergence is a mean over the tokens of its text. In float16 the sum is scaled up (``loss_scale``);
    should a gradient then pass float16's range, all are computed again with a smaller scale. The scale depends on
    nothing but the texts, so a resumed run is the same.

    Returns:
        ``forget_loss`` and ``nll_forget`` of the first pull, and ``divergence``, the sum over the held texts.
    """
    calls: dict[str, Any] = {
        "compiled": config.compile,
        "checkpointed": config.checkpoint_activations,
        "once": released is None,
    }
    most = max([sum(len(s) - 1 for s in pull.sequences) for pull in pulls] + [text.tokens for text in held])
    used = [config.precision.forget] * bool(pulls) + [config.precision.divergence] * bool(held)
    scale = loss_scale(most, *used, device=parameters[0].device)
    taking = nullcontext if released is None else released.collecting
    while True:
        for parameter in parameters:
            parameter.grad = None
        if released is not None:
            released.clear()
        terms: dict[str, list[tuple[float, Tensor]]] = {"forget_loss": [], "nll_forget": [], "divergence": []}
        with computing(model, config.precision.forget, **calls), taking():
            for number, pull in enumerate(pulls):
                total, predicted = pull.tokens, sum(len(s) - 1 for s in pull.sequences)
                for part, (numbers, weight) in enumerate(pull.parts):
                    loss, nll, tokens = inside(model, forget_term, pull, part)
                    share = weight * tokens / total
                    (scale * alpha * share * loss).backward()
                    if number == 0:
                        read_here = sum(len(pull.sequences[n]) - 1 for n in numbers)
                        terms["forget_loss"].append((share, loss.detach()))
                        terms["nll_forget"].append((weight * read_here / predicted, nll))
        forget = [parameter.grad for parameter in parameters] if project else []
        for parameter in parameters if project else ():
            parameter.grad = None
        with computing(model, config.precision.divergence, **calls), taking():
            for text in held:
                for part, (_, weight) in enumerate(text.parts):
                    divergence, tokens = inside(model, held_term, text, part)
                    share = weight * tokens / text.tokens
                    (scale * share * divergence).backward()
                    terms["divergence"].append((share, divergence.detach()))
        if project:
            add_without_conflict(parameters, forget)
        if released is None:
            unscale_gradients(parameters, scale)
            found = [p.grad for p in parameters if p.grad is not None]
        else:
            released.unscale(scale)
            found = released.values()
        if scale <= 1 or math.isfinite(global_norm(found)):
            break
        scale = max(1.0, scale / SCALE_STEP)
    sums = [sum(share * float(value) for share, value in values) for values in terms.values()]  # not before: it waits
    return dict(zip(terms, sum_over_ranks(sums), strict=True))


def add_without_conflict(parameters: Sequence[Tensor], forget: Sequence[Tensor | None]) -> None:
    """Add the forget gradient f to that of the held texts, g, in ``.grad``, without what of it goes against g.

    Where f·g < 0, f becomes f - (f·g/‖g‖²) g, which leaves the held texts as they are to first order; else it is whole.
    GRU: Wang et al., "GRU: mitigating the trade-off between unlearning and retention for LLMs" (2025).

    Differs from the published code: g itself is added, too, and is that of this step, not a moving average.
    """
    both = [(local_part(f), local_part(p.grad)) for p, f in zip(parameters, forget, strict=True)
            if f is not None and p.grad is not None]  # fmt: skip
    product = sum(float((f.double() * g.double()).sum()) for f, g in both)
    square = sum(float(local_part(p.grad).double().square().sum()) for p in parameters if p.grad is not None)
    product, square = sum_over_ranks([product, square])
    against = min(0.0, product) / square if square > 0 else 0.0
    for parameter, f in zip(parameters, forget, strict=True):
        if parameter.grad is None:
            parameter.grad = f
        else:
            local_part(parameter.grad).mul_(1 - against)
            if f is not None:
                local_part(parameter.grad).add_(local_part(f))


def loss_scale(tokens: int, *precisions: str, device: torch.device) -> float:
    """The power of two by which the loss, a mean over ``tokens``, is multiplied before a backward pass in float16.

    The gradient of a mean over N tokens gives each hidden state a gradient of order 1/N and less, below what float16
    can hold (6e-8). Times N it is of order one or, early in a run, a thousandth; 2⁸ more puts it in the middle of
    float16's range, from 6e-8 to 65,504. Without float16 among the ``precisions`` the scale is 1.
    """
    if all(resolved_precision(name, device) != "fp16" for name in precisions):
        return 1.0
    return 2.0 ** math.floor(math.log2(tokens * SCALED_TOKEN))


def unscale_gradients(parameters: Iterable[Tensor], scale: float) -> None:
    """Divide the gradients of the parameters by ``scale``, a power of two, in place."""
    if scale != 1:
        torch._foreach_mul_([local_part(p.grad) for p in parameters if p.grad is not None], 1 / scale)
