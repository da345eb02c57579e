"""What a step reads: forget documents with what their loss must know, the model's own loops, and held text.

A model that must not go on as the document does easily falls into a loop: what was likely is forbidden, and what it has
just said is likely still. Loops are what unlikelihood training was made against (Welleck et al. 2020), and the same
loss removes them here: every few steps the student continues some forget documents, and the tokens with which it
repeats itself are forgotten too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unteach.config import ForgetConfig, Method
from unteach.data import ForgetBatches, GeneralText, lengths_of
from unteach.evaluation.formulas import longest_loop
from unteach.evaluation.generation import generate
from unteach.method.losses import LOSSES
from unteach.method.tensors import other_weights
from unteach.models import context_length
from unteach.models.distributed import parts_of_rank
from unteach.training.pairs import pulls_of_pairs
from unteach.training.passes import HeldText, LogOddsOfModel, Parts, Pull, Reading, by_length, read

__all__ = ["NO_LOOPS", "OtherModels", "OwnLoops", "Texts", "find_loops", "loops_interval", "texts_of_step"]

PROMPTS = 32
NEW_TOKENS = 64
COPIES = 2
SHORTEST_LOOP = 8
LOOP_SHARE = 0.25
_PROMPT_DRAWS = 3
"""Sets these random draws apart from those of ``data.batches``."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What a run reads."""

    forget: ForgetBatches
    general: GeneralText
    keep: ForgetBatches | None = None
    """Documents like the forgotten ones, to be kept."""
    alternates: Sequence[Sequence[int]] = ()
    """For each sequence to be forgotten the one to be said in its place, where a loss reads pairs."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document: micro-batches are measured by it."""
        read = [batches.sequences for batches in (self.forget, self.keep) if batches]
        return max(int(lengths_of(sequences).max()) for sequences in (*read, self.alternates) if len(sequences))


