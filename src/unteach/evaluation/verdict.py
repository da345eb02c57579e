"""What the scores say, in a sentence: was it forgotten, and is the rest still there?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unteach.evaluation.metrics import METRICS
from unteach.writing import format_number

KEPT = 0.9
"""Share of the answers on retained documents from which on they count as kept."""
DEGENERATE_RISE = 5.0
"""Rise in repetitive output, in points, that counts as damage."""
NLL_RISE = 0.1
"""Rise of the general-text loss, in nats per token, that counts as damage."""
Forgotten = Literal["yes", "within noise", "no", "unknown"]
Kept = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on: the scores of one method, and those to compare them with."""

    label: str
    after: Mapping[str, float]
    before: Mapping[str, float] = field(default_factory=dict)
    recital_low: float | None = None
    """Lower bound of `after["verbmem_f"]`."""
    retrained_recital: float | None = None
    """`verbmem_f` of a model retrained without the forget documents."""
    steps: float | None = None

    @property
    def yardstick(self) -> tuple[float, str] | None:
        """The recital of a model without the forget documents, and its source; failing that, of texts never seen."""
        if self.retrained_recital is not None:
            return self.retrained_recital, "a model retrained without them"
        unseen = self.after.get("verbmem_holdout")
        return None if unseen is None else (unseen, "texts it never saw")

    @property
    def kept_share(self) -> float | None:
        """Share of the answers on retained documents that is still given."""
        after, before = self.after.get("knowmem_r"), self.before.get("knowmem_r")
        return after / before if after is not None and before else None


@dataclass(frozen=True)
class Verdict:
    """One method judged: a sentence, and the two questions behind it."""

    label: str
    sentence: str
    forgotten: Forgotten
    kept: Kept


def judge(evidence: Evidence, subject: str = "the model") -> Verdict:
    """Judge one method; `subject` is how the sentence calls it."""
    forgotten, recital = _recital(evidence)
    kept, utility = _utility(evidence)
    start = f"After {evidence.steps:,.0f} steps {subject}" if evidence.steps else subject[:1].upper() + subject[1:]
    if not recital and not utility:
        return Verdict(evidence.label, f"{start} has no score yet that says what was forgotten.", "unknown", kept)
    joint = ", and " if kept == "yes" or forgotten in ("no", "unknown") else ", but "
    sentence = f"{start} {joint.join(part for part in (recital, utility) if part)}."
    return Verdict(evidence.label, sentence, forgotten, kept)


def _recital(evidence: Evidence) -> tuple[Forgotten, str]:
    value, before = evidence.after.get("verbmem_f"), evidence.before.get("verbmem_f")
    if value is None:
        return "unknown", ""
    if evidence.yardstick is None:
        if before is None:
            return "unknown", f"recites the forget documents with ROUGE-L {format_number(value)}"
        less = "less than before" if value < before else "no less than before"
        figures = f"(ROUGE-L {format_number(value)}, was {format_number(before)})"
        return "unknown", f"recites the forget documents {less} {figures}"
    limit, source = evidence.yardstick
    was = f"; {format_number(before)} before" if before is not None else ""
    figures = f"(ROUGE-L {format_number(value)} against {format_number(limit)}{was})"
    if value <= limit:
        return "yes", f"recites the forget documents no better than {source} {figures}"
    if evidence.recital_low is not None and evidence.recital_low <= limit:
        return "within noise", f"recites the forget documents about as well as {source} {figures}"
    return "no", f"still recites the forget documents better than {source} {figures}"


def _utility(evidence: Evidence) -> tuple[Kept, str]:
    """Retained answers first, and whatever else shows damage."""
    damage: list[str] = []
    said = ""
    share = evidence.kept_share
    if share is not None:
        figures = f"({format_number(evidence.after['knowmem_r'])}, was {format_number(evidence.before['knowmem_r'])})"
        answers = f"of its answers on retained documents {figures}"
        if share >= KEPT:
            said = f"kept all {answers}" if share >= 1 else f"kept {100 * share:.0f} % {answers}"
        else:
            damage.append(f"kept only {100 * share:.0f} % {answers}")
    for metric, limit, unit, worse, same in (
        ("degenerate", DEGENERATE_RISE, " %", "falls into repetition more often", ""),
        (
            "nll_general",
            NLL_RISE,
            " nats per token",
            "reads general text worse",
            "reads general text as well as before",
        ),
    ):
        after, before = evidence.after.get(metric), evidence.before.get(metric)
        if after is None or before is None:
            continue
        places = METRICS[metric].decimals
        figures = f"({format_number(after, places)}{unit}, was {format_number(before, places)})"
        if after - before > limit:
            damage.append(f"{worse} {figures}")
        elif same and not said and not damage:
            said = f"{same} {figures}"
    if damage:
        return "no", " and ".join(damage)
    return ("yes" if said else "unknown"), said


def summary(judged: Sequence[Evidence]) -> str:
    """One sentence about the methods measured on the same data; at least one."""
    if len(judged) == 1:
        return judge(judged[0]).sentence
    yardstick = judged[0].yardstick
    if yardstick is None:
        return (
            f"{len(judged)} methods measured; without a retrained model or never-seen texts nothing says how"
            " low recital should go."
        )
    limit, source = yardstick
    shared = judged[0].retrained_recital is not None  # else each has its own
    level = f"{source} (ROUGE-L {format_number(limit)})" if shared else source
    done = [evidence for evidence in judged if _recital(evidence)[0] == "yes"]
    if not done:
        measured = [evidence for evidence in judged if "verbmem_f" in evidence.after]
        nearest = min(measured, key=lambda evidence: evidence.after["verbmem_f"], default=None)
        least = f"; {nearest.label} comes nearest ({format_number(nearest.after['verbmem_f'])})" if nearest else ""
        return f"None of {len(judged)} methods recites the forget documents as little as {level}{least}."
    counted = f"{len(done)} of {len(judged)} methods"
    if len(done) == len(judged):
        counted = "Both methods" if len(judged) == 2 else f"All {len(judged)} methods"
    verb = "recites" if len(done) == 1 else "recite"
    start = f"{counted} {verb} the forget documents no better than {level}"
    shares = {evidence.label: share for evidence in done if (share := evidence.kept_share) is not None}
    if not shares:
        return f"{start}."
    best = max(shares, key=lambda label: shares[label])
    keeps = f"{best} keeps most," if len(shares) > 1 else f"{best} keeps"
    return f"{start}; {keeps} {100 * shares[best]:.0f} % of its answers on retained documents."
