"""When a run ends: stop rules, and the search for the first model that meets one. Pure: no model is needed here."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unteach.errors import InputError

__all__ = ["Condition", "Move", "Search", "StopRule", "parse_rule"]

MORE_DEGENERATE = 5.0
"""By so many points the share of degenerate output may have risen when a run stops by itself."""
HARDER = 2.0
"""By this α is multiplied once, where a run comes no nearer to its rule."""
PROGRESS = 0.02
"""A run comes nearer to its rule where its distance from it falls by this share."""
MOST_DENIALS = 3
"""So often other passages may deny that a rule is met without coming nearer to it."""
CAUTION = 0.7
"""The next evaluation comes after this share of the steps that the rule is expected to need."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True, slots=True)
class Condition:
    """What one metric must reach: ``metric comparison value``, and how far beyond is too far."""

    metric: str
    comparison: str
    value: float
    why: str = ""
    """Where the value comes from."""
    limit: float | None = None
    """Beyond this the metric has gone too far: text that is *less* likely than never-seen text stands out, too."""
    scale: float = 1.0
    """A distance from the value that counts as one, where models that do not meet a rule are compared."""

    def crossed(self, scores: Mapping[str, float]) -> bool:
        """Whether the metric has reached its value; one that was not measured has not."""
        return self.metric in scores and _COMPARE[self.comparison](scores[self.metric], self.value)

    def beyond(self, scores: Mapping[str, float]) -> float:
        """How far the metric has gone beyond its limit; 0 where it has not, or is not known."""
        if self.limit is None or self.metric not in scores:
            return 0.0
        over = scores[self.metric] - self.limit
        return max(0.0, over if ">" in self.comparison else -over)

    def distance(self, scores: Mapping[str, float]) -> float:
        """How far the metric is from where it should be, in units of ``scale``; 0 where it is there or not known."""
        value = scores.get(self.metric, self.value)
        if over := self.beyond(scores):
            return over / self.scale
        return 0.0 if self.crossed(scores) else abs(value - self.value) / self.scale

    def holds(self, scores: Mapping[str, float]) -> bool:
        """Whether the metric has reached its value and has not gone too far."""
        return self.crossed(scores) and self.distance(scores) == 0

    def remaining(self, earlier: float, now: float, steps: int) -> float:
        """Steps until the value is reached, if the metric goes on as it did in the last ``steps``."""
        goal = self.value
        if self.metric.startswith("auc_"):  # the logit of an AUC moves evenly, the AUC itself does not
            bounded = (min(max(x, 1e-3), 1 - 1e-3) for x in (earlier, now, goal))
            earlier, now, goal = (math.log(x / (1 - x)) for x in bounded)
        pace = (now - earlier) / steps
        return (goal - now) / pace if pace * (goal - now) > 0 else math.inf

    @property
    def wanted(self) -> str:
        """The value and the limit, in words."""
        limit = "" if self.limit is None else f" and not beyond {self.limit:.4g}"
        return f"{self.comparison} {self.value:.4g}{limit}"

    def __str__(self) -> str:
        return f"{self.metric} {self.wanted}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop at the first model for which all conditions hold."""

    conditions: tuple[Condition, ...]
    most_degenerate: float | None = None
    """Output may be mere repetition in this share of the passages, in percent; None: any."""

    @property
    def metrics(self) -> list[str]:
        """The metrics it looks at."""
        return [condition.metric for condition in self.conditions]

    def crossed(self, scores: Mapping[str, float]) -> bool:
        """Whether every metric has reached its value."""
        return all(condition.crossed(scores) for condition in self.conditions)

    def distance(self, scores: Mapping[str, float]) -> float:
        """The sum of the conditions' distances: the score by which models that do not meet the rule are compared."""
        return sum(condition.distance(scores) for condition in self.conditions)

    def beyond(self, scores: Mapping[str, float]) -> bool:
        """Whether a metric has gone beyond its limit."""
        return any(condition.beyond(scores) for condition in self.conditions)

    def looping(self, scores: Mapping[str, float]) -> bool:
        """Whether there is too much degenerate output to stop here; not where it was not measured."""
        return self.most_degenerate is not None and scores.get("degenerate", 0.0) > self.most_degenerate

    def failing(self, scores: Mapping[str, float], known: Mapping[str, float]) -> str:
        """The conditions that do not hold of a model, with its values; ``known``: what was last measured before."""
        both = {**known, **scores}
        wrong = [
            f"{c.metric} {_value(c.metric, scores, known)} (wanted: {c.wanted})"
            for c in self.conditions
            if not c.holds(both)
        ]
        if self.looping(scores):
            wrong.append(f"degenerate {scores['degenerate']:.4g} (wanted: <= {self.most_degenerate:.4g})")
        return ", ".join(wrong)

    def __str__(self) -> str:
        rule = " and ".join(map(str, self.conditions))
        return rule if self.most_degenerate is None else f"{rule} with degenerate <= {self.most_degenerate:.4g}"


