"""What the figures say, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unteach.evaluation.metrics import METRICS
from unteach.report.load import Run, number
from unteach.report.tables import Method, Section
from unteach.writing import format_number

KEPT = 0.9
"""Share of the answers on retained documents from which on they count as kept."""
DEGENERATE_RISE = 5.0
"""Rise in repetitive output, in points, that counts as damage."""
NLL_RISE = 0.1
"""Rise of the general-text loss, in nats per token, that counts as damage."""


@dataclass(frozen=True)
class Verdict:
    """One method judged: a sentence, and the two questions behind it."""

    label: str
    sentence: str
    forgotten: Literal["yes", "within noise", "no", "unknown"]
    kept: Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Yardstick:
    """The recital a model without the forget documents would reach, and where that figure comes from."""

    value: float
    phrase: str


def yardstick(section: Section, method: Method) -> Yardstick | None:
    """The retrained model's recital; failing that, the recital of texts never seen."""
    retrained = section.first("retrained")
    value = retrained.cell("verbmem_f").mean if retrained else None
    if value is not None:
        return Yardstick(value, "a model retrained without them")
    value = method.cell("verbmem_holdout").mean
    return None if value is None else Yardstick(value, "texts it never saw")


def judge(section: Section, method: Method, subject: str) -> Verdict:
    """Judge one method; `subject` is how the sentence calls it."""
    forgotten, recital = _recital(section, method)
    kept, utility = _utility(section, method)
    steps = method.steps().mean
    start = f"After {steps:,.0f} steps {subject}" if steps else subject[:1].upper() + subject[1:]
    parts = [recital] if recital else []
    if utility:
        joint = " and " if kept == "yes" or forgotten in ("no", "unknown") else " but "
        parts.append(joint.strip() + " " + utility if recital else utility)
    if not parts:
        return Verdict(method.label, f"{start} has no score yet that says what was forgotten.", "unknown", kept)
    return Verdict(method.label, f"{start} {', '.join(parts)}.", forgotten, kept)


def _recital(section: Section, method: Method) -> tuple[Literal["yes", "within noise", "no", "unknown"], str]:
    cell, target = method.cell("verbmem_f"), _before(section, method, "verbmem_f")
    if cell.mean is None:
        return "unknown", ""
    mean = format_number(cell.mean)
    was = f"; {format_number(target)} before" if target is not None else ""
    limit = yardstick(section, method)
    if limit is None:
        if target is None:
            return "unknown", f"recites the forget documents with ROUGE-L {mean}"
        less = "less than before" if cell.mean < target else "no less than before"
        return "unknown", f"recites the forget documents {less} (ROUGE-L {mean}, was {format_number(target)})"
    figures = f"(ROUGE-L {mean} against {format_number(limit.value)}{was})"
    if cell.mean <= limit.value:
        return "yes", f"recites the forget documents no better than {limit.phrase} {figures}"
    if cell.low is not None and cell.low <= limit.value:
        return "within noise", f"recites the forget documents about as well as {limit.phrase} {figures}"
    return "no", f"still recites the forget documents better than {limit.phrase} {figures}"


def _utility(section: Section, method: Method) -> tuple[Literal["yes", "no", "unknown"], str]:
    """Retained answers first, and whatever else shows damage."""
    damage: list[str] = []
    said = ""
    after, before = method.cell("knowmem_r").mean, _before(section, method, "knowmem_r")
    share = after / before if after is not None and before else None
    if share is not None and after is not None:
        figures = f"({format_number(after)}, was {format_number(before)})"
        if share >= 1:
            said = f"kept all of its answers on retained documents {figures}"
        elif share >= KEPT:
            said = f"kept {100 * share:.0f} % of its answers on retained documents {figures}"
        else:
            damage.append(f"kept only {100 * share:.0f} % of its answers on retained documents {figures}")
    for metric, limit, verb in (
        ("degenerate", DEGENERATE_RISE, "falls into repetition more often"),
        ("nll_general", NLL_RISE, "reads general text worse"),
    ):
        after, before = method.cell(metric).mean, _before(section, method, metric)
        if after is not None and before is not None and after - before > limit:
            places, unit = METRICS[metric].decimals, " %" if metric == "degenerate" else " nats per token"
            damage.append(f"{verb} ({format_number(after, places)}{unit}, was {format_number(before, places)})")
        elif after is not None and before is not None and metric == "nll_general" and not said and not damage:
            figures = f"({format_number(after, 3)} nats per token, was {format_number(before, 3)})"
            said = f"reads general text as well as before {figures}"
    if damage:
        return "no", " and ".join(damage)
    return ("yes" if said else "unknown"), said


