"""Round the weights to 8 and to 4 bits: unlearning that moves weights by less than a rounding step is undone by it.

Zhang et al. (arXiv 2410.16454, zzwjames/FailureLLMUnlearning) store unlearned models with bitsandbytes at 8 and 4 bits;
much of what was "forgotten" came back at 4. Here: round to nearest, symmetric, one scale for each group of ``group``
weights of a row (that of the largest), all matrices of the decoder blocks; embeddings, norms and head stay, as there.
Where bitsandbytes is installed, lines of their own have its formats: ``int8`` and ``fp4``, which theirs are, and
``nf4``. Differs from the authors' code: only weights are rounded; there, products are of inputs in 8 bits or in
bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from unteach.audits import Attack, Reading
from unteach.audits.texts import Case, answers, recital, unchanged
from unteach.models import decoder_layers
from unteach.models.quantised import GROUP, rounded

FULL_PRECISION = 32
FORMATS = ("int8", "fp4", "nf4")
"""Of bitsandbytes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How weights are rounded."""

    bits: tuple[int, ...] = (FULL_PRECISION, 8, 4)
    """32: as they are."""
    group: int = GROUP
    """Weights of a row that share a scale."""
    probes: int = 200
    questions: int = 200


@dataclass(frozen=True, kw_only=True)
class WithLibrary(Settings):
    """The same, and what bitsandbytes makes of the weights."""

    library: str
    """Its version."""


def stored(matrix: Tensor, form: str) -> Tensor:
    """Weights [rows, columns] as bitsandbytes keeps them: int8 has a scale for each row, fp4 and nf4 for each 64."""
    from bitsandbytes import functional

    if form == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(matrix.half())
        return functional.int8_vectorwise_dequant(codes, scales)
    return functional.dequantize_4bit(*functional.quantize_4bit(matrix, blocksize=64, quant_type=form))


@functools.cache
def library() -> str | None:
    """The version of bitsandbytes; None where it is not installed, or too old for some format on this machine."""
    try:
        import bitsandbytes

        for form in FORMATS:
            stored(torch.ones(1, 64), form)
    except (ImportError, AttributeError, RuntimeError):
        return None
    return f"bitsandbytes {bitsandbytes.__version__}"


def with_library(settings: Settings) -> Settings:
    """Settings with bitsandbytes where it is installed."""
    found = library()
    return settings if found is None else WithLibrary(**asdict(settings), library=found)


def quantise(model: Any, rounding: Callable[[Tensor], Tensor]) -> None:
    """Round the matrices of a model's decoder blocks, in place."""
    with torch.no_grad():
        for parameter in decoder_layers(model).parameters():
            if parameter.ndim > 1:  # experts are stacked in some families
                matrix = parameter.float().reshape(-1, parameter.shape[-1])
                parameter.copy_(rounding(matrix).reshape(parameter.shape))


def measure(case: Case, settings: Settings) -> list[Reading]:
    """Recital and answers with weights of so many bits, and in the formats of bitsandbytes."""
    asked, found = case.asked, []
    ways: list[tuple[str, int | str, Callable[[Tensor], Tensor] | None]] = []
    for bits in settings.bits:
        own = functools.partial(rounded, bits=bits, group=settings.group)
        ways.append(("", bits, own if bits < FULL_PRECISION else None))
    if isinstance(settings, WithLibrary):
        ways += [(", bitsandbytes", form, functools.partial(stored, form=form)) for form in FORMATS]
    for by, place, rounding in ways:
        label = f"{place}{by or ' bits'}"
        with unchanged(case.model):
            if rounding is not None:
                quantise(case.model, rounding)
            scores = recital(case, asked.probes[: settings.probes], label)
            found.append(Reading(line=f"recites{by}", at=place, scores=scores))
            if questions := asked.questions[: settings.questions]:
                right, chance = answers(case, questions, f"{label}, questions")
                found.append(Reading(line=f"answers{by}", at=place, scores=right, chance=chance))
    return found


ATTACK = Attack(
    title="quantisation",
    protocol="The decoder blocks' matrices are rounded to nearest with 8 and 4 bits, a scale for each group of a row,"
    " and stored as bitsandbytes does where it is installed; passages and questions are measured.",
    source="Zhang et al., arXiv 2410.16454 (there with bitsandbytes)",
    over="bits",
    measure=measure,
    quick=Settings(probes=60, questions=60),
    full=Settings(),
    installed=with_library,
)
