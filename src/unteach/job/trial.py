"""What a run would do, tried: all is read that it reads, refused what it refuses, and its first steps are timed."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from unteach.config import ForgetConfig
from unteach.data import tokenise
from unteach.errors import Interrupted
from unteach.job.inputs import read_inputs, read_texts
from unteach.job.probes import CHEAP
from unteach.job.run import ForgetJob
from unteach.job.run_folder import RunFolder, check_start
from unteach.models import load_tokenizer, read_context_length
from unteach.planning.plan import plan
from unteach.training.checkpoint import Checkpoints
from unteach.training.loop import unlearn
from unteach.training.stopping import Search
from unteach.training.texts import loops_interval

__all__ = ["Trial", "read_only", "tried", "try_run"]

STEPS, LONGEST = 3, 30.0
"""So many steps are timed after the first, or those between two searches for loops; no more after so many seconds."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was read, and how long a run takes here."""

    said: list[str]
    """What the run would say before its first step."""
    counts: dict[str, Any]
    """Of every source, as in ``result.json``."""
    timed: dict[str, float]
    """Seconds of a ``step``, of an ``evaluation``, and until the first step; none where nothing was tried."""
    steps: dict[str, int]
    """How many are ``expected``, and the ``most``."""
    every: int
    """Steps between two evaluations."""
    why_not: str = ""
    """Why no time was measured."""

    def seconds(self, steps: int) -> float:
        """How long so many steps take, with the evaluations of the stop rule."""
        looks = math.ceil(steps / self.every) + 1
        return self.timed["start"] + steps * self.timed["step"] + looks * self.timed["evaluation"]

    def lines(self) -> list[str]:
        """The trial for people."""
        if not self.timed:
            return [*self.said, f"time: not measured: {self.why_not}"]
        expected, most = (f"{_duration(self.seconds(n))} for {n:,} steps" for n in self.steps.values())
        step, evaluation = _duration(self.timed["step"]), _duration(self.timed["evaluation"])
        measured = f"a step takes {step}, an evaluation {evaluation}, measured here"
        return [*self.said, f"time: about {expected}, at most {most} ({measured}); scores before and after come on top"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        estimates = {f"{name}_seconds": self.seconds(n) for name, n in self.steps.items()} if self.timed else {}
        timed = {f"{name}_seconds": value for name, value in self.timed.items()}
        return {"counts": self.counts, "time": timed | estimates or {"not_measured": self.why_not}}


def tried(config: ForgetConfig, ranks: int | None = None, resume: bool = False) -> tuple[dict[str, Any], list[str]]:
    """What ``unteach plan`` says of a run on so many ranks, as plain values and in lines."""
    planned = plan(config, ranks=ranks)
    if planned.ranks == 1 and planned.fits:
        trial = try_run(config, resume)
    else:
        why_not = "it does not fit here" if planned.ranks == 1 else f"a step of {planned.ranks} processes is not tried"
        trial = read_only(config, why_not, resume)
    lines, end = planned.lines(), max(1, len(planned.problems()))
    return planned.to_dict() | trial.to_dict(), [*lines[:-end], *trial.lines(), *lines[-end:]]


def read_only(config: ForgetConfig, why_not: str, resume: bool = False) -> Trial:
    """Read and count the texts, and compare tokenizers; no weights are loaded, ``why_not`` says why."""
    check_start(config, resume, alone=True)
    texts = {name: source for name, source in read_texts(config).items() if source is not None}
    tokenizer, (longest, _) = load_tokenizer(config.model), config.lengths(read_context_length(config.model))
    tokens = tokenise(texts["documents"], tokenizer, mode=config.document_mode, max_tokens=longest)
    counts = {"forget": tokens.counts} | {name: {"documents": len(source)} for name, source in texts.items()}
    said = [f"forget: {tokens.summary()}"]
    said += [f"{name}: {len(source):,} documents" for name, source in texts.items() if name != "documents"]
    return Trial(said, counts, {}, _steps(config), config.evaluate_every, why_not)


def try_run(config: ForgetConfig, resume: bool = False) -> Trial:
    """Begin a run as ``run_forget`` does, write nothing, and end after a few steps."""
    check_start(config, resume, alone=True)
    said = list[str]()
    job = ForgetJob(read_inputs(config), config, None, say=said.append)
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    with RunFolder(None, False, job.shared) as job.folder:  # a temporary one
        job.prepare()
        looked = time.perf_counter()
        job.measured(job.inputs.model, job.probes.stop, CHEAP)
        evaluation = time.perf_counter() - looked
        wanted = 1 + (loops_interval(job.config.method, found=False) or STEPS)
        with suppress(Interrupted):  # as asked
            unlearn(
                job.inputs.model,
                job.parameters,
                job.texts,
                job.config,
                search=Search(None, {"nll_general": 0.0}, every=2**60, last=2**60, utility_floor=math.inf),
                evaluate=lambda step: {},
                checkpoints=_Unsaved(),
                base=job.inputs.base,
                log=rows.append,
                paused=lambda: len(rows) == wanted or rows[-1]["seconds"] > LONGEST,
            )
    first, last = rows[0]["seconds"], rows[-1]["seconds"]
    step = (last - first) / (len(rows) - 1) if len(rows) > 1 else first
    start = time.perf_counter() - began - (last - first) - evaluation
    timed = {"step": step, "evaluation": evaluation, "start": start}
    return Trial(said, job.counts, timed, _steps(config), config.evaluate_every)


class _Unsaved(Checkpoints):
    """No checkpoints."""

    def __init__(self) -> None:
        pass

    def save(self, step: int, content: dict[str, Any], *, protect: Collection[int]) -> None:
        """Write nothing."""


def _steps(config: ForgetConfig) -> dict[str, int]:
    return {"expected": min(config.expected_steps, config.max_steps), "most": config.max_steps}


def _duration(seconds: float) -> str:
    """Seconds for people."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.2g} {name}"
    return f"{seconds:.2g} s"