class OtherModels:
    """What forget losses compare the student with: the model before unlearning, and a given base model.

    Log-odds are computed once, for all documents or those of the given ``numbers`` (see ``LogOddsOfModel``); logits and
    hidden states are read anew at every step. ``alternates`` are those of all ``sequences``, where a loss reads pairs.
    """

    def __init__(
        self, model: Any, parameters: Mapping[str, torch.nn.Parameter], base: Any,
        sequences: Sequence[Sequence[int]], config: ForgetConfig, methods: Sequence[Method],
        numbers: Sequence[int] | None = None, alternates: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        self._model, self._base, self._config = model, base, config
        losses = [LOSSES[method.loss] for method in methods]
        pairs = any(loss.reads == "pairs" for loss in losses)
        kinds = {(loss.base, loss.reads == "log_odds") for loss in losses}
        given = (sequences, config, numbers)
        sure = any((method.token_share or 1.0) < 1 for method in methods)
        self.initial = LogOddsOfModel(model, *given) if sure or pairs or ("initial", True) in kinds else None
        self.of_alternates = LogOddsOfModel(model, alternates, config, numbers) if pairs else None
        self.given = LogOddsOfModel(base, *given) if ("given", True) in kinds else None
        self._parameters = list(parameters.values())
        needed = ("initial", False) in kinds or any(method.anchor for method in methods)
        self._start: list[Tensor] = [p.detach().clone() for p in self._parameters] if needed else []

    def of_pairs(self, numbers: Sequence[int]) -> list[Tensor]:
        """Log-odds before the run of these documents, and then of their alternates."""
        return [known.of(number) for known in (self.initial, self.of_alternates) if known for number in numbers]

    def log_odds_now(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Those of sequences in the model as it is now."""
        return LogOddsOfModel(self._model, sequences, self._config).values

    def read(
        self, which: str | None, sequences: Sequence[Sequence[int]], parts: Parts, precision: str,
        layer: int | None = None,
    ) -> Reading:  # fmt: skip
        """The reading of the ``given`` model, or of the ``initial`` one, that before the run."""
        if which == "given":
            return read(self._base, sequences, parts, self._config, precision, layer)
        with other_weights(self._parameters, self._start):
            return read(self._model, sequences, parts, self._config, precision, layer)


@dataclass(frozen=True)
class OwnLoops:
    """Texts in which the model repeats itself, and the tokens with which it does."""

    sequences: list[list[int]] = field(default_factory=list)
    """Token ids: a prompt from a forget document and what the model wrote."""
    repeated: list[Tensor] = field(default_factory=list)
    """For each, which of its predicted tokens [T-1] repeat what stands before."""

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"sequences": [torch.tensor(ids) for ids in self.sequences], "repeated": self.repeated}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> OwnLoops:
        """What ``state`` gave."""
        return cls([ids.tolist() for ids in state["sequences"]], list(state["repeated"]))


NO_LOOPS = OwnLoops()


def loops_interval(method: Method, *, found: bool) -> int:
    """Steps between two searches for own loops, where looks have ``found`` more than before or not; 0: none is made."""
    return method.loops_every or 0 if found or not method.loops_once_found else 0


def find_loops(model: Any, forget: ForgetBatches, step: int) -> OwnLoops:
    """Let the model continue some forget documents, drawn by the step, and keep what it repeats.

    A loop is a passage of at least ``SHORTEST_LOOP`` tokens, and a share ``LOOP_SHARE`` of what was written, in which
    one phrase stands at least ``COPIES`` times in a row. Its first copy is left alone, the others are repeated tokens.
    """
    draws = np.random.default_rng([_PROMPT_DRAWS, forget.seed, step])
    few = len(forget.sequences) < PROMPTS  # then the same documents again, cut elsewhere
    prompts = []
    for number in draws.choice(len(forget.sequences), PROMPTS, replace=few).tolist():
        sequence = forget.sequences[number]
        prompts.append(sequence[: int(draws.integers(min(8, len(sequence)), max(9, 2 * len(sequence) // 3)))])
    ends = model.generation_config.eos_token_id if getattr(model, "generation_config", None) else None
    stop_ids = frozenset([ends] if isinstance(ends, int) else ends or [])
    room = [min(NEW_TOKENS, context_length(model) - len(prompt)) for prompt in prompts]
    continued = generate(model, prompts, max_new_tokens=room, stop_ids=stop_ids)
    found = OwnLoops()
    for prompt, written in zip(prompts, continued, strict=True):
        start, period, length = longest_loop(np.array(written, dtype=np.int64), COPIES, SHORTEST_LOOP)
        if length and length >= LOOP_SHARE * len(written):
            repeated = torch.zeros(len(prompt) + len(written) - 1, dtype=torch.bool)
            first = len(prompt) + start + period - 1
            repeated[first : first + length - period] = True
            found.sequences.append([*prompt, *written])
            found.repeated.append(repeated)
    return found


def texts_of_step(
    texts: Texts, method: Method, config: ForgetConfig, step: int, others: OtherModels | None = None,
    loops: OwnLoops = NO_LOOPS,
) -> tuple[list[Pull], list[HeldText]]:  # fmt: skip
    """What the student is pulled away from in a step, counted from 0, and what it is held on.

    ``others`` is what the loss compares with, ``loops`` what the model repeats by itself: that is unlearned by NLUL,
    whatever the documents' loss is.
    """
    size, longest = config.micro_batch, texts.longest

    def micro_batches(sequences: Sequence[Sequence[int]]) -> Parts:
        """This rank's: numbers of sequences of like length."""
        lengths = [len(sequence) for sequence in sequences]
        return parts_of_rank(range(len(sequences)), lambda x: by_length(x, [lengths[n] for n in x], size, longest))

    def held(sequences: Sequence[Sequence[int]], weight: float) -> HeldText:
        """Held to the teacher, and with an anchor to the model before the run, too."""
        parts = micro_batches(sequences)
        text = HeldText(sequences=sequences, parts=parts, divergence=method.divergence, weight=weight)
        if not method.anchor or others is None:
            return text
        reading = others.read("initial", sequences, parts, config.precision.divergence)
        return dataclasses.replace(text, readings=[(method.anchor * weight, reading)])

    numbers = texts.forget.numbers(step, config.batch)
    documents = [texts.forget.sequences[n] for n in numbers]
    pulls = [Pull(sequences=documents, parts=micro_batches(documents), loss=method.loss, options=method.loss_options)]
    if others is not None and LOSSES[method.loss].reads == "pairs":
        alternates = [texts.alternates[n] for n in numbers]
        now = others.log_odds_now([*documents, *alternates])
        pulls = pulls_of_pairs(pulls[0], alternates, micro_batches(alternates), now, others.of_pairs(numbers))
    elif others is not None:
        pulls = [dataclasses.replace(pulls[0], **_known_of(pulls[0], numbers, method, config, others))]
    if loops.sequences:
        parts = micro_batches(loops.sequences)
        pulls.append(Pull(sequences=loops.sequences, parts=parts, loss="nlul", chosen=loops.repeated))
    held_texts = [held(texts.general.batch(step, config.general_batch), 1.0)]
    if texts.keep is not None:
        held_texts.append(held(texts.keep.batch(step, config.keep_batch), config.keep_weight))
    return pulls, held_texts


def _known_of(
    pull: Pull, numbers: Sequence[int], method: Method, config: ForgetConfig, others: OtherModels
) -> dict[str, Any]:
    """What the method's loss needs to know of forget documents."""
    known: dict[str, Any] = {}
    loss, share = LOSSES[method.loss], method.token_share or 1.0
    if others.initial and share < 1:
        known["chosen"] = others.initial.least_sure(numbers, share)
    compared = others.initial if loss.base == "initial" else others.given
    if loss.base and loss.reads == "log_odds" and compared:
        known["base_log_odds"] = [compared.of(n) for n in numbers]
    elif loss.base:
        known["base"] = others.read(loss.base, pull.sequences, pull.parts, config.precision.forget, pull.layer)
    return known
