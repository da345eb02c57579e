"""Four questions about an unlearned model, answered from its scores: one function for page, card, terminal and JSON.

Are the documents still recited, known, detectable; and is the rest kept? An answer is yes (✓), no (✗) or open (?), and
comes with its number, what it was before, and what a model has that never saw the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unteach.evaluation.metrics import LOSS_AUC, RAW_AUC, describe
from unteach.evaluation.statistics import Metric
from unteach.writing import format_number

__all__ = ["Finding", "judge", "lines", "sentence", "stop_scores"]

AUC_BAND = 0.1
"""So far from never-seen text's an AUC may lie, on either side, even where its interval is narrower."""
KEPT_ANSWERS = 0.9
"""Share of the answers on kept documents from which on they count as kept."""
NOT_MEASURED = "not measured: give "
KEEP = "--keep, ten documents or more"
MARKS = {True: "✓", False: "✗", None: "?"}
TITLES = {
    "no longer recited": ("still recited", "recited"),
    "no longer known": ("still known", "known"),
    "no longer detectable": ("still detectable", "detectable"),
    "rest kept": ("rest damaged", "rest kept"),
}
"""The four questions, each as it reads where the answer is yes; and where it is no, and where it is open."""
Scored = Mapping[str, Metric]


@dataclass(frozen=True)
class Finding:
    """The answer to one question."""

    question: str
    """One of `TITLES`; of a part, what it looks at."""
    answer: bool | None
    """True: as it should be. None: not measured, or nothing to judge by; the note says what to give."""
    metric: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    before: float | None = None
    never_seen: float | None = None
    """The value of a model, or a text, that has nothing to do with the documents."""
    source: str = ""
    """Whose value that is."""
    note: str = ""
    parts: tuple[Finding, ...] = field(default=())
    """What the answer is made of, where it is more than one measurement."""

    @property
    def mark(self) -> str:
        """✓, ✗ or ?."""
        return MARKS[self.answer]

    @property
    def title(self) -> str:
        """The question as its answer reads: `still known`."""
        wrong, unsure = TITLES.get(self.question, (self.question, self.question))
        return {True: self.question, False: wrong, None: unsure}[self.answer]

    @property
    def figures(self) -> str:
        """The number in words: `17.2 [15.1, 19.0], before 99.9, never seen 17.8 (the reference model)`."""
        if self.value is None:
            return ""
        places = describe(self.metric).decimals
        text = f"{describe(self.metric).title or self.metric} {format_number(self.value, places)}"
        if self.low is not None and self.high is not None:
            text += f" [{format_number(self.low, places)}, {format_number(self.high, places)}]"
        if self.before is not None:
            text += f", before {format_number(self.before, places)}"
        if self.never_seen is not None:
            text += f", never seen {format_number(self.never_seen, places)} ({self.source})"
        return text

    @property
    def line(self) -> str:
        """Everything in one line, for a terminal."""
        facts = "; ".join(fact for fact in (self.figures, self.note) if fact)
        return f"{self.mark} {self.title}{f': {facts}' if facts else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def judge(
    after: Scored, before: Scored | None = None, reference: Scored | None = None, base: Scored | None = None
) -> tuple[Finding, ...]:
    """Answer the four questions.

    Args:
        after: scores of the unlearned model.
        before: of the model it was made from.
        reference: of a model trained without the documents.
        base: of a model from before it was trained on them; only its answers (`knowmem_f`) are looked at.
    """
    before, reference, base = before or {}, reference or {}, base or {}
    unseen_text = before.get("verbmem_holdout") or after.get("verbmem_holdout")
    recital = _never_seen("verbmem_f", ((reference, "the reference model"),)) or (unseen_text, "never-seen text")
    models = (reference, "the reference model"), (base, "the base model")
    knowledge = _never_seen("knowmem_f", models) or (None, "")
    return (
        _at_most("no longer recited", "verbmem_f", after, before, recital, "--documents", "--reference or --holdout"),
        _at_most("no longer known", "knowmem_f", after, before, knowledge, "--questions", "--reference or --base"),
        _detectable(after, before, reference),
        _rest(after, before, reference),
    )


def _never_seen(metric: str, models: Sequence[tuple[Scored, str]]) -> tuple[Metric | None, str] | None:
    return next(((scores[metric], whose) for scores, whose in models if metric in scores), None)


def _measured(question: str, metric: str, after: Scored, before: Scored) -> Finding:
    value, earlier = after[metric], before.get(metric)
    return Finding(question, None, metric, value.value, value.low, value.high, earlier.value if earlier else None)


def _at_most(
    question: str,
    metric: str,
    after: Scored,
    before: Scored,
    never: tuple[Metric | None, str],
    measured_by: str,
    judged_by: str,
) -> Finding:
    """Yes where the value is at most what a model has that never saw the documents, within that value's interval."""
    if metric not in after:
        return Finding(question, None, metric, note=NOT_MEASURED + measured_by)
    found, (level, source) = _measured(question, metric, after, before), never
    if level is None:
        return replace(found, note=f"level of a model that never saw them {NOT_MEASURED}{judged_by}")
    limit = level.value if level.high is None else max(level.value, level.high)
    noise = "within the interval of what was never seen" if level.value < after[metric].value <= limit else ""
    answer = after[metric].value <= limit
    return replace(found, answer=answer, never_seen=level.value, source=source, note=noise)


