"""Forward passes of a step: last hidden states of real tokens, and the loss and divergence they give."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unteach.config import ForgetConfig
from unteach.data import pad
from unteach.method.divergences import DIVERGENCES, NLL, kl_rows
from unteach.method.lean import LeanMeanTeacher
from unteach.method.losses import LOSSES, forget_loss
from unteach.method.vocab_head import Head, fused_rows, mean_of_rows, token_log_odds
from unteach.models import decoder_layers
from unteach.models.distributed import inside, share_out
from unteach.models.precision import HALF, half_weights, precision_of_pass, resolved_precision, rounded_layers
from unteach.models.tangents import MIDDLE, moving_weights, value_and_change

__all__ = [
    "HeldText", "LogOddsOfModel", "Pull", "Reading", "block_calls", "by_length", "computing", "forget_term",
    "held_term", "hidden_states", "in_micro_batches", "read", "read_as_teacher", "read_change",
]  # fmt: skip

_COMPILED = "_compiled_for_passes"
"""Attribute of a decoder block that keeps its compiled form between passes."""
FEW_TOKENS = 256
"""On so many the distance of two models is estimated."""
Parts = Sequence[tuple[Sequence[int], float]]
"""A rank's micro-batches: numbers of sequences, and the weight of each (``distributed.parts_of_rank``)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What another model, or the same one with other weights, makes of a text: hidden states, and its head."""

    hidden: list[Tensor]
    """Of each micro-batch, [N,D]."""
    head: Head
    is_change: bool = False
    """Whether ``hidden`` is by how much the student's hidden states differ from the other model's, x - x'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """Sequences that a forget loss pulls the student away from, and what the loss must know of each."""

    sequences: Sequence[Sequence[int]]
    parts: Parts
    loss: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The loss's hyper-parameters."""
    chosen: Sequence[Tensor] | None = None
    """For each sequence, which of its predicted tokens [T-1] the loss looks at; None: all."""
    base_log_odds: Sequence[Tensor] | None = None
    """For each sequence, the other model's log-odds [T-1], where the loss compares with them."""
    base: Reading | None = None
    """The other model's reading, where the loss compares with its logits or hidden states."""
    weights: Tensor | None = None
    """Of a loss of pairs: its slope in each sequence's log-likelihood [S], held constant."""
    values: Tensor | None = None
    """Of a loss of pairs: what each sequence counts for in it [S]."""

    @property
    def tokens(self) -> int:
        """How many tokens the loss looks at, on all ranks."""
        if self.chosen is not None:
            return sum(int(mask.sum()) for mask in self.chosen)
        return sum(len(sequence) - 1 for sequence in self.sequences)

    @property
    def layer(self) -> int | None:
        """The decoder block whose hidden states the loss reads, if it does."""
        return self.options["layer"] if LOSSES[self.loss].reads == "hidden" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldText:
    """Sequences on which the student is held to others: the divergence of each reading, times its weight."""

    sequences: Sequence[Sequence[int]]
    parts: Parts
    divergence: str
    weight: float = 1.0
    """Of the divergence from the teacher, or of the text's own likelihood."""
    readings: Sequence[tuple[float, Reading]] = ()

    @property
    def tokens(self) -> int:
        """Predicted tokens, on all ranks."""
        return sum(len(sequence) - 1 for sequence in self.sequences)


