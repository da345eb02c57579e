"""Four questions about an unlearned model, answered from its scores: one function for page, card, terminal and JSON.

Are the documents still recited, known, detectable; and is the rest kept? An answer is yes (✓), no (✗) or open (?), and
comes with its number, what it was before, and what a model has that never saw the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from unteach.evaluation.formulas import FEW, Metric, chance_level
from unteach.evaluation.metrics import LOSS_AUC, RAW_AUC, describe
from unteach.writing import format_number

RAREST = {f"auc_forget_holdout_min_{share}": share for share in (5, 10, 20)}
"""Percent of a text's words, the least likely, by which it may be told where Min-40 % and the loss find nothing; no
stop rule asks them."""
FORGOTTEN = ("verbmem_f", "knowmem_f", RAW_AUC, LOSS_AUC, *RAREST)
"""What looks at the forget documents; all else looks at the rest."""
AUC_BAND = 0.1
"""So far from never-seen text's an AUC may lie, on either side, even where its interval is narrower."""
KEPT_ANSWERS = 0.9
"""Share of the answers on kept documents from which on they count as kept."""
ALMOST_NONE = 10.0
"""A model that scores no more than this on questions before the run answers almost none of them."""
NOT_MEASURED = "not measured: give "
ASKED_OTHERWISE = (
    "the model answered almost none of them before: is this how it was asked in training? --question-template"
)
KEEP = "--keep, ten documents or more"
HOLDOUT = "--holdout, never-seen documents like these (other text is told apart by its kind)"
REFERENCE = "the reference model"
TITLES = {
    "no longer recited": ("still recited", "recited"),
    "no longer known": ("still known", "known"),
    "no longer detectable": ("still detectable", "detectable"),
    "rest kept": ("rest damaged", "rest kept"),
}
"""The four questions, each as it reads where the answer is yes; and where it is no, and where it is open."""
MARKS: Mapping[bool | None, str] = {True: "✓", False: "✗", None: "?"}
"""What stands before an answer."""
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
    """The value of a model, or a text, that has nothing to do with the documents; `source` says which."""
    source: str = ""
    note: str = ""
    parts: tuple[Finding, ...] = ()
    """What the answer is made of, where it is more than one measurement."""

    @property
    def mark(self) -> str:
        """What stands before a title."""
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
        value, low, high, before, never_seen = (
            None if number is None else format_number(number, describe(self.metric).decimals)
            for number in (self.value, self.low, self.high, self.before, self.never_seen)
        )
        interval = f" [{low}, {high}]" if low and high else ""
        earlier = f", before {before}" if before else ""
        unseen = f", never seen {never_seen} ({self.source})" if never_seen else ""
        if never_seen and self.metric not in FORGOTTEN:  # the reference model has seen what is to be kept
            unseen = f", {self.source} {never_seen}"
        return f"{describe(self.metric).title or self.metric} {value}{interval}{earlier}{unseen}"

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
    """Answer the four questions from the scores of the unlearned model, and of the one it was made from.

    `reference` was trained without the documents, `base` is from before: only its answers (`knowmem_f`) are looked at.
    """
    before, reference, base = before or {}, reference or {}, base or {}
    known = [(scores.get("knowmem_f"), whose) for scores, whose in ((reference, REFERENCE), (base, "the base model"))]
    unseen = [(scores.get("verbmem_holdout"), "never-seen text") for scores in (before, after)]
    passages = after["verbmem_f"].count if "verbmem_f" in after else 0
    recited = [(_of_few(level, passages), who) for level, who in ((reference.get("verbmem_f"), REFERENCE), *unseen)]
    look = partial(_measured, after=after, before=before)
    return (
        _at_most(look("no longer recited", "verbmem_f", "--documents"), recited, "--reference or --holdout"),
        _known(_at_most(look("no longer known", "knowmem_f", "--questions"), known, "--reference or --base")),
        _detectable(look, reference),
        _rest(look, reference),
    )


def contradicting(verdict: Sequence[Finding], metrics: Sequence[str]) -> str:
    """What the answers deny of a stop rule that was met by its own passages: titles in a line, empty where nothing.

    A rule looks again and again and ends at the first model that meets it, so other passages may say otherwise. That
    the rarest words tell denies no rule: none asks them.
    """

    def denied(found: Finding) -> bool:
        parts = [part for part in found.parts or (found,) if part.metric not in RAREST]
        return any(part.metric in metrics for part in parts) and any(part.answer is False for part in parts)

    return ", ".join(found.title for found in verdict if denied(found))


