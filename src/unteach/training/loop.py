"""The loop: a student pulled away from the forget text, held to its teacher on general text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unteach.config import ForgetConfig, Method
from unteach.data import ForgetBatches, GeneralText
from unteach.errors import InputError
from unteach.method.anchored_adamw import AnchoredAdamW
from unteach.method.mean_teacher import MeanTeacher
from unteach.method.vocab_head import Head
from unteach.models.distributed import any_rank, inside, parts_of_rank, sum_over_ranks
from unteach.training.checkpoint import Checkpoints
from unteach.training.optimizers import make_optimizer
from unteach.training.own_loops import NO_LOOPS, OwnLoops, find_loops
from unteach.training.passes import (
    SCALE_STEP,
    InitialLogOdds,
    by_length,
    chosen_tokens,
    computing,
    forget_term,
    general_term,
    hidden_states,
    loss_scale,
    unscale_gradients,
)
from unteach.training.stopping import StopRule, utility_problem

__all__ = ["Interrupted", "Outcome", "unlearn"]


class Interrupted(Exception):  # noqa: N818  (not an error: the run was asked to pause)
    """The run was asked to stop; its checkpoint is written."""


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    step: int
    reason: str
    rule: str
    """``stop``, ``utility_floor`` or ``max_steps``."""
    scores: Mapping[str, float]


@dataclass(slots=True)
class _Position:
    """Where a run is: all that a checkpoint holds besides weights and optimizer."""

    step: int = 0
    anchor: int = 0
    """The last evaluated step at which the stop rule was not met; refining goes back to it."""
    interval: int = 1
    """Steps from the anchor to the next evaluation."""
    crossed: int = 0
    """The first step at which the rule was met, by a model that loops: the next that does not is taken, or this one."""
    phase: int = 0
    seconds: float = 0.0


def unlearn(
    model: Any,
    parameters: dict[str, torch.nn.Parameter],
    forget: ForgetBatches,
    general: GeneralText,
    config: ForgetConfig,
    *,
    evaluate: Callable[[int], Mapping[str, float]],
    rule: StopRule | None,
    before: Mapping[str, float],
    checkpoints: Checkpoints,
    incompetent: Any = None,
    log: Callable[[dict[str, Any]], None] = lambda row: None,
    rewind: Callable[[int], None] = lambda step: None,
    paused: Callable[[], bool] = lambda: False,
    resume: bool = False,
) -> Outcome:
    """Unlearn until the stop rule is met, the model breaks, or ``max_steps``.

    The first model that meets the rule is kept: when an evaluation finds the rule met, the run goes back to the
    evaluation before, at which it was not, and evaluates more often from there, down to single steps. All batches are
    functions of the step, so the steps made again are the same steps. Where that model loops more than the rule allows,
    the run goes on, evaluating as often as loops are looked for, to the first that meets the rule and does not; if none
    does within ``evaluate_every`` steps, the first model that met the rule is kept.

    Args:
        model: The student; computes with the teacher's weights inside ``optimizer.teacher_weights()``.
        parameters: The weights to train, by name.
        forget: Batches of forget text.
        general: Batches of general text.
        config: Settings; every number of its methods given.
        evaluate: Scores of the model as it is, by name, among them ``nll_general``.
        rule: When to stop; None: only at ``max_steps``.
        before: Scores before the first step.
        checkpoints: Where to save.
        incompetent: The model that the loss ``it`` pulls towards.
        log: Called with the metrics of every step.
        rewind: Called with the step to which a run goes back: later log rows will come again.
        paused: Asked after every step; True saves a checkpoint and raises ``Interrupted``.
        resume: Go on from the last checkpoint.
    """
    methods = [*config.phases, config.method]
    at, optimizer = _Position(interval=config.evaluate_every), make_optimizer(parameters.values(), methods[0])
    needed = any(m.loss == "npo" or m.token_share < 1 for m in methods)
    initial = InitialLogOdds(model, forget.sequences, config) if needed else None
    loops = NO_LOOPS

    def save() -> None:
        weights = {name: p.detach() for name, p in parameters.items()}
        state: dict[str, Any] = {
            "position": {k: getattr(at, k) for k in at.__slots__},
            "weights": weights,
            "optimizer": optimizer.state_dict(),
        }
        if initial is not None:
            state["initial_log_odds"] = initial.values
        state["loops"] = loops.state()
        checkpoints.save(at.step, state, protect={at.anchor, at.crossed or at.anchor})

    def restore(step: int | None) -> None:
        nonlocal at, optimizer, loops
        optimizer.zero_grad()
        optimizer = make_optimizer(parameters.values(), methods[0])  # the old state goes before the saved one comes
        state = checkpoints.load(step, like=next(iter(parameters.values())))
        at = _Position(**state["position"])
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(state["weights"].pop(name))
        optimizer = make_optimizer(parameters.values(), methods[at.phase])
        optimizer.load_state_dict(state["optimizer"])
        if initial is not None:
            initial.values = state["initial_log_odds"]
        loops = OwnLoops.from_state(state["loops"])
        rewind(at.step)

    if resume:
        restore(None)
        if at.step >= config.max_steps:
            raise InputError(
                f"max_steps is {config.max_steps}: the run to resume is at step {at.step} already, raise it"
            )
    else:
        save()
    while at.step < config.max_steps:
        started = time.perf_counter()
        phase = _phase(methods, at.step)
        if phase != at.phase:
            at.phase, optimizer = phase, make_optimizer(parameters.values(), methods[phase])  # θ' = θ again
        loops_every = methods[phase].loops_every
        if not loops_every:
            loops = NO_LOOPS
        elif at.step % loops_every == 0:
            loops = find_loops(model, forget, at.step)
        numbers = forget.numbers(at.step, config.batch)
        row = train_step(
            model, optimizer, forget, numbers, general, methods[phase], config, at.step, initial, incompetent, loops
        )
        at.step += 1
        at.seconds += time.perf_counter() - started
        row |= {"tokens_per_second": row.pop("tokens") / (time.perf_counter() - started), "seconds": at.seconds}
        log({"step": at.step, "phase": phase} | row)

        if at.step == at.anchor + at.interval or at.step == config.max_steps:
            scores = evaluate(at.step)
            problem = utility_problem(before, scores, config.stop.utility_floor)
            if rule is not None and rule.crossed(scores):
                if at.step == at.anchor + 1 or at.crossed:
                    if not rule.looping(scores):
                        reason = f"{rule}: reached {scores[rule.metric]:.4g}" + (f"; but {problem}" if problem else "")
                        return Outcome(at.step, reason, "stop", scores)
                    at.interval = methods[phase].loops_every or 1  # the loops have yet to go
                    at.crossed = at.crossed or at.step
                else:
                    interval = max(1, (at.step - at.anchor) // 5)
                    restore(at.anchor)
                    at.interval = interval
                    save()
                    continue
            patience_ends = at.step >= min(at.crossed + config.evaluate_every, config.max_steps)
            if at.crossed and at.crossed < at.step and (problem or patience_ends):
                restore(at.crossed)
                scores = evaluate(at.step)
                return Outcome(at.step, f"{rule}: the first model there; later ones loop too", "stop", scores)
            if problem:
                return Outcome(at.step, problem, "utility_floor", scores)
            if at.step == config.max_steps:
                break
            at.anchor = at.step
            save()
        elif at.step % config.checkpoint_every == 0:
            save()
        if any_rank(paused()):
            save()
            raise Interrupted(f"stopped after step {at.step}")
    missed = f"; the stop rule {rule} was not met" if rule is not None else ""
    return Outcome(at.step, f"max_steps {config.max_steps} reached{missed}", "max_steps", scores)


def train_step(
    model: Any,
    optimizer: MeanTeacher | AnchoredAdamW,
    forget: ForgetBatches,
    numbers: Sequence[int],
    general: GeneralText,
    method: Method,
    config: ForgetConfig,
    step: int,
    initial: InitialLogOdds | None = None,
    incompetent: Any = None,
    loops: OwnLoops = NO_LOOPS,
) -> dict[str, Any]:
    """One step of the paper's Algorithm 2: gradient of αL + D over micro-batches, then ``optimizer.step()``.

    In float16 the loss is scaled up (``loss_scale``); should a gradient then pass float16's range, the gradients are
    computed again with a smaller scale. The scale depends on nothing but the step itself, so a resumed run is the same.
    """
    device, precision = next(model.parameters()).device, config.precision
    longest = max(map(len, forget.sequences))
    general_batch = general.batch(step, config.general_batch)
    forget_parts = parts_of_rank(
        numbers, lambda x: by_length(x, [len(forget.sequences[n]) for n in x], config.micro_batch, longest)
    )
    general_parts = parts_of_rank(
        general_batch, lambda x: by_length(x, [len(sequence) for sequence in x], config.micro_batch, longest)
    )
    share_of_tokens = 1.0 if initial is None else method.token_share
    forget_tokens = sum(len(forget.sequences[n]) - 1 for n in numbers)
    loop_parts = parts_of_rank(
        range(len(loops.sequences)),
        lambda x: by_length(x, [len(loops.sequences[n]) for n in x], config.micro_batch, longest),
    )
    chosen_total = sum(chosen_tokens(len(forget.sequences[n]) - 1, share_of_tokens) for n in numbers)
    general_tokens = sum(len(sequence) - 1 for sequence in general_batch)
    alpha = 1.0 if method.alpha is None else method.alpha

    # 1. The teacher reads the general text; only its last hidden states are kept.
    with optimizer.teacher_weights(), computing(model, precision.divergence, compiled=config.compile):
        teacher_hidden, teacher_head = inside(model, _read_as_teacher, [chunks for chunks, _ in general_parts])

    calls = {"compiled": config.compile, "checkpointed": config.checkpoint_activations}

    def accumulate_gradients(scale: float) -> dict[str, list[tuple[float, Tensor]]]:
        optimizer.zero_grad()
        terms: dict[str, list[tuple[float, Tensor]]] = {"forget_loss": [], "nll_forget": [], "divergence": []}

        # 2. The student reads the forget text: α L.
        with computing(model, precision.forget, **calls):
            for part, weight in forget_parts:
                sequences = [forget.sequences[n] for n in part]
                base = incompetent if initial is None or method.loss != "npo" else initial.of(part, device)
                chosen = initial.least_sure(part, share_of_tokens, device) if initial and share_of_tokens < 1 else None
                loss, nll, tokens = inside(model, forget_term, sequences, method, base, chosen)
                share = weight * tokens / chosen_total
                (scale * alpha * share * loss).backward()
                terms["forget_loss"].append((share, loss.detach()))
                terms["nll_forget"].append((weight * sum(len(x) - 1 for x in sequences) / forget_tokens, nll))

            for part, weight in loop_parts:
                chosen = loops.chosen(part, device)
                sequences = [loops.sequences[n] for n in part]
                loss, _, tokens = inside(model, forget_term, sequences, Method(), None, chosen)
                (scale * alpha * weight * tokens / loops.tokens() * loss).backward()

        # 3. The student reads the general text: D.
        with computing(model, precision.divergence, **calls):
            for (chunks, weight), hidden in zip(general_parts, teacher_hidden, strict=True):
                divergence, tokens = inside(model, general_term, chunks, method.divergence, hidden, teacher_head)
                share = weight * tokens / general_tokens
                (scale * share * divergence).backward()
                terms["divergence"].append((share, divergence.detach()))
        unscale_gradients((p for group in optimizer.param_groups for p in group["params"]), scale)
        return terms

    # 4. Clip, damp, add momentum, step; the teacher slides after.
    scale = loss_scale(max(forget_tokens, general_tokens), precision.forget, precision.divergence, device=device)
    while True:
        terms = accumulate_gradients(scale)
        try:
            optimizer.step()
            break
        except FloatingPointError:
            if scale <= 1:
                raise
            scale = max(1.0, scale / SCALE_STEP)
    optimizer.zero_grad()  # an evaluation, and the teacher's next reading, can use the memory
    sums = [sum(share * float(value) for share, value in values) for values in terms.values()]  # not before: it waits
    return dict(zip(terms, sum_over_ranks(sums), strict=True)) | {
        "grad_norm": optimizer.last_grad_norm,
        "clip_factor": optimizer.last_clip_factor,
        "lr": optimizer.param_groups[0]["lr"],
        "tokens": forget_tokens + general_tokens,
        "loops": len(loops.sequences),
    }


def _read_as_teacher(model: Any, parts: Sequence[Sequence[Sequence[int]]]) -> tuple[list[Tensor], Head]:
    """Last hidden states of each micro-batch, and the head."""
    return [hidden_states(model, part)[0] for part in parts], Head.of(model).detached()


def _phase(methods: Sequence[Method], step: int) -> int:
    """Which phase a step belongs to."""
    for number, method in enumerate(methods[:-1]):
        if step < (method.steps or 0):
            return number
        step -= method.steps or 0
    return len(methods) - 1
