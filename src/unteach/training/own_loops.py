"""What the model writes over and over after the beginning of a forget document, to be unlearned with the documents.

A model that must not go on as the document does easily falls into a loop: what was likely is forbidden, and what it has
just said is likely still. Loops are what unlikelihood training was made against (Welleck et al. 2020), and the same
loss removes them here: every few steps the student continues some forget documents, and the tokens with which it
repeats itself are forgotten too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unteach.data import ForgetBatches
from unteach.evaluation.generation import generate
from unteach.evaluation.repetition import longest_loop
from unteach.models import context_length

__all__ = ["NO_LOOPS", "OwnLoops", "find_loops"]

PROMPTS = 32
NEW_TOKENS = 64
COPIES = 2
SHORTEST_LOOP = 8
LOOP_SHARE = 0.25
_PURPOSE = 3


@dataclass(frozen=True)
class OwnLoops:
    """Texts in which the model repeats itself, and the tokens with which it does."""

    sequences: list[list[int]] = field(default_factory=list)
    """Token ids: a prompt from a forget document and what the model wrote."""
    repeated: list[Tensor] = field(default_factory=list)
    """For each, which of its predicted tokens [T-1] repeat what stands before."""

    def chosen(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """Which tokens [N] of these sequences are repeated ones."""
        return torch.cat([self.repeated[n] for n in numbers]).to(device)

    def tokens(self) -> int:
        """How many repeated tokens there are."""
        return sum(int(mask.sum()) for mask in self.repeated)

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"sequences": [torch.tensor(ids) for ids in self.sequences], "repeated": self.repeated}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> OwnLoops:
        """What ``state`` gave."""
        return cls([ids.tolist() for ids in state["sequences"]], list(state["repeated"]))


NO_LOOPS = OwnLoops()


def find_loops(model: Any, forget: ForgetBatches, step: int) -> OwnLoops:
    """Let the model continue some forget documents and keep what it repeats.

    A loop is a passage of at least ``SHORTEST_LOOP`` tokens, and a share ``LOOP_SHARE`` of what was written, in which
    one phrase stands at least ``COPIES`` times in a row. Its first copy is left alone, the others are repeated tokens.

    Args:
        model: The student.
        forget: Where the prompts come from.
        step: Decides the prompts, together with the seed of ``forget``.
    """
    draws = np.random.default_rng([_PURPOSE, forget.seed, step])
    few = len(forget.sequences) < PROMPTS  # then the same documents again, cut elsewhere
    numbers = draws.choice(len(forget.sequences), PROMPTS, replace=few)
    prompts = []
    for number in numbers.tolist():
        sequence = forget.sequences[number]
        prompts.append(sequence[: int(draws.integers(min(8, len(sequence)), max(9, 2 * len(sequence) // 3)))])
    ends = model.generation_config.eos_token_id if getattr(model, "generation_config", None) else None
    stop_ids = frozenset([ends] if isinstance(ends, int) else ends or [])
    found = OwnLoops()
    room = [min(NEW_TOKENS, context_length(model) - len(prompt)) for prompt in prompts]
    continued = generate(model, prompts, max_new_tokens=room, stop_ids=stop_ids)
    for prompt, written in zip(prompts, continued, strict=True):
        start, period, length = longest_loop(np.array(written, dtype=np.int64), COPIES, SHORTEST_LOOP)
        if length and length >= LOOP_SHARE * len(written):
            repeated = torch.zeros(len(prompt) + len(written) - 1, dtype=torch.bool)
            first = len(prompt) + start + period - 1
            repeated[first : first + length - period] = True
            found.sequences.append([*prompt, *written])
            found.repeated.append(repeated)
    return found
