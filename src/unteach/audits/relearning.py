"""Learn a tenth of the documents again, or unrelated text, and measure the others: does the rest come back?

Held-out relearning ("retraining on T": learn some of the facts again, ask for the others, subtract a control that never
learned them) brought back 61.5 % (GradDiff), 23.5 % (NPO) and 64.7 % (RMU) of facts: Deeb and Roger, arXiv 2410.08827,
aghyad-deeb/unlearning_evaluation. Relearning after n steps as Fan et al., arXiv 2502.05374 (OPTML-Group/Unlearn-Smooth,
``run_muse_relearn.sh``: learning rate 1e-5, 50 to 150 steps); TOFU's is 2e-5 (gnueaj/unlearning-depth-score). Unrelated
text: the paper's recovery table. AdamW, all weights, constant rate. The control learns the same part; a retrained model
gains from it what is in the part, and no more. What is judged is how far the model is beyond it after as many steps,
not how far it has risen (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unteach.audits import Attack, Reading
from unteach.audits.texts import Asked, Case, answers, recital, unchanged
from unteach.data import Documents, ForgetBatches, lengths_of, tokenise
from unteach.models import context_length
from unteach.training.finetune import add_nll_gradient, finetune, text_optimizer

SMALL = 50_000_000
"""A model with fewer weights learns at ``small_lr``."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a part is learned again."""

    share: float = 0.1
    """Of the documents (of whole groups of them)."""
    lr: float = 2e-5
    small_lr: float = 1e-4
    """For models of less than 50 million weights: the embedded one then knows the part after 20 to 80 steps."""
    steps: tuple[int, ...] = (0, 5, 10, 20, 40, 80)
    """After so many steps the others are measured."""
    batch: int = 24
    probes: int = 100
    questions: int = 120


def measure(case: Case, settings: Settings) -> list[Reading]:
    """Readings after each number of steps, on the documents that were not learned again."""
    part = case.asked.part(settings.share, case.seed)
    others = case.asked.apart_from(part)
    learned = Documents("part", [case.asked.documents.texts[number] for number in sorted(part)])
    found = []
    for after, texts in (("a tenth of the documents", learned), ("unrelated text", case.unrelated)):
        with unchanged(case.model):
            found += _curve(case, others, texts, after, settings)
        if case.role == "before":  # it knows everything still: only where it starts is of use
            found += [_moved(reading, "unrelated text") for reading in found]
            break
    return found


def _moved(reading: Reading, after: str) -> Reading:
    what = reading.line.split(" after ")[0]
    return Reading(line=f"{what} after {after}", at=reading.at, scores=reading.scores, chance=reading.chance)


def _curve(case: Case, others: Asked, texts: Documents, after: str, settings: Settings) -> list[Reading]:
    model, readings = case.model, list[Reading]()
    size = sum(parameter.numel() for parameter in model.parameters())
    rate = settings.small_lr if size < SMALL else settings.lr
    longest = int(lengths_of(case.asked.documents.encode(case.tokenizer)).max())
    most = min(context_length(model), others.max_tokens, longest + 2)  # steps of unrelated text then cost as much
    batches = ForgetBatches(tokenise(texts, case.tokenizer, mode="chunk", max_tokens=most), case.seed)
    optimizer = text_optimizer(model.parameters(), rate)
    precision = "bf16" if next(model.parameters()).device.type == "cuda" else "fp32"
    last = 0 if case.role == "before" else max(settings.steps)
    advance = case.start_bar(f"{case.role}: learning {after}", last)
    model.requires_grad_(True)

    def add_gradient(step: int) -> float:
        nll = add_nll_gradient(model, batches.batch(step, settings.batch), settings.batch, precision)
        advance(1)
        return nll

    def look(step: int) -> bool:
        if step in settings.steps:
            readings.extend(_readings(case, others, f"after {after}", step, settings))
        return False

    look(0)
    finetune(model.parameters(), optimizer, add_gradient, steps=last, learning_rate=lambda step: rate, after_step=look)
    return readings


def _readings(case: Case, others: Asked, after: str, step: int, settings: Settings) -> Sequence[Reading]:
    found = []
    if probes := others.probes[: settings.probes]:
        found.append(Reading(line=f"recites {after}", at=step, scores=recital(case, probes, f"{step} steps")))
    if questions := others.questions[: settings.questions]:
        right, chance = answers(case, questions, f"{step} steps, questions")
        found.append(Reading(line=f"answers {after}", at=step, scores=right, chance=chance))
    return found


ATTACK = Attack(
    title="relearning",
    protocol="A tenth of the documents (or unrelated text) is learned, AdamW on all weights; passages of the other"
    " documents and questions about them are measured after some steps.",
    source="RTT (Deeb and Roger, arXiv 2410.08827); Fan et al., arXiv 2502.05374; the paper's recovery table",
    over="steps",
    measure=measure,
    quick=Settings(steps=(0, 10, 40), batch=16, probes=48, questions=60),
    full=Settings(),
)
