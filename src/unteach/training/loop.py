"""The loop: a student pulled away from the forget text, held to its teacher on general text."""

from __future__ import annotations

import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from unteach.config import ForgetConfig, Method
from unteach.errors import InputError, Interrupted
from unteach.method.optimizers import make_optimizer
from unteach.models.distributed import any_rank
from unteach.training.checkpoint import Checkpoints
from unteach.training.fitting import halving
from unteach.training.step import train_step
from unteach.training.stopping import Move, Search
from unteach.training.texts import NO_LOOPS, OtherModels, OwnLoops, Texts, find_loops, loops_interval, texts_of_step

__all__ = ["Outcome", "catching_signals", "unlearn"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: ``reason`` and ``rule`` as in ``Move``."""

    step: int
    reason: str
    rule: str
    scores: Mapping[str, float]
    raised: int = 0
    """The step from which α was raised, because the run came no nearer to its rule; 0: it was not."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds of ``steps`` and ``looks``, in all parts of a run that was resumed, and of all ``earlier`` parts."""


@dataclass(slots=True)
class _Position:
    """Where a run is, besides its weights, its optimizer and its search."""

    step: int = 0
    phase: int = 0
    seconds: float = 0.0
    pull: float = 1.0
    """By what α has grown (``alpha_growth``)."""
    beyond: bool = False
    """Whether the last look found forgetting beyond a limit of its rule: α then shrinks, if it is one that grows."""
    loops_found: bool = False
    """Whether looks have found loops, which a method with ``loops_once_found`` unlearns from then on."""
    micro_batch: int | None = None
    """To what memory that ran out has reduced it."""
    spent: dict[str, float] = field(default_factory=lambda: {"steps": 0.0, "looks": 0.0, "all": 0.0})
    """Seconds so far, steps that were made again among them; ``all`` when the last checkpoint was written."""


def unlearn(
    model: Any,
    parameters: dict[str, torch.nn.Parameter],
    texts: Texts,
    config: ForgetConfig,
    *,
    search: Search,
    evaluate: Callable[[int], Mapping[str, float]],
    checkpoints: Checkpoints,
    confirm: Callable[[], Mapping[str, float]] = dict,
    base: Any = None,
    log: Callable[[dict[str, Any]], None] = lambda row: None,
    rewind: Callable[[int], None] = lambda step: None,
    say: Callable[[str], None] = lambda line: None,
    paused: Callable[[], bool] = lambda: False,
    resume: bool = False,
    finish: bool = False,
    started: float | None = None,
) -> Outcome:
    """Unlearn until the search for a model that meets the stop rule ends: there, at a plateau or at ``max_steps``.

    All batches are functions of the step, so steps that are made again, after going back or resuming, are the same;
    with ``alpha_growth`` only after resuming, as looks that come more often may turn α sooner.

    Args:
        model: The student; computes with the teacher's weights inside ``optimizer.teacher_weights()``.
        parameters: The weights to train, by name.
        texts: What the run reads.
        config: Settings; every number of its methods given.
        search: Decides when to evaluate, to go back and to end.
        evaluate: Scores of the model as it is, by name, among them ``nll_general``.
        checkpoints: Where to save.
        confirm: Asked where the rule is met: by how much metrics are above what they should be on other passages.
        base: The model that losses such as ``it`` compare with.
        log: Called with the metrics of every step, and the scores of its model where it was evaluated.
        rewind: Called with the step to which a run goes back: later log rows will come again.
        say: Called with what a user should know along the way.
        paused: Asked after every step; True saves a checkpoint and raises ``Interrupted``.
        resume: Go on from the last checkpoint.
        finish: Take no step: end with the best of the models evaluated so far, that of the last checkpoint among them.
        started: When this part of the run began, by ``time.perf_counter``; None: now.
    """
    began, earlier = time.perf_counter() if started is None else started, 0.0
    methods = [*config.phases, config.method]
    drawn = texts.forget.drawn(config.max_steps, config.batch)
    given = (model, parameters, base, texts.forget.sequences)
    others, fits = halving(config, lambda config: OtherModels(*given, config, methods, drawn, texts.alternates), say)
    at = _Position(micro_batch=None if fits is config else fits.micro_batch)
    made = functools.partial(make_optimizer, parameters.values(), state_bits=config.state_bits, seed=config.seed)
    optimizer, loops = made(methods[0]), NO_LOOPS
    loops_at: dict[int, OwnLoops] = {}  # of a private run, whose checkpoints have none

    def looked(measure: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        before = time.perf_counter()
        scores = measure()
        at.spent["looks"] += time.perf_counter() - before
        return scores

    def save() -> None:
        at.spent["all"] = earlier + time.perf_counter() - began
        content = {
            "position": dataclasses.asdict(at),
            "search": search.state(),
            "weights": {name: p.detach() for name, p in parameters.items()},
            "optimizer": optimizer.state_dict(),
            "initial_log_odds": others.initial.values if others.initial else None,
            "log_odds_of_alternates": others.of_alternates.values if others.of_alternates else None,
            "loops": (NO_LOOPS if config.private else loops).state(),
        }
        if config.private:
            loops_at[at.step] = loops
        checkpoints.save(at.step, content, protect=search.steps_to_keep())

    def restore(step: int | None, *, rewinding: bool = True) -> None:
        nonlocal at, optimizer, loops
        optimizer.zero_grad()
        optimizer = made(methods[0])  # the old state goes before the saved one comes
        content = checkpoints.load(step, like=next(iter(parameters.values())), say=say)
        reduced, spent = at.micro_batch, at.spent
        at = _Position(**content["position"])
        at.spent = {kind: max(seconds, at.spent[kind]) for kind, seconds in spent.items()}  # what was spent stays spent
        at.micro_batch = min(filter(None, (reduced, at.micro_batch)), default=None)
        search.restore(content["search"])
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(content["weights"].pop(name))
        optimizer = made(methods[at.phase])
        optimizer.load_state_dict(content["optimizer"])
        saved = {"initial_log_odds": others.initial, "log_odds_of_alternates": others.of_alternates}
        for name, known in saved.items():
            if known:
                values = content[name]  # those of the first steps, where max_steps was lower
                known.values[: len(values)] = values
        loops = loops_at.get(at.step, OwnLoops.from_state(content["loops"]))
        if config.private and at.step not in loops_at and loops_interval(methods[at.phase], found=at.loops_found):
            loops = find_loops(model, texts.forget, at.step)  # not those that the run had when it was interrupted
        if rewinding:
            rewind(at.step)

    def take_step(method: Method, loops: OwnLoops, alpha: float, config: ForgetConfig) -> dict[str, Any]:
        pulls, held = texts_of_step(texts, method, config, at.step, others, loops)
        return train_step(model, optimizer, pulls, held, alpha, config, project=method.project_conflicts)

    def end(move: Move, scores: Mapping[str, float]) -> Outcome:
        raised = search.raised
        if move.step != at.step:
            restore(move.step, rewinding=False)  # the log tells the whole way
            scores = looked(lambda: evaluate(at.step))
        spent = {"steps": at.spent["steps"], "looks": at.spent["looks"], "earlier": earlier}
        return Outcome(at.step, move.reason, move.rule, scores, raised, spent)

    if finish:
        restore(None)
        earlier = at.spent["all"]
        scores = looked(lambda: evaluate(at.step))
        return end(search.finish(at.step, scores), scores)
    if resume:
        restore(None)
        earlier = at.spent["all"]
        say(f"goes on from step {at.step}")
        if at.step >= config.max_steps:
            reached = f"the run to resume is at step {at.step} already, raise it"
            raise InputError(f"max_steps is {config.max_steps}: {reached}")
    else:
        save()
    while True:
        step_began = time.perf_counter()
        phase = _phase(methods, at.step)
        method = methods[phase]
        if phase != at.phase:
            at.phase, at.pull = phase, 1.0
            optimizer = made(method)  # θ' = θ again
        every = loops_interval(method, found=at.loops_found)
        if not every:
            loops = NO_LOOPS
        elif at.step % every == 0:
            loops = find_loops(model, texts.forget, at.step)
        alpha = search.pull * at.pull * (1.0 if method.alpha is None else method.alpha)
        fits = config if at.micro_batch is None else dataclasses.replace(config, micro_batch=at.micro_batch)
        row, fits = halving(fits, functools.partial(take_step, method, loops, alpha), say)
        at.micro_batch = at.micro_batch if fits.micro_batch == config.micro_batch else fits.micro_batch
        if method.alpha_growth or search.pull != 1:
            row["alpha"] = alpha
        if method.alpha_growth:
            grows = row["divergence"] < method.hold_budget and not at.beyond
            at.pull *= 1 + method.alpha_growth if grows else 1 / (1 + method.alpha_growth)
        at.step += 1
        took = time.perf_counter() - step_began
        at.seconds += took
        at.spent["steps"] += took
        row |= {"tokens_per_second": row.pop("tokens") / took, "seconds": at.seconds, "loops": len(loops.sequences)}
        row = {"step": at.step, "phase": phase} | row

        if search.is_due(at.step):
            scores = looked(lambda: evaluate(at.step))
            log(row | {name: value for name, value in scores.items() if name not in row})
            at.beyond = search.rule is not None and search.rule.beyond(scores)
            now = loops_interval(method, found=at.loops_found or search.finds_loops(scores))
            begins = now > every
            at.loops_found |= begins  # no longer after going back
            move = search.look(at.step, scores, now)
            if move.rule == "stop" and move.step == at.step:
                move = search.confirmed(move, looked(confirm))
            if move.kind == "end":
                return end(move, scores)
            if move.reason:
                say(move.reason)
            if begins and move.kind == "go on":
                risen = f"degenerate {scores['degenerate']:.4g}, before {search.before['degenerate']:.4g}"
                say(f"step {at.step}: {risen}; from here on the model's own loops are unlearned every {now} steps")
            if move.kind == "go back":
                crossed = at.step
                restore(move.step)
                search.refine(crossed)
            save()
        else:
            log(row)
            if at.step % config.checkpoint_every == 0:
                save()
        if any_rank(paused()):
            save()
            raise Interrupted(f"stopped after step {at.step}")


def _phase(methods: Sequence[Method], step: int) -> int:
    """Which phase a step belongs to."""
    for number, method in enumerate(methods[:-1]):
        if step < (method.steps or 0):
            return number
        step -= method.steps or 0
    return len(methods) - 1


@contextmanager
def catching_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Let SIGINT and SIGTERM ask for a pause instead of ending the program; the second one does end it.

    Inside the block, what ``unlearn`` asks whether it is ``paused``.
    """
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        say("stopping after this step; a checkpoint will be written (again: stop now)")

    try:
        previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: signals are someone else's business
        previous = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