def excess(verdict: Sequence[Finding], metrics: Collection[str]) -> dict[str, float]:
    """By how much each of these metrics is above what was never seen, where the answer is that it is above."""
    above = (found for found in verdict if found.metric in metrics and found.answer is False)
    return {found.metric: (found.value or 0.0) - (found.never_seen or 0.0) for found in above}


def _measured(question: str, metric: str, flag: str, after: Scored, before: Scored) -> Finding:
    """What was measured, not yet judged; or the flag that makes it measured."""
    now, then = after.get(metric), before.get(metric)
    if now is None:
        return Finding(question, None, metric, note=NOT_MEASURED + flag)
    return Finding(question, None, metric, now.value, now.low, now.high, then.value if then else None)


def _at_most(found: Finding, levels: Sequence[tuple[Metric | None, str]], flag: str) -> Finding:
    """Yes where the value is at most what a model has that never saw the documents, within that value's interval."""
    level, source = next((each for each in levels if each[0] is not None), (None, ""))
    if found.value is None:
        return found
    if level is None:
        return replace(found, note=f"level of a model that never saw them {NOT_MEASURED}{flag}")
    limit = level.value if level.high is None else max(level.value, level.high)
    noise = "within the interval of what was never seen" if level.value < found.value <= limit else ""
    found = replace(found, answer=found.value <= limit, never_seen=level.value, source=source, note=noise)
    if found.answer and found.before is not None and found.before <= limit:  # what was not there is not forgotten
        found = replace(found, note="and before no better than what was never seen")
    return found


def _known(found: Finding) -> Finding:
    """Open where the questions were hardly answered before: nothing can then be seen to be forgotten, or kept."""
    judged = found.value is not None and found.answer is not False
    if judged and found.before is not None and found.before <= ALMOST_NONE:
        return replace(found, answer=None, note=ASKED_OTHERWISE)
    return found


def unanswered(before: Mapping[str, float]) -> list[str]:
    """A warning for each kind of question that the model answers almost none of before a run."""
    few = {name: before[name] for name in ("knowmem_f", "knowmem_r") if before.get(name, 100.0) <= ALMOST_NONE}
    return [f"warning: {describe(name).title} {value:.1f}: {ASKED_OTHERWISE}" for name, value in few.items()]


def _of_few(level: Metric | None, count: int) -> Metric | None:
    """What text has that was never seen, with the wider interval that a mean of few passages like it has."""
    if level is None or not 0 < count < FEW:
        return level
    return replace(level, high=chance_level(level.value, level.high, level.count, count))


def _detectable(look: Callable[[str, str, str], Finding], reference: Scored) -> Finding:
    """Two-sided: text that is less likely than never-seen text gives itself away, too.

    Asked are MUSE's Min-40 %, the loss, and the fewest, least likely words, which tell of names and numbers.
    """
    asked = ((RAW_AUC, "by its least likely words"), (LOSS_AUC, "by its loss"))
    parts = [_told_apart(look(name, metric, HOLDOUT), reference) for metric, name in asked]
    fewest = [(f"by the least likely {share} % of its words", metric) for metric, share in RAREST.items()]
    rarest = [_told_apart(look(name, metric, HOLDOUT), reference) for name, metric in fewest]
    if measured := [part for part in rarest if part.value is not None]:
        most = max(measured, key=lambda part: (part.answer is False, abs((part.value or 0) - (part.never_seen or 0))))
        told = "; ".join(note for note in (most.question, most.note) if note) if most.answer is False else most.note
        parts.append(replace(most, note=told))
    first = next((part for part in parts if part.answer is False), parts[0])
    if first.value is None:
        return replace(first, question="no longer detectable")
    answers = [part.answer for part in parts]
    answer = False if False in answers else None if None in answers else True
    note = first.note if answer is False else next((part.note for part in parts if part.note), "")
    return replace(first, question="no longer detectable", answer=answer, note=note, parts=tuple(parts))


