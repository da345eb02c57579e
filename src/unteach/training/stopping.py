"""When a run ends: stop rules, and the search for the first model that meets one. Pure: no model is needed here."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from unteach.errors import InputError

__all__ = ["Move", "Search", "StopRule", "parse_rule", "utility_problem"]

_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop when ``metric`` compares with ``value`` as wished."""

    metric: str
    comparison: str
    value: float
    why: str = ""
    """Where the value comes from, for people."""
    most_degenerate: float | None = None
    """Output may be mere repetition in this share of the passages, in percent; None: any."""

    def crossed(self, scores: Mapping[str, float]) -> bool:
        """Whether the metric is where it should be."""
        return _COMPARE[self.comparison](scores[self.metric], self.value)

    def looping(self, scores: Mapping[str, float]) -> bool:
        """Whether there is too much degenerate output to stop here."""
        return self.most_degenerate is not None and scores["degenerate"] > self.most_degenerate

    def __str__(self) -> str:
        rule = f"{self.metric} {self.comparison} {self.value:.4g}" + (f" ({self.why})" if self.why else "")
        return rule if self.most_degenerate is None else f"{rule} with degenerate <= {self.most_degenerate:.4g}"


@dataclass(frozen=True, slots=True)
class Move:
    """What a run does after an evaluation."""

    kind: Literal["go on", "go back", "end"]
    step: int
    """Where: the step it goes back to, or the one whose model is kept."""
    reason: str = ""
    """Why it ended, for people."""
    rule: str = ""
    """Which rule ended it: ``stop``, ``utility_floor`` or ``max_steps``."""


class Search:
    """The search for the first model that meets a rule, among models that are evaluated every so many steps.

    When an evaluation finds the rule met, the run goes back to the evaluation before, at which it was not, and
    evaluates more often from there, down to single steps. Where the first model that meets the rule loops more than the
    rule allows, the run goes on to the first that meets it and does not; if none does within ``every`` steps, the first
    that met it is kept.

    Args:
        rule: When to stop; None: only at the last step.
        before: Scores before the first step.
        every: Steps between evaluations.
        last: The step at which the run ends in any case.
        utility_floor: See ``utility_problem``.

    Attributes:
        unmet: The last evaluated step at which the rule was not met; the search goes back to it.
        interval: Steps from there to the next evaluation.
        met: The first step at which the rule was met, by a model that loops; 0: none yet.
    """

    def __init__(
        self, rule: StopRule | None, before: Mapping[str, float], *, every: int, last: int, utility_floor: float
    ) -> None:
        self.rule, self.before, self.every, self.last, self.utility_floor = rule, before, every, last, utility_floor
        self.unmet, self.interval, self.met = 0, every, 0

    def state(self) -> dict[str, int]:
        """Where the search is, as plain values for a checkpoint."""
        return {"unmet": self.unmet, "interval": self.interval, "met": self.met}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from what ``state`` gave."""
        self.unmet, self.interval, self.met = state["unmet"], state["interval"], state["met"]

    def steps_to_keep(self) -> set[int]:
        """Steps whose checkpoints the search may go back to."""
        return {self.unmet, self.met or self.unmet}

    def is_due(self, step: int) -> bool:
        """Whether the model of this step is to be evaluated."""
        return step in (self.unmet + self.interval, self.last)

    def look(self, step: int, scores: Mapping[str, float], loops_every: int | None) -> Move:
        """Decide from the scores of a step how the run goes on.

        Args:
            step: The evaluated step.
            scores: Its scores, among them ``nll_general`` and the rule's.
            loops_every: How often the run does something about loops; None: never.
        """
        rule, problem = self.rule, utility_problem(self.before, scores, self.utility_floor)
        if rule is not None and rule.crossed(scores):
            if step > self.unmet + 1 and not self.met:
                return Move("go back", self.unmet)
            if not rule.looping(scores):
                reason = f"{rule}: reached {scores[rule.metric]:.4g}" + (f"; but {problem}" if problem else "")
                return Move("end", step, reason, "stop")
            self.interval = loops_every or 1  # the loops have yet to go
            self.met = self.met or step
        patience_ends = step >= min(self.met + self.every, self.last)
        if self.met and self.met < step and (problem or patience_ends):
            return Move("end", self.met, f"{rule}: the first model there; later ones loop too", "stop")
        if problem:
            return Move("end", step, problem, "utility_floor")
        if step >= self.last:
            missed = f"; the stop rule {rule} was not met" if rule is not None else ""
            return Move("end", step, f"max_steps {self.last} reached{missed}", "max_steps")
        self.unmet = step
        return Move("go on", step)

    def refine(self, crossed: int) -> None:
        """After going back from a step at which the rule was met: evaluate five times as often."""
        self.interval = max(1, (crossed - self.unmet) // 5)


def parse_rule(text: str, metrics: Collection[str]) -> StopRule:
    """A rule such as ``verbmem_f <= 21.8`` on one of the metrics that are measured.

    Raises:
        InputError: It cannot be read, or its metric is not measured.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*", text)
    try:
        value = float(match.group(3)) if match else 0.0
    except ValueError:
        match = None
    if match is None:
        raise InputError(
            f"stop.metric is {text!r}: write a metric, <= or >=, and a number, such as 'verbmem_f <= 21.8'"
        )
    if match.group(1) not in metrics:
        measured = ", ".join(metrics)
        raise InputError(
            f"stop.metric is {text!r}: {match.group(1)} is not measured in this run; measured are {measured}"
        )
    return StopRule(match.group(1), match.group(2), value)


def utility_problem(before: Mapping[str, float], now: Mapping[str, float], floor: float) -> str | None:
    """Why the run must end because the model is breaking, or None.

    Args:
        before: Scores before the first step.
        now: Scores now.
        floor: Largest rise of ``nll_general`` in nats per token.
    """
    rise = now["nll_general"] - before["nll_general"]
    if rise <= floor:
        return None
    return (
        f"general text costs {rise:.2f} nats per token more than before (from {before['nll_general']:.2f}), over the "
        f"floor of {floor:g}: the model is breaking. Lower alpha, give general text nearer to what it must keep, "
        "or raise stop.utility_floor"
    )
