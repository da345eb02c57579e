"""Stop rules: when the model has forgotten enough, and when it is breaking."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unteach.errors import InputError

__all__ = ["StopRule", "parse_rule", "utility_problem"]

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
    """So much degenerate output at most, in percent: a model that only loops recites nothing, but is broken."""

    def crossed(self, scores: Mapping[str, float]) -> bool:
        """Whether the metric is where it should be."""
        return _COMPARE[self.comparison](scores[self.metric], self.value)

    def looping(self, scores: Mapping[str, float]) -> bool:
        """Whether there is too much degenerate output to stop here."""
        return self.most_degenerate is not None and scores["degenerate"] > self.most_degenerate

    def __str__(self) -> str:
        rule = f"{self.metric} {self.comparison} {self.value:.4g}" + (f" ({self.why})" if self.why else "")
        return rule if self.most_degenerate is None else f"{rule} with degenerate <= {self.most_degenerate:.4g}"


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