def _before(section: Section, method: Method, metric: str) -> float | None:
    """The model before: this method's own step-0 evaluation, else the section's target."""
    own = method.before(metric).mean
    target = section.first("target")
    return own if own is not None or target is None else target.cell(metric).mean


def verdicts(section: Section) -> list[Verdict]:
    """One verdict per method of a section that has a result."""
    methods = [method for method in section.trained if any(member.result for member in method.members)]
    subjects = ["the model"] if len(methods) == 1 else [method.label for method in methods]
    return [judge(section, method, subject) for method, subject in zip(methods, subjects, strict=True)]


def headline(sections: Sequence[Section], runs: Sequence[Run]) -> str:
    """The sentence at the top of the page."""
    judged = [(section, verdicts(section)) for section in sections]
    judged = [(section, found) for section, found in judged if found]
    if not judged:
        return _unmeasured(sections, runs)
    sentences = []
    for section, found in judged:
        sentence = found[0].sentence if len(found) == 1 else _several(section, found)
        sentences.append(f"{section.title}: {sentence}" if len(judged) > 1 else sentence)
    return " ".join(sentences)


def _several(section: Section, found: Sequence[Verdict]) -> str:
    methods = {method.label: method for method in section.trained}
    limit = yardstick(section, methods[found[0].label])
    if limit is None:
        return (
            f"{len(found)} methods measured; without a retrained model or never-seen texts nothing says how"
            " low recital should go."
        )
    level = f" (ROUGE-L {format_number(limit.value)})" if section.first("retrained") else ""  # else each has its own
    done = [verdict for verdict in found if verdict.forgotten == "yes"]
    number_of = f"{len(done) or 'None'} of {len(found)} methods"
    if len(done) == len(found):
        number_of = "Both methods" if len(found) == 2 else f"All {len(found)} methods"
    if not done:
        means = {v.label: methods[v.label].cell("verbmem_f").mean for v in found}
        measured = {label: mean for label, mean in means.items() if mean is not None}
        nearest = min(measured, key=lambda label: measured[label]) if measured else ""
        least = f"; {nearest} comes nearest ({format_number(measured[nearest])})" if nearest else ""
        return f"{number_of} recites the forget documents as little as {limit.phrase}{level}{least}."
    verb = "recites" if len(done) == 1 else "recite"
    start = f"{number_of} {verb} the forget documents no better than {limit.phrase}{level}"
    shares = {}
    for verdict in done:
        after = methods[verdict.label].cell("knowmem_r").mean
        before = _before(section, methods[verdict.label], "knowmem_r")
        if after is not None and before:
            shares[verdict.label] = after / before
    if not shares:
        return f"{start}."
    best = max(shares, key=lambda label: shares[label])
    keeps = f"{best} keeps most," if len(shares) > 1 else f"{best} keeps"
    return f"{start}; {keeps} {100 * shares[best]:.0f} % of its answers on retained documents."


def _unmeasured(sections: Sequence[Section], runs: Sequence[Run]) -> str:
    """What can be said when no trained model was measured."""
    run = next((run for run in runs if run.steps), None)
    if run is None:
        return (
            "No method to judge: only models before or without unlearning were measured."
            if sections
            else "Nothing was measured yet."
        )
    values = [value for row in run.steps if (value := number(row.get("nll_forget"))) is not None]
    change = (
        f": the loss on the forget documents went from {values[0]:.2f} to {values[-1]:.2f} nats per token"
        if values
        else ""
    )
    others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"{run.name}{others}: {run.last_step or 0:,} steps, no evaluation of a trained model yet{change}."
