"""Round the weights to 8 and to 4 bits: unlearning that moves weights by less than a rounding step is undone by it.

Zhang et al. (zzwjames/FailureLLMUnlearning) store unlearned models with bitsandbytes at 8 and 4 bits; much of what was
"forgotten" came back at 4. Here: round to nearest, symmetric, one scale for each group of ``group`` weights of a row
(that of the largest), all matrices of the decoder blocks; embeddings, norms and head stay, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from unteach.audits import Attack, Reading
from unteach.audits.texts import Case, answers, recital, unchanged
from unteach.models import decoder_layers
from unteach.models.quantised import GROUP, rounded

FULL_PRECISION = 32


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How weights are rounded."""

    bits: tuple[int, ...] = (FULL_PRECISION, 8, 4)
    """32: as they are."""
    group: int = GROUP
    """Weights of a row that share a scale."""
    probes: int = 200
    questions: int = 200


def quantise(model: Any, bits: int, group: int) -> None:
    """Round the matrices of a model's decoder blocks, in place."""
    with torch.no_grad():
        for parameter in decoder_layers(model).parameters():
            if parameter.ndim > 1:  # experts are stacked in some families
                matrix = parameter.float().reshape(-1, parameter.shape[-1])
                parameter.copy_(rounded(matrix, bits, group).reshape(parameter.shape))


def measure(case: Case, settings: Settings) -> list[Reading]:
    """Recital and answers with weights of so many bits."""
    asked, found = case.asked, []
    for bits in settings.bits:
        with unchanged(case.model):
            if bits < FULL_PRECISION:
                quantise(case.model, bits, settings.group)
            scores = recital(case, asked.probes[: settings.probes], f"{bits} bits")
            found.append(Reading(line="recites", at=bits, scores=scores))
            if questions := asked.questions[: settings.questions]:
                right, chance = answers(case, questions, f"{bits} bits, questions")
                found.append(Reading(line="answers", at=bits, scores=right, chance=chance))
    return found


ATTACK = Attack(
    title="quantisation",
    protocol="The decoder blocks' matrices are rounded to nearest with 8 and 4 bits, a scale for each group of a row;"
    " passages and questions are measured.",
    source="zzwjames/FailureLLMUnlearning (there with bitsandbytes)",
    over="bits",
    measure=measure,
    quick=Settings(probes=60, questions=60),
    full=Settings(),
)