def _told_apart(found: Finding, reference: Scored) -> Finding:
    """The answer to whether an AUC is that of never-seen text."""
    if found.value is None:
        return found
    known = reference.get(found.metric)
    centre, source = (known.value, REFERENCE) if known else (0.5, "chance")
    inside = found.low is not None and found.high is not None and found.low <= centre <= found.high
    undetected = inside or abs(found.value - centre) <= AUC_BAND
    note = ""
    if undetected and found.before is not None and abs(found.before - centre) <= AUC_BAND:
        note = "and before no easier to tell: are those never-seen documents like these?"
    elif not undetected and found.value > centre:
        note = "overshoot: they stand out as less likely than never-seen text"
    return replace(found, answer=undetected, never_seen=centre, source=source, note=note)


def _rest(look: Callable[[str, str, str], Finding], reference: Scored) -> Finding:
    """Yes only where nothing was damaged and documents or answers like the forgotten ones were looked at."""
    kept: dict[tuple[str, str, str], Callable[[float, float], bool]] = {
        ("general text", "nll_general", "--general"): lambda now, then: now <= then + 0.1,
        ("kept documents", "nll_retain", KEEP): lambda now, then: now <= then + 0.5,
        ("recital of kept documents", "verbmem_r", KEEP): lambda now, then: now >= then - 10,
        ("kept answers", "knowmem_r", "--keep-questions"): lambda now, then: now >= KEPT_ANSWERS * then,
        ("fluency", "degenerate", "--documents"): lambda now, then: now <= then + 5,
    }
    parts = []
    for about, is_kept in kept.items():
        found = look(*about)
        now, then = found.value, found.before
        if now is not None and found.metric in reference:
            found = replace(found, never_seen=reference[found.metric].value, source=REFERENCE)
        if now is not None and then is None:
            found = replace(found, note="not measured before")
        found = found if now is None or then is None else replace(found, answer=is_kept(now, then))
        parts.append(_known(found) if found.metric == "knowmem_r" else found)
    damaged = [part.question for part in parts if part.answer is False]
    missing = [part.question for part in parts if part.answer is None]
    answer, note = None, f"on documents like these {NOT_MEASURED}--keep or --keep-questions"
    if damaged:
        answer, note = False, ", ".join(damaged)
    elif any(part.answer for part in parts if part.metric in ("nll_retain", "verbmem_r", "knowmem_r")):
        answer, note = True, f"not judged: {', '.join(missing)}" if missing else ""
    return Finding("rest kept", answer, note=note, parts=tuple(parts))


def stop_scores(values: Mapping[str, float]) -> dict[str, Metric]:
    """Scores of a stop rule, plain numbers with the upper bounds of some beside them, as `judge` takes them."""
    return {
        name: Metric(value, None, values.get(f"{name}_high"), 0, None, describe(name).unit)
        for name, value in values.items()
    }


def lines(findings: Sequence[Finding]) -> list[str]:
    """The four answers for a terminal, the parts of the last beneath it."""
    parts = [f"    {part.line}" for found in findings[3:] for part in found.parts]
    return [*(found.line for found in findings), *parts]


def sentence(judged: Mapping[str, Sequence[Finding]], steps: float | None = None) -> str:
    """The verdict on one method (after so many `steps`), or on several counted together, in a sentence."""
    findings = next(iter(judged.values()))
    if len(judged) > 1:
        counts = [sum(found[place].answer is True for found in judged.values()) for place in range(len(TITLES))]
        said = ", ".join(f"{title} {count} of {len(judged)}" for title, count in zip(TITLES, counts, strict=True))
        return f"{len(judged)} methods: {said}."
    start = f"After {steps:,.0f} steps the documents" if steps else "The documents"
    states = [found.title for found in findings[:3] if found.answer is not None]
    kept = findings[3].answer
    rest = "" if kept is None else f"the rest is {'kept' if kept else 'damaged'}"
    said = (rest or "nothing is judged").capitalize()
    if states:
        forgotten = " and ".join([", ".join(states[:-1]), states[-1]] if states[1:] else states)
        said = f"{start} are {forgotten}" + (f", and {rest}" if rest else "")
    unsure = [found.title for found in findings if found.answer is None]
    return f"{said}; not judged: {', '.join(unsure)}." if unsure else f"{said}."
