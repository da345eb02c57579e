"""Forward passes of the loop: last hidden states of real tokens, and the loss and divergence they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unteach.config import ForgetConfig, Method
from unteach.data import pad
from unteach.method.divergences import DIVERGENCES
from unteach.method.losses import LOSSES, forget_loss
from unteach.method.shards import local_part
from unteach.method.vocab_head import Head, fused_rows, mean_divergence, token_log_odds
from unteach.models import decoder_layers
from unteach.models.distributed import share_out
from unteach.models.precision import HALF, half_weights, precision_of_pass, resolved_precision

__all__ = [
    "InitialLogOdds",
    "block_calls",
    "by_length",
    "chosen_tokens",
    "computing",
    "forget_term",
    "general_term",
    "hidden_states",
    "in_micro_batches",
    "loss_scale",
    "unscale_gradients",
]

SCALED_TOKEN = 2**8
"""What a single token's share of the loss is multiplied by in float16: see ``loss_scale``."""
SCALE_STEP = 2**6
"""Where that was too much, it is divided by this and tried again."""
_COMPILED = "_compiled_for_passes"
"""Attribute of a decoder block that keeps its compiled form between passes."""


def hidden_states(model: Any, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Last hidden states that predict a token, the tokens they predict, and where they are.

    No attention mask is given, so that the fastest kernels can be used: padding stands on the right, where a causal
    model's real tokens never look, and what is computed there is left out. Where real tokens stand is worked out on the
    CPU, so that nothing waits for the device.

    Returns:
        ``hidden`` [N,D] and ``labels`` [N] of the N predicted tokens, and ``mask`` [B,T-1] that says which they are.
    """
    device = model.get_input_embeddings().weight.device
    ids, lengths = pad(sequences)
    mask = torch.arange(1, ids.shape[1]) < lengths.unsqueeze(-1)
    labels = ids[:, 1:][mask].to(device, non_blocking=True)
    hidden = model.base_model(input_ids=ids.to(device, non_blocking=True), use_cache=False).last_hidden_state[:, :-1]
    if bool(mask.all()):
        return hidden.flatten(0, 1), labels, mask.to(device)
    places = mask.flatten().nonzero().squeeze(-1).to(device, non_blocking=True)
    return hidden.flatten(0, 1).index_select(0, places), labels, mask.to(device)


def forget_term(
    model: Any, sequences: Sequence[Sequence[int]], method: Method, base: Any = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor, int]:
    """Forget loss of a micro-batch, its mean NLL over all tokens, and the number of tokens that the loss is a mean of.

    Args:
        model: The student.
        sequences: Token ids.
        method: Loss and its hyper-parameters.
        base: ``npo``: the log-odds before unlearning [N] of the same tokens. ``it``: the incompetent model.
        chosen: Which of the N tokens the loss looks at [N], see ``InitialLogOdds.least_sure``; None: all.
    """
    hidden, labels, mask = hidden_states(model, sequences)
    log_odds = token_log_odds(hidden, labels, Head.of(model))
    nll = -torch.nn.functional.logsigmoid(log_odds.detach()).mean()
    if not LOSSES[method.loss].log_odds_only:
        with torch.no_grad():
            base_hidden = hidden_states(base, sequences)[0]
        if chosen is not None:
            hidden, base_hidden = hidden[chosen], base_hidden[chosen]
        rows = DIVERGENCES["kl"].rows  # it: KL(student ‖ incompetent teacher)
        return mean_divergence(rows, hidden, Head.of(model), base_hidden, Head.of(base)), nll, len(hidden)

    def two_words(z: Tensor) -> Tensor:  # LL, NPO and NLUL see only log-odds: those of a vocabulary of two words
        logits = z.new_zeros(*mask.shape, 2)
        logits[..., 0] = logits[..., 0].masked_scatter(mask, z)
        return logits

    extra = {"base_logits": two_words(base)} if LOSSES[method.loss].needs_base else {}
    zeros = torch.zeros_like(mask, dtype=torch.int64)
    seen = mask if chosen is None else mask.masked_scatter(mask, chosen)
    loss = forget_loss(method.loss, two_words(log_odds), zeros, seen, **extra, **method.loss_options())
    return loss, nll, len(labels) if chosen is None else int(chosen.sum())


class InitialLogOdds:
    """Log-odds of every forget token before unlearning, computed once, so that no third model is kept in memory.

    NPO compares with them, and they say at which tokens the model was least sure.
    """

    def __init__(self, model: Any, sequences: Sequence[Sequence[int]], config: ForgetConfig) -> None:
        def read(part_of_rank: Sequence[Sequence[int]]) -> list[Tensor]:
            values: list[Tensor] = []
            for part in in_micro_batches(part_of_rank, config.micro_batch or config.batch):
                hidden, labels, mask = hidden_states(model, part)
                log_odds = token_log_odds(hidden, labels, Head.of(model)).cpu()
                values += [part.clone() for part in log_odds.split(mask.sum(1).tolist())]  # views save the whole
            return values

        with torch.no_grad(), computing(model, config.precision.forget):
            self.values: list[Tensor] = share_out(model, sequences, read)

    def of(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """The log-odds [N] of the tokens of these sequences, in order."""
        return torch.cat([self.values[n] for n in numbers]).to(device)

    def least_sure(self, numbers: Sequence[int], share: float, device: torch.device) -> Tensor:
        """Which tokens [N] of these sequences are among that share of their sequence with the lowest log-odds."""
        chosen = []
        for n in numbers:
            values = self.values[n]
            lowest = values.argsort(stable=True)[: chosen_tokens(len(values), share)]
            chosen.append(torch.zeros_like(values, dtype=torch.bool).index_fill(0, lowest, True))
        return torch.cat(chosen).to(device)


def chosen_tokens(tokens: int, share: float) -> int:
    """How many of a sequence's predicted tokens the forget loss looks at: at least one."""
    return max(1, round(share * tokens))


def general_term(
    model: Any, sequences: Sequence[Sequence[int]], divergence: str, teacher_hidden: Tensor, teacher_head: Head
) -> tuple[Tensor, int]:
    """Divergence of the student from the teacher on a micro-batch, and its number of tokens."""
    hidden, labels, _ = hidden_states(model, sequences)
    rows = DIVERGENCES[divergence].rows
    return mean_divergence(rows, hidden, Head.of(model), teacher_hidden, teacher_head), len(labels)


def in_micro_batches(sequences: Sequence[Any], size: int | None) -> Iterator[Sequence[Any]]:
    """Consecutive parts of at most ``size`` sequences."""
    size = size or len(sequences)
    return (sequences[start : start + size] for start in range(0, len(sequences), size))


def by_length(items: Sequence[Any], lengths: Sequence[int], size: int | None, longest: int) -> list[list[Any]]:
    """Items in micro-batches of like length, so that there is little padding.

    Each has at most as many tokens, padding included, as ``size`` sequences of ``longest`` tokens, so that shorter
    sequences are read more at a time. The result of a step does not depend on it.

    Args:
        items: What is dealt out.
        lengths: Tokens of each.
        size: Longest sequences in a micro-batch; None: all items in one.
        longest: The most tokens that a sequence can have.
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
def computing(model: Any, precision: str, *, compiled: bool = False, checkpointed: bool = False) -> Iterator[None]:
    """Run passes of a model in a precision; its weights stay in float32.

    In half precision the linear layers' weights are rounded on entering, once for all micro-batches, so the weights
    must be those wanted (the teacher's or the student's) before, and must not change inside.

    Args:
        model: A Hugging Face causal language model.
        precision: fp32, tf32, fp16, bf16 or auto, see ``precision_of_pass``.
        compiled: Compile every decoder block, and what is done with logits, by ``torch.compile``. Takes half a
            minute at the first use.
        checkpointed: Keep only the blocks' inputs for the backward pass, which must be inside too.
    """
    device = model.get_input_embeddings().weight.device
    precision = resolved_precision(precision, device)
    with ExitStack() as stack:
        stack.enter_context(precision_of_pass(precision, device))
        if precision in HALF:
            stack.enter_context(half_weights(model, HALF[precision]))
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
            block._compiled_call_impl = _keeping_inputs(call) if checkpointed else call
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def _keeping_inputs(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, whose backward pass makes it again instead of keeping what it computed on the way."""

    def checkpointed(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*arguments, **keywords)
        return checkpoint(call, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)

    return checkpointed


def loss_scale(tokens: int, *precisions: str, device: torch.device) -> float:
    """The power of two by which the loss, a mean over ``tokens``, is multiplied before a backward pass in float16.

    The gradient of a mean over N tokens gives each hidden state a gradient of order 1/N and less, below what float16
    can hold (6e-8). Times N it is of order one or, early in a run, a thousandth; 2⁸ more puts it in the middle of
    float16's range, from 6e-8 to 65,504. Without float16 among the ``precisions`` the scale is 1.
    """
    if all(resolved_precision(name, device) != "fp16" for name in precisions):
        return 1.0
    return 2.0 ** math.floor(math.log2(tokens * SCALED_TOKEN))


def unscale_gradients(parameters: Iterable[Tensor], scale: float) -> None:
    """Divide the gradients of the parameters by ``scale``, a power of two, in place."""
    if scale != 1:
        torch._foreach_mul_([local_part(p.grad) for p in parameters if p.grad is not None], 1 / scale)