def _value(metric: str, scores: Mapping[str, float], known: Mapping[str, float]) -> str:
    """What a metric is, or was when it was last measured."""
    if metric in scores:
        return f"{scores[metric]:.4g}"
    return f"{known[metric]:.4g} when last measured" if metric in known else "not measured"


@dataclass(frozen=True, slots=True)
class Move:
    """What a run does after an evaluation."""

    kind: Literal["go on", "go back", "end"]
    step: int
    """The step it goes back to, or the one whose model is kept."""
    reason: str = ""
    """Why it ended, or what else there is to say."""
    rule: str = ""
    """What ended it: ``stop``, the rule was met; else ``nearest`` or ``last`` (a step went too far for it, and which
    model is kept), ``utility_floor``, ``plateau``, ``max_steps`` or ``finished`` (by ``unteach finish``)."""


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
        utility_floor: The run ends where ``nll_general`` has risen by more nats per token than this. Keep text has no
            floor: in good deep runs its loss rises by more, and falls again.
        patience: Where the distance from the rule has not fallen over so many evaluations, ``every`` steps apart, α is
            raised, once; after as many more without progress the run ends. 0: never.
        narrow: Go back where an evaluation finds the rule met; else the model found is kept, and evaluations come every
            ``every`` steps, whatever they let expect.
        expected: Before this step nothing is taken for a plateau: recital falls late.
        keep_last: Where the run ends with the rule not met, keep its last model, not the nearest to the rule; ended by
            hand it keeps the nearest all the same.

    Where the rule has several conditions, or one that can be overshot, the next evaluation comes as soon as the last
    two let expect that it is met. If it never is, or a single step goes too far, the evaluated model with the smallest
    distance from it is kept; a metric that was not measured there counts as it was last measured.

    Attributes:
        unmet: The last evaluated step at which the rule was not met; the search goes back to it.
        interval: Steps from there to the next evaluation.
        met: The first step at which the rule was met, by a model that loops; 0: none yet.
        best: The evaluated step nearest to the rule, and its distance; ``best_fails`` says what does not hold of it.
        pull: What α is multiplied by, since step ``raised``.
        denied: Whether other passages have denied that the rule is met; ``least_excess`` is how far they were from it,
            and ``denials`` how often they came no nearer.
    """

    def __init__(
        self,
        rule: StopRule | None,
        before: Mapping[str, float],
        *,
        every: int,
        last: int,
        utility_floor: float,
        patience: int = 0,
        expected: int = 0,
        narrow: bool = True,
        keep_last: bool = False,
    ) -> None:
        self.rule, self.before, self.every, self.last, self.utility_floor = rule, before, every, last, utility_floor
        self.patience, self.expected, self.narrow, self.keep_last = patience, expected, narrow, keep_last
        self.unmet, self.interval, self.met = 0, every, 0
        self.best: tuple[int, float] = (0, math.inf)
        self.best_fails = ""
        self.pull, self.raised = 1.0, 0
        self.denied, self.least_excess, self.denials = False, math.inf, 0
        self._known = dict(before)
        self._progress: tuple[int, float, int] = (0, self.distance(before), 0)  # step, distance, evaluations since
        self._last: tuple[int, dict[str, float]] = (0, dict(before))

    def state(self) -> dict[str, Any]:
        """Where the search is, as plain values for a checkpoint."""
        names = ["unmet", "interval", "met", "best", "_last", "_known", "pull", "raised", "_progress"]
        names += ["denied", "least_excess", "denials", "best_fails"]
        return {name.removeprefix("_"): getattr(self, name) for name in names}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.unmet, self.interval, self.met = state["unmet"], state["interval"], state["met"]
        self.best, self._last, self._known = tuple(state["best"]), tuple(state["last"]), state["known"]
        self.pull, self.raised = state.get("pull", 1.0), state.get("raised", 0)  # older checkpoints have none
        self._progress = tuple(state.get("progress", self._progress))
        self.denied, self.denials = state.get("denied", False), state.get("denials", 0)
        self.least_excess, self.best_fails = state.get("least_excess", math.inf), state.get("best_fails", "")

    def distance(self, scores: Mapping[str, float]) -> float:
        """How far scores are from the rule; a metric that is not among them counts as it was last measured."""
        return 0.0 if self.rule is None else self.rule.distance(self._known | dict(scores))

    def steps_to_keep(self) -> set[int]:
        """Steps whose checkpoints the search may go back to."""
        return {self.unmet, self.met or self.unmet, self.best[0]}

    def is_due(self, step: int) -> bool:
        """Whether the model of this step is to be evaluated."""
        return step in (self.unmet + self.interval, self.last)

    def finds_loops(self, scores: Mapping[str, float]) -> bool:
        """Whether these scores, about to be looked at, and those of the look before show more degenerate output than
        there was before the run, by more than ``MORE_DEGENERATE``; not where it was not measured.

        One look may do so by chance: of 64 passages 4 are enough. Deep forgetting of the embedded model had 4 at step
        20 with two seeds of three, and 0 and 1 at the next look.
        """
        looks, most = (scores, self._last[1]), self.before.get("degenerate", math.inf) + MORE_DEGENERATE
        return all(look.get("degenerate", 0.0) > most for look in looks)

    def look(self, step: int, scores: Mapping[str, float], loops_every: int) -> Move:
        """Decide from the scores of a step (``nll_general`` and the rule's) how the run goes on.

        ``loops_every``: How often the run does something about loops now; 0: it does nothing.
        """
        rule, problem = self.rule, self._problem(scores["nll_general"])
        distance = self.distance(scores)
        if rule is not None and rule.crossed(scores):
            if self.narrow and step > self.unmet + 1 and not self.met and not self.denied:
                return Move("go back", self.unmet)
            if distance > 0 and not self.met:  # one step too far, and the one before was not there yet
                what = "one step goes" if self.narrow else "went"
                kept = "last" if self.keep_last else "nearest"
                return self._end(step, scores, f"{rule}: {what} too far", kept, keep_last=self.keep_last)
            if distance == 0 and not rule.looping(scores):
                return self._met(step, scores)
            self.interval = loops_every or 1  # the loops have yet to go
            self.met = self.met or step
        patience_ends = step >= min(self.met + self.every, self.last)
        if self.met and self.met < step and (problem or patience_ends):
            return Move("end", self.met, f"{rule}: the first model there; later ones loop too", "stop")
        if problem:
            return self._unmet(step, scores, problem, "utility_floor")
        if step >= self.last:
            return self._unmet(step, scores, f"max_steps {self.last} reached", "max_steps")
        stuck = self._stuck(step, distance)
        if stuck and self.raised:
            return self._unmet(step, scores, f"{stuck}, and pulling harder did not help", "plateau")
        if stuck:
            self.pull, self.raised = HARDER * self.pull, step
            stuck = f"step {step}: {stuck}; from here on alpha is {HARDER:g} times what it was"
        if distance <= self.best[1]:
            self.best, self.best_fails = (step, distance), self._failing(scores)
        if not self.met:
            self._expect(step, scores)
        self.unmet, self._last, self._known = step, (step, dict(scores)), self._known | dict(scores)
        return Move("go on", step, stuck)

    def confirmed(self, end: Move, excess: Mapping[str, float]) -> Move:
        """What follows where the rule is met, and metrics have so much ``excess`` on passages that it does not look at.

        A rule looks again and again and ends at the first model that meets it, so by chance too early. The run then
        goes on, as long as the excess falls, and only where a metric cannot fall too far.
        """
        above = sum(excess.values())
        if self.rule is None or any(condition.limit is not None for condition in self.rule.conditions):
            return end
        if self.denied and not excess:
            return Move(end.kind, end.step, f"{end.reason}; on other passages, too", end.rule)
        if not excess or not self.narrow or end.step >= self.last:
            return end
        self.denials = 0 if above < (1 - PROGRESS) * self.least_excess else self.denials + 1
        self.denied, self.least_excess = True, min(above, self.least_excess)
        if self.denials >= MOST_DENIALS:
            return end
        self.unmet, self.interval, self.met = end.step, max(1, self.every // 2), 0
        found = ", ".join(f"{name} {more:.3g} above" for name, more in excess.items())
        return Move("go on", end.step, f"step {end.step}: met, but on other passages {found} never-seen text: goes on")

    def finish(self, step: int, scores: Mapping[str, float]) -> Move:
        """End a run at a step, because somebody wants it to: with the model of that step, if it meets the rule, or
        with the best that was evaluated."""
        rule, distance = self.rule, self.distance(scores)
        if self.met:
            return Move("end", self.met, f"{rule}: the first model there; later ones looped", "stop")
        if rule is not None and rule.crossed(scores) and distance == 0 and not rule.looping(scores):
            return self._met(step, scores)
        return self._unmet(step, scores, f"ended by hand after step {step}", "finished", by_hand=True)

    def _problem(self, now: float) -> str | None:
        """Why the run must end because the model is breaking, or None."""
        before = self.before["nll_general"]
        if now - before <= self.utility_floor:
            return None
        return (
            f"general text costs {now - before:.2f} nats per token more than before (from {before:.2f}), over the "
            f"floor of {self.utility_floor:g}: the model is breaking. Lower alpha, give general text nearer to what it "
            "must keep, or raise stop.utility_floor"
        )

    def _met(self, step: int, scores: Mapping[str, float]) -> Move:
        """End with the model of this step, which meets the rule."""
        reached = ", ".join(f"{scores[metric]:.4g}" for metric in self.rule.metrics) if self.rule else ""
        problem = self._problem(scores["nll_general"])
        return Move("end", step, f"{self.rule}: reached {reached}" + (f"; but {problem}" if problem else ""), "stop")

    def _failing(self, scores: Mapping[str, float]) -> str:
        """What of the rule does not hold of the model with these scores."""
        return "" if self.rule is None else self.rule.failing(scores, self._known)

    def _unmet(self, step: int, scores: Mapping[str, float], reason: str, rule: str, *, by_hand: bool = False) -> Move:
        """End without the rule met; by hand always with the best model so far."""
        if self.rule is None:
            return Move("end", step, reason, rule)
        reason = f"{reason}; the stop rule {self.rule} was not met"
        return self._end(step, scores, reason, rule, keep_last=self.keep_last and not by_hand)

    def _end(self, step: int, scores: Mapping[str, float], reason: str, rule: str, *, keep_last: bool) -> Move:
        """End with the evaluated model that is nearest to the rule, an earlier one or that of this step, or with that
        of this step in any case, and say which conditions do not hold of it."""
        (best, distance), fails = self.best, self._failing(scores)
        if keep_last:
            nearer = f", though step {best} was nearer to it" if distance < self.distance(scores) else ""
            reason = f"{reason}; the last model, of step {step}, is kept{nearer}"
        elif distance < self.distance(scores):
            step, fails, reason = best, self.best_fails, f"{reason}; step {best} was nearest to it"
        return Move("end", step, f"{reason}; not met: {fails}" if fails else reason, rule)

    def _stuck(self, step: int, distance: float) -> str:
        """What to say where the run has come no nearer to the rule for long enough; else nothing."""
        since, reference, looks = self._progress
        if not self.patience or self.met or distance < (1 - PROGRESS) * reference:
            self._progress = (step, distance, 0)
            return ""
        self._progress = (since, reference, looks + 1)
        long_enough = looks + 1 >= self.patience and step - since >= self.patience * self.every
        if not long_enough or step < self.expected:
            return ""
        self._progress = (step, reference, 0)
        return f"no nearer to the stop rule since step {since}, over {looks + 1} evaluations"

    def _expect(self, step: int, scores: Mapping[str, float]) -> None:
        """Set the interval to the next evaluation from how fast the conditions come nearer."""
        conditions = self.rule.conditions if self.rule is not None else ()
        if not self.narrow or (len(conditions) < 2 and not any(c.limit is not None for c in conditions)):
            return
        earlier, before = self._last
        known = [c for c in conditions if not c.crossed(scores) and c.metric in scores and c.metric in before]
        rest = [c.remaining(before[c.metric], scores[c.metric], step - earlier) for c in known]
        moving = [steps for steps in rest if math.isfinite(steps)]  # one that stands still says nothing
        soonest = max(moving, default=math.inf if rest else 1.0)
        self.interval = self.every if math.isinf(soonest) else max(1, min(self.every, int(CAUTION * soonest)))

    def refine(self, crossed: int) -> None:
        """After going back from a step at which the rule was met: evaluate five times as often."""
        self.interval = max(1, (crossed - self.unmet) // 5)


def parse_rule(text: str, metrics: Collection[str], models: Mapping[str, Mapping[str, float]] = {}) -> StopRule:
    """A rule such as ``verbmem_f <= 21.8`` or ``knowmem_f <= reference``, or several joined by ``and``.

    ``metrics`` are those that are measured, ``models`` the scores of other models that may stand in place of a number.
    An ``InputError`` says what cannot be read or is not measured.
    """
    conditions = []
    for part in re.split(r"\s+and\s+", text.strip()):
        match = re.fullmatch(rf"(\w+)\s*(<=|>=|<|>)\s*({_NUMBER}|reference)", part.strip())
        if match is None:
            wanted = "write a metric, <= or >=, and a number, such as 'verbmem_f <= 21.8'"
            raise InputError(f"stop.metric is {text!r}: {wanted}")
        metric, comparison, value = match.groups()
        if metric not in metrics:
            measured = ", ".join(metrics)
            raise InputError(f"stop.metric is {text!r}: {metric} is not measured in this run; measured are {measured}")
        if value != "reference":
            conditions.append(Condition(metric, comparison, float(value)))
        elif "reference" in models:
            conditions.append(Condition(metric, comparison, models["reference"][metric], "the reference model's"))
        else:
            raise InputError(f"stop.metric is {text!r}: there is no reference model; give --reference, or a number")
    return StopRule(tuple(conditions))