def _detectable(after: Scored, before: Scored, reference: Scored) -> Finding:
    """Two-sided: text that is less likely than never-seen text gives itself away, too."""
    question, parts = "no longer detectable", []
    for metric, name in ((RAW_AUC, "by its least likely words"), (LOSS_AUC, "by its loss")):
        if metric not in after:
            parts.append(Finding(name, None, metric, note=NOT_MEASURED + "--holdout"))
            continue
        found, score = _measured(name, metric, after, before), after[metric]
        centre, source = 0.5, "chance"
        if metric in reference:
            centre, source = reference[metric].value, "the reference model"
        inside = score.low is not None and score.high is not None and score.low <= centre <= score.high
        undetected = inside or abs(score.value - centre) <= AUC_BAND
        overshoot = not undetected and score.value > centre
        note = "overshoot: they stand out as less likely than never-seen text" if overshoot else ""
        parts.append(replace(found, answer=undetected, never_seen=centre, source=source, note=note))
    first = next((part for part in parts if part.answer is False), parts[0])
    if first.value is None:
        return replace(first, question=question)
    answers = [part.answer for part in parts]
    answer = False if False in answers else None if None in answers else True
    note = first.note if answer is False else next((part.note for part in parts if part.note), "")
    return replace(first, question=question, answer=answer, note=note, parts=tuple(parts))


def _rest(after: Scored, before: Scored, reference: Scored) -> Finding:
    """Yes only where nothing was damaged and documents or answers like the forgotten ones were looked at."""
    kept: dict[tuple[str, str], tuple[str, Callable[[float, float], bool]]] = {
        ("general text", "nll_general"): ("--general", lambda now, then: now <= then + 0.1),
        ("kept documents", "nll_retain"): (KEEP, lambda now, then: now <= then + 0.5),
        ("recital of kept documents", "verbmem_r"): (KEEP, lambda now, then: now >= then - 10),
        ("kept answers", "knowmem_r"): ("--keep-questions", lambda now, then: now >= KEPT_ANSWERS * then),
        ("fluency", "degenerate"): ("--documents", lambda now, then: now <= then + 5),
    }
    parts = []
    for (name, metric), (flag, is_kept) in kept.items():
        if metric not in after:
            parts.append(Finding(name, None, metric, note=NOT_MEASURED + flag))
            continue
        found, level = _measured(name, metric, after, before), reference.get(metric)
        if level is not None:
            found = replace(found, never_seen=level.value, source="the reference model")
        if found.before is None:
            parts.append(replace(found, note="not measured before"))
        else:
            parts.append(replace(found, answer=is_kept(after[metric].value, found.before)))
    damaged = [part.question for part in parts if part.answer is False]
    near = any(part.answer for part in parts if part.metric in ("nll_retain", "verbmem_r", "knowmem_r"))
    if damaged:
        answer, note = False, f"damaged: {', '.join(damaged)}"
    elif near:
        missing = [part.question for part in parts if part.answer is None]
        answer, note = True, f"not measured: {', '.join(missing)}" if missing else ""
    else:
        answer, note = None, f"on documents like these {NOT_MEASURED}--keep or --keep-questions"
    return Finding("rest kept", answer, note=note, parts=tuple(parts))


def stop_scores(values: Mapping[str, float]) -> dict[str, Metric]:
    """Scores of a stop rule, plain numbers with the upper bounds of some beside them, as `judge` takes them."""
    return {
        name: Metric(value, None, values.get(f"{name}_high"), 0, None, describe(name).unit)
        for name, value in values.items()
    }


def lines(findings: Sequence[Finding]) -> list[str]:
    """The four answers for a terminal, the parts of the last beneath it."""
    return [
        *(found.line for found in findings),
        *(f"    {part.line}" for found in findings[3:] for part in found.parts),
    ]


def sentence(judged: Mapping[str, Sequence[Finding]], steps: float | None = None) -> str:
    """The verdict on one method, or on several counted together, in a sentence.

    Args:
        judged: at least one method's findings.
        steps: after how many, of a single method.
    """
    findings = next(iter(judged.values()))
    if len(judged) > 1:
        counts = [sum(found[place].answer is True for found in judged.values()) for place in range(len(TITLES))]
        said = ", ".join(f"{title} {count} of {len(judged)}" for title, count in zip(TITLES, counts, strict=True))
        return f"{len(judged)} methods: {said}."
    start = f"After {steps:,.0f} steps the documents" if steps else "The documents"
    states = [found.title for found in findings[:3] if found.answer is not None]
    rest = {True: "the rest is kept", False: "the rest is damaged"}.get(findings[3].answer)  # type: ignore[arg-type]
    said = (
        f"{start} are {' and '.join([', '.join(states[:-1]), states[-1]] if states[1:] else states)}" if states else ""
    )
    said = (f"{said}, and {rest}" if rest else said) if said else (rest or "nothing is judged").capitalize()
    unsure = [found.title for found in findings if found.answer is None]
    return f"{said}; not judged: {', '.join(unsure)}." if unsure else f"{said}."
