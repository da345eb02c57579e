"""One step of the paper's Algorithm 2: the gradient of αL + D over micro-batches, then ``optimizer.step()``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from unteach.config import ForgetConfig
from unteach.method.shards import global_norm
from unteach.models.distributed import inside, sum_over_ranks
from unteach.training.passes import (
    HeldText,
    Pull,
    computing,
    forget_term,
    held_term,
    loss_scale,
    read,
    unscale_gradients,
)

__all__ = ["TeacherOptimizer", "accumulate", "train_step"]

SCALE_STEP = 2**6
"""Where a loss scale was too much for float16, it is divided by this and tried again."""


class TeacherOptimizer(Protocol):
    """An optimizer with a second set of weights: ``MeanTeacher``, ``AnchoredAdamW``."""

    param_groups: list[dict[str, Any]]
    last_grad_norm: float | None
    last_clip_factor: float | None

    def teacher_weights(self) -> AbstractContextManager[None]:
        """Inside, the module computes with the teacher's weights."""

    def step(self, closure: None = None) -> Any:
        """Make one step; gradients that are not finite are refused with a ``FloatingPointError``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the gradients go."""


def train_step(
    model: Any, optimizer: TeacherOptimizer, pulls: Sequence[Pull], held: Sequence[HeldText], alpha: float,
    config: ForgetConfig,
) -> dict[str, Any]:  # fmt: skip
    """Pull the student away from some texts and hold it to its teacher on others.

    Args:
        model: The student; inside ``optimizer.teacher_weights()``, the teacher.
        optimizer: Its gradients are cleared, used, and cleared again.
        pulls: What to forget: the documents first, then perhaps the model's own loops.
        held: Texts on which the student is held to the teacher, and to whom else they name already.
        alpha: α, the weight of the forget loss.
        config: Precision, compilation and the like.

    Returns:
        What a log wants to know of the step.
    """
    # 1. The teacher reads the held texts; only its last hidden states are kept.
    with optimizer.teacher_weights():
        taught = [read(model, text.sequences, text.parts, config, config.precision.divergence) for text in held]
    held = [
        dataclasses.replace(text, readings=[(text.weight, reading), *text.readings])
        for text, reading in zip(held, taught, strict=True)
    ]

    # 2. The student reads the forget texts, αL, and 3. the held texts, D.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    terms = accumulate(model, parameters, pulls, held, alpha, config)

    # 4. Clip, damp, add momentum, step; the teacher slides after.
    optimizer.step()
    optimizer.zero_grad()  # an evaluation, and the teacher's next reading, can use the memory
    return terms | {
        "grad_norm": optimizer.last_grad_norm,
        "clip_factor": optimizer.last_clip_factor,
        "lr": optimizer.param_groups[0]["lr"],
        "tokens": sum(len(s) - 1 for s in pulls[0].sequences) + sum(text.tokens for text in held),
    }


def accumulate(
    model: Any, parameters: Sequence[Tensor], pulls: Sequence[Pull], held: Sequence[HeldText], alpha: float,
    config: ForgetConfig,
) -> dict[str, float]:  # fmt: skip
    """Leave the gradient of α Σ L + Σ D in the parameters' ``.grad``, micro-batch by micro-batch.

    Each loss and divergence is a mean over the tokens of its text. In float16 the sum is scaled up (``loss_scale``);
    should a gradient then pass float16's range, all are computed again with a smaller scale. The scale depends on
    nothing but the texts, so a resumed run is the same.

    Returns:
        ``forget_loss`` and ``nll_forget`` of the first pull, and ``divergence``, the sum over the held texts.
    """
    calls = {"compiled": config.compile, "checkpointed": config.checkpoint_activations}
    most = max([sum(len(s) - 1 for s in pull.sequences) for pull in pulls] + [text.tokens for text in held])
    used = [config.precision.forget] * bool(pulls) + [config.precision.divergence] * bool(held)
    scale = loss_scale(most, *used, device=parameters[0].device)
    while True:
        for parameter in parameters:
            parameter.grad = None
        terms: dict[str, list[tuple[float, Tensor]]] = {"forget_loss": [], "nll_forget": [], "divergence": []}
        with computing(model, config.precision.forget, **calls):
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
        with computing(model, config.precision.divergence, **calls):
            for text in held:
                for part, (_, weight) in enumerate(text.parts):
                    divergence, tokens = inside(model, held_term, text, part)
                    share = weight * tokens / text.tokens
                    (scale * share * divergence).backward()
                    terms["divergence"].append((share, divergence.detach()))
        unscale_gradients(parameters, scale)
        if scale <= 1 or math.isfinite(global_norm(_gradients(parameters))):
            break
        scale = max(1.0, scale / SCALE_STEP)
    sums = [sum(share * float(value) for share, value in values) for values in terms.values()]  # not before: it waits
    return dict(zip(terms, sum_over_ranks(sums), strict=True))


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
