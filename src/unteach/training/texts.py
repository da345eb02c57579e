"""What a step reads: forget documents with what their loss must know, the model's own loops, and held text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unteach.config import ForgetConfig, Method
from unteach.data import ForgetBatches, GeneralText
from unteach.method.losses import LOSSES, ForgetLoss
from unteach.method.shards import other_weights
from unteach.models.distributed import parts_of_rank
from unteach.training.own_loops import NO_LOOPS, OwnLoops
from unteach.training.passes import HeldText, LogOddsOfModel, Parts, Pull, Reading, by_length, read

__all__ = ["OtherModels", "Texts", "texts_of_step"]


@dataclass(frozen=True, slots=True)
class Texts:
    """What a run reads."""

    forget: ForgetBatches
    general: GeneralText
    keep: ForgetBatches | None = None
    """Documents like the forgotten ones, to be kept."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document: micro-batches are measured by it."""
        documents = [*self.forget.sequences, *(self.keep.sequences if self.keep else ())]
        return max(map(len, documents))


class OtherModels:
    """What forget losses compare the student with: the model before unlearning, and a given base model.

    Log-odds are computed once for all documents; logits and hidden states are read anew at every step.
    """

    def __init__(
        self, model: Any, parameters: Mapping[str, torch.nn.Parameter], base: Any,
        sequences: Sequence[Sequence[int]], config: ForgetConfig, methods: Sequence[Method],
    ) -> None:  # fmt: skip
        self._model, self._base, self._config = model, base, config
        losses = [LOSSES[method.loss] for method in methods]
        kinds = {(loss.base, loss.reads == "log_odds") for loss in losses}
        sure = any((method.token_share or 1.0) < 1 for method in methods)
        self.initial = LogOddsOfModel(model, sequences, config) if sure or ("initial", True) in kinds else None
        self.given = LogOddsOfModel(base, sequences, config) if ("given", True) in kinds else None
        self._parameters = list(parameters.values())
        needed = ("initial", False) in kinds or any(method.anchor for method in methods)
        self._start: list[Tensor] = [p.detach().clone() for p in self._parameters] if needed else []

    def read(self, loss: ForgetLoss, sequences: Sequence[Sequence[int]], parts: Parts, layer: int | None) -> Reading:
        """The reading of the model that a loss compares with."""
        precision = self._config.precision.forget
        if loss.base == "given":
            return read(self._base, sequences, parts, self._config, precision, layer)
        return self.read_initial(sequences, parts, precision, layer)

    def read_initial(
        self, sequences: Sequence[Sequence[int]], parts: Parts, precision: str, layer: int | None = None
    ) -> Reading:
        """The reading of the model before the run."""
        with other_weights(self._parameters, self._start):
            return read(self._model, sequences, parts, self._config, precision, layer)


def texts_of_step(
    texts: Texts, method: Method, config: ForgetConfig, step: int, others: OtherModels | None = None,
    loops: OwnLoops = NO_LOOPS,
) -> tuple[list[Pull], list[HeldText]]:  # fmt: skip
    """What the student is pulled away from in a step, and what it is held on.

    Args:
        texts: All texts of the run.
        method: The loss and the divergence.
        config: Batch sizes and precision.
        step: The step's number, from 0; it decides the batches.
        others: What the loss compares with; None where it compares with nothing.
        loops: What the model repeats by itself.
    """
    pulls = [_documents(texts, method, config, step, others)]
    if loops.sequences:
        pulls.append(_own_loops(loops, texts, config))
    held = [_held(texts.general.batch(step, config.general_batch), 1.0, texts, method, config, others)]
    if texts.keep is not None:
        kept = texts.keep.batch(step, config.keep_batch)
        held.append(_held(kept, config.keep_weight, texts, method, config, others))
    return pulls, held


def _documents(texts: Texts, method: Method, config: ForgetConfig, step: int, others: OtherModels | None) -> Pull:
    """The forget documents of a step, with what the method's loss needs to know of them."""
    loss, numbers = LOSSES[method.loss], texts.forget.numbers(step, config.batch)
    sequences = [texts.forget.sequences[n] for n in numbers]
    pull = Pull(
        sequences=sequences,
        parts=_micro_batches(sequences, config, texts.longest),
        loss=method.loss,
        options=method.loss_options,
    )
    changes: dict[str, Any] = {}
    if others is None:
        return pull
    share = method.token_share or 1.0
    if others.initial and share < 1:
        changes["chosen"] = others.initial.least_sure(numbers, share)
    compared = {"initial": others.initial, "given": others.given, None: None}[loss.base]
    if loss.reads == "log_odds" and compared:
        changes["base_log_odds"] = [compared.values[n] for n in numbers]
    elif loss.base is not None:
        changes["base"] = others.read(loss, sequences, pull.parts, pull.layer)
    return dataclasses.replace(pull, **changes)


def _own_loops(loops: OwnLoops, texts: Texts, config: ForgetConfig) -> Pull:
    """What the model repeats over and over by itself: unlearned by NLUL, whatever the documents' loss is."""
    parts = _micro_batches(loops.sequences, config, texts.longest)
    return Pull(sequences=loops.sequences, parts=parts, loss="nlul", chosen=loops.repeated)


def _held(
    sequences: Sequence[Sequence[int]], weight: float, texts: Texts, method: Method, config: ForgetConfig,
    others: OtherModels | None,
) -> HeldText:  # fmt: skip
    """Text on which the student is held to the teacher, and with an anchor to the model before the run, too."""
    parts = _micro_batches(sequences, config, texts.longest)
    text = HeldText(sequences=sequences, parts=parts, divergence=method.divergence, weight=weight)
    if not method.anchor or others is None:
        return text
    reading = others.read_initial(sequences, parts, config.precision.divergence)
    return dataclasses.replace(text, readings=[(method.anchor * weight, reading)])


def _micro_batches(sequences: Sequence[Sequence[int]], config: ForgetConfig, longest: int) -> Parts:
    """This rank's micro-batches: numbers of sequences of like length."""
    lengths = [len(sequence) for sequence in sequences]
    return parts_of_rank(
        range(len(sequences)), lambda x: by_length(x, [lengths[n] for n in x], config.micro_batch, longest)
    )