def hidden_states(
    model: Any, sequences: Sequence[Sequence[int]], layer: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Last hidden states that predict a token, the tokens they predict, and where they are.

    No attention mask is given, so that the fastest kernels can be used: padding stands on the right, where a causal
    model's real tokens never look, and what is computed there is left out. Where real tokens stand is worked out on the
    CPU, so that nothing waits for the device. With a ``layer``, the hidden states are those behind this decoder block,
    counted from 0.

    Returns:
        ``hidden`` [N,D] and ``labels`` [N] of the N predicted tokens, and ``mask`` [B,T-1] that says which they are.
    """
    device = model.get_input_embeddings().weight.device
    ids, lengths = pad(sequences)
    mask = torch.arange(1, ids.shape[1]) < lengths.unsqueeze(-1)
    labels = ids[:, 1:][mask].to(device, non_blocking=True)
    given = ids.to(device, non_blocking=True)
    if layer is None:
        hidden = model.base_model(input_ids=given, use_cache=False).last_hidden_state[:, :-1]
    else:
        caught: list[Any] = []
        blocks = decoder_layers(model)
        if not -len(blocks) <= layer < len(blocks):
            raise ValueError(f"layer is {layer}: the model has {len(blocks)} decoder blocks")
        hook = blocks[layer].register_forward_hook(lambda module, given, output: caught.append(output))
        try:
            model.base_model(input_ids=given, use_cache=False)
        finally:
            hook.remove()
        hidden = (caught[0][0] if isinstance(caught[0], tuple) else caught[0])[:, :-1]
    if bool(mask.all()):
        return hidden.flatten(0, 1), labels, mask.to(device)
    places = mask.flatten().nonzero().squeeze(-1).to(device, non_blocking=True)
    return hidden.flatten(0, 1).index_select(0, places), labels, mask.to(device)


def read(
    model: Any, sequences: Sequence[Sequence[int]], parts: Parts, config: ForgetConfig, precision: str,
    layer: int | None = None, value: Callable[[Tensor, torch.dtype], Tensor] | None = None,
) -> Reading:  # fmt: skip
    """Let a model read the micro-batches of a text; only hidden states are kept. ``value``: see ``computing``."""

    def read_all(model: Any) -> Reading:
        hidden = [hidden_states(model, [sequences[n] for n in numbers], layer)[0] for numbers, _ in parts]
        return Reading(hidden, Head.of(model).detached())

    with torch.no_grad(), computing(model, precision, compiled=config.compile, value=value):
        return inside(model, read_all)


def read_as_teacher(model: Any, optimizer: Any, texts: Sequence[HeldText], config: ForgetConfig) -> list[Reading]:
    """What the teacher of an optimizer makes of some texts.

    A lean one need not write the teacher into weights that the pass rounds: it makes the rounded copies itself.
    """
    precision = resolved_precision(config.precision.divergence, model.get_input_embeddings().weight.device)
    given: dict[str, Any] = {}
    value: Callable[[Tensor, torch.dtype], Tensor] | None = None
    if isinstance(optimizer, LeanMeanTeacher) and precision in HALF:
        uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        trained = {p for group in optimizer.param_groups for p in group["params"] if uses[p] == 1}
        rounded = {layer.weight for layer in rounded_layers(model)} & trained
        given["besides"] = rounded

        def teacher_value(weight: Tensor, dtype: torch.dtype) -> Tensor:
            return optimizer.teacher_value(weight, dtype) if weight in rounded else weight.detach().to(dtype)

        value = teacher_value

    with optimizer.teacher_weights(**given):
        return [read(model, text.sequences, text.parts, config, precision, value=value) for text in texts]


def read_change(
    model: Any, parameters: Sequence[Tensor], way: Sequence[Tensor], teacher_head: Head, texts: Sequence[HeldText],
    precision: str, *, back: float = MIDDLE, farthest: float = math.inf,
) -> list[Reading] | None:  # fmt: skip
    """By how much the hidden states of texts change on the ``way`` from the teacher's weights to the student's.

    The student's are in the model; see ``moving_weights``. None where the two models are more than ``farthest`` nats
    per token apart (KL, on a few tokens).
    """
    device = model.get_input_embeddings().weight.device
    precision = resolved_precision(precision, device)
    moving = moving_weights(model, parameters, way, HALF.get(precision), back)
    readings: list[Reading] = []
    with precision_of_pass(precision, device), moving as factor:
        for text in texts:
            changes: list[Tensor] = []
            for numbers, _ in text.parts:
                moved = hidden_states(model, [text.sequences[n] for n in numbers])[0]
                hidden, change = value_and_change(moved, factor)
                if not readings and not changes and farthest < math.inf:
                    few, head = slice(FEW_TOKENS), Head.of(model)
                    if mean_of_rows(kl_rows, hidden[few], head, None, teacher_head, change=change[few]) > farthest:
                        return None
                changes.append(change)
            readings.append(Reading(changes, teacher_head, is_change=True))
    return readings


def forget_term(model: Any, pull: Pull, part: int) -> tuple[Tensor, Tensor, int]:
    """Forget loss of micro-batch ``part``, its mean NLL over all tokens, and how many tokens the loss is a mean of."""
    numbers, loss = pull.parts[part][0], LOSSES[pull.loss]
    sequences = [pull.sequences[n] for n in numbers]
    hidden, labels, mask = hidden_states(model, sequences, pull.layer)
    chosen = None
    if pull.chosen is not None:
        chosen = torch.cat([pull.chosen[n] for n in numbers]).to(hidden.device)
    base_hidden = None if pull.base is None else pull.base.hidden[part]
    if loss.reads == "hidden":
        seen, base_seen = _only(chosen, hidden), _only(chosen, base_hidden)
        value = loss.function(seen, **({} if base_seen is None else {"base_hidden": base_seen}), **pull.options)
        return value, value.detach() * torch.nan, len(seen)
    with torch.set_grad_enabled(loss.rows is None):  # else the rows themselves have the gradient
        log_odds = token_log_odds(hidden, labels, Head.of(model))
    nll = -torch.nn.functional.logsigmoid(log_odds.detach()).mean()
    if loss.rows is not None:
        hidden, labels, base_hidden = _only(chosen, hidden), _only(chosen, labels), _only(chosen, base_hidden)
        rows = functools.partial(loss.rows, **pull.options) if pull.options else loss.rows
        base_head = pull.base.head if pull.base is not None else None
        return mean_of_rows(rows, hidden, Head.of(model), base_hidden, base_head, labels), nll, len(hidden)
    if pull.weights is not None and pull.values is not None:
        log_p, places = torch.nn.functional.logsigmoid(log_odds), mask.nonzero()[:, 0]
        weights, values = (part[list(numbers)].to(log_p) for part in (pull.weights, pull.values))
        pulled = (weights[places] * log_p).sum()
        return (values.sum() + pulled - pulled.detach()) / len(labels), nll, len(labels)

    def two_words(z: Tensor) -> Tensor:  # a loss of log-odds alone sees those of a vocabulary of two words
        logits = z.new_zeros(*mask.shape, 2)
        logits[..., 0] = logits[..., 0].masked_scatter(mask, z)
        return logits

    base = None
    if pull.base_log_odds is not None:
        base = two_words(torch.cat([pull.base_log_odds[n] for n in numbers]).to(hidden.device))
    zeros = torch.zeros_like(mask, dtype=torch.int64)
    seen = mask if chosen is None else mask.masked_scatter(mask, chosen)
    value = forget_loss(pull.loss, two_words(log_odds), zeros, seen, base_logits=base, **pull.options)
    return value, nll, len(labels) if chosen is None else int(chosen.sum())


def _only(chosen: Tensor | None, values: Any) -> Any:
    return values if chosen is None or values is None else values[chosen]


def held_term(model: Any, held: HeldText, part: int) -> tuple[Tensor, int]:
    """Divergence of the student from what held text is held to, or its NLL, of a micro-batch, and how many tokens."""
    numbers = held.parts[part][0]
    hidden, labels, _ = hidden_states(model, [held.sequences[n] for n in numbers])
    head = Head.of(model)
    if held.divergence == NLL:
        nll = -torch.nn.functional.logsigmoid(token_log_odds(hidden, labels, head)).mean()
        return held.weight * nll, len(labels)
    rows = DIVERGENCES[held.divergence].rows
    total = torch.zeros((), device=hidden.device)
    for weight, reading in held.readings:
        other = (None, reading.hidden[part]) if reading.is_change else (reading.hidden[part], None)
        total = total + weight * mean_of_rows(rows, hidden, head, other[0], reading.head, change=other[1])
    return total, len(labels)


class LogOddsOfModel:
    """Log-odds of every forget token in a model, computed once, so that no third model is kept in memory.

    ``numbers`` are the sequences that will be asked for, in that order; None: all. ``values`` has theirs.
    """

    def __init__(
        self, model: Any, sequences: Sequence[Sequence[int]], config: ForgetConfig, numbers: Sequence[int] | None = None
    ) -> None:
        self._places = None if numbers is None else {number: place for place, number in enumerate(numbers)}

        def read_part(part_of_rank: Sequence[Sequence[int]]) -> list[Tensor]:
            values: list[Tensor] = []
            for part in in_micro_batches(part_of_rank, config.micro_batch or config.batch):
                hidden, labels, mask = hidden_states(model, part)
                log_odds = token_log_odds(hidden, labels, Head.of(model)).cpu()
                values += [part.clone() for part in log_odds.split(mask.sum(1).tolist())]  # views save the whole
            return values

        with torch.no_grad(), computing(model, config.precision.forget):
            asked = sequences if numbers is None else [sequences[number] for number in numbers]
            self.values: list[Tensor] = share_out(model, asked, read_part)

    def of(self, number: int) -> Tensor:
        """Those of a sequence."""
        return self.values[number if self._places is None else self._places[number]]

    def least_sure(self, numbers: Sequence[int], share: float) -> list[Tensor]:
        """For each of these sequences, the share of its tokens with the lowest log-odds, at least one: a mask [T-1]."""
        chosen = []
        for values in map(self.of, numbers):
            lowest = values.argsort(stable=True)[: max(1, round(share * len(values)))]
            chosen.append(torch.zeros_like(values, dtype=torch.bool).index_fill(0, lowest, True))
        return chosen


def in_micro_batches(sequences: Sequence[Any], size: int | None) -> Iterator[Sequence[Any]]:
    """Consecutive parts of at most ``size`` sequences."""
    size = size or len(sequences)
    return (sequences[start : start + size] for start in range(0, len(sequences), size))


def by_length(items: Sequence[Any], lengths: Sequence[int], size: int | None, longest: int) -> list[list[Any]]:
    """Items of these ``lengths`` in micro-batches of like length, so that there is little padding.

    Each has at most as many tokens, padding included, as ``size`` sequences of the ``longest`` possible length, so that
    shorter sequences are read more at a time; with None all are in one. The result of a step does not depend on it.
    """
    if size is None:
        return [list(items)]
    parts: list[list[Any]] = []
    room = 0
    for number in sorted(range(len(items)), key=lambda number: -lengths[number]):
        if room < 1:
            parts.append([])
            room = max(1, size * longest // lengths[number])
        parts[-1].append(items[number])
        room -= 1
    return parts


@contextmanager
def computing(
    model: Any, precision: str, *, compiled: bool = False, checkpointed: bool = False, once: bool = True,
    value: Callable[[Tensor, torch.dtype], Tensor] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Run passes of a model in a precision; its weights stay in float32.

    In half precision the linear layers' weights are rounded on entering, once for all micro-batches, so the weights
    must be those wanted (the teacher's or the student's) before, and must not change inside.

    Args:
        model: A Hugging Face causal language model.
        precision: See ``precision_of_pass``.
        compiled: Compile decoder blocks and what is done with logits, which takes half a minute at the first use.
        checkpointed: Keep only the blocks' inputs for the backward pass, which must be inside too.
        once: Whether weights are rounded on entering, or whenever they are met, which takes less memory.
        value: The rounded weights to compute with, if not those of the model, see ``half_weights``.
    """
    device = model.get_input_embeddings().weight.device
    precision = resolved_precision(precision, device)
    with ExitStack() as stack:
        stack.enter_context(precision_of_pass(precision, device))
        if precision in HALF:
            sums = compiled and once and torch.is_grad_enabled()
            stack.enter_context(half_weights(model, HALF[precision], once=once, value=value, sums=sums))
        if compiled or checkpointed:
            stack.enter_context(block_calls(model, compiled=compiled, checkpointed=checkpointed))
        if compiled:
            stack.enter_context(fused_rows())
        yield


@contextmanager
def block_calls(model: Any, *, compiled: bool, checkpointed: bool) -> Iterator[None]:
    """Inside, calls of the decoder blocks are compiled, or keep only their inputs for the backward pass, or both.

    Outside (evaluation, with its growing cache) they are as before. The first block is not compiled: its input, from
    embeddings that are not trained, needs no gradient, which would be a compilation of its own for a single block.
    """
    blocks = decoder_layers(model)
    try:
        for number, block in enumerate(blocks):
            call = block._call_impl
            if compiled and number > 0:
                if _COMPILED not in block.__dict__:
                    block.compile()
                    setattr(block, _COMPILED, block._compiled_call_impl)
                call = getattr(block, _COMPILED)
            block._compiled_call_impl = functools.partial(_keeping_inputs, call) if checkpointed else call
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def _keeping_inputs(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The same call, whose backward pass makes it again instead of keeping what it computed on the way."""
    if not torch.is_grad_enabled():
        return call(*arguments, **keywords)
    return checkpoint(call, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)
