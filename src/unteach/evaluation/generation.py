"""Batched decoding, greedy unless a token is to be picked otherwise.

Prompts are sorted by length, padded on the left, and masked by their lengths; a pad token need not exist.
They are read in pieces and decoded together. A beginning that all share (worked examples) is read once. Rows
that end leave the batch (not in steps of fixed shape, on a GPU). In fp32 the text is the same as that of decoding
one prompt at a time; in lower precision a near tie may fall differently.

Shapes: B rows of a batch, P tokens of the shared beginning, T tokens of the longest remainder, V vocabulary.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unteach.evaluation.decoding import RoomyLayer, can_fix, faster_on_cpu, fixed_steps, is_plain
from unteach.evaluation.inference import (
    PROMPTS_TOGETHER,
    Batching,
    accepted_arguments,
    cache_tokens,
    evaluating,
    in_batches,
)
from unteach.models import context_length
from unteach.models.distributed import share_out

_PIECE_TOKENS = {"cuda": 2**16, "cpu": 2**10}
_SHARED_LENGTH, _SHRINK_AT = 32, 0.75
Pick = Callable[[Tensor], Tensor]
"""Logits [B, V] to the next token of each row [B]."""


def most_probable(logits: Tensor) -> Tensor:
    """Greedy decoding."""
    return logits.argmax(-1)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    stop_ids: Collection[int] = (),
    batching: Batching = PROMPTS_TOGETHER,
    pick: Pick = most_probable,
) -> list[list[int]]:
    """Continue each prompt, greedily where nothing else is said: the most probable token at every step.

    Generation settings stored with the model (sampling, penalties) play no part, only `stop_ids` end a row.

    Args:
        model: a Hugging Face causal language model. Its mode (train or eval) is the same afterwards.
        prompts: token ids of each prompt; none may be empty, and each must fit the context with its output.
        max_new_tokens: how many tokens to add, for all prompts or for each.
        stop_ids: ids that end a row; they are not part of its output.
        pick: what chooses the next tokens. One that draws them draws for a whole batch: its rows depend on each other.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    _check(model, prompts, limits)

    def work(items: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
        reader = _PromptReader(model, [prompt for prompt, _ in items])

        def run(group: list[int]) -> list[list[int]]:
            ordered = sorted(group, key=lambda index: -len(items[index][0]))
            prompts, limits = zip(*(items[index] for index in ordered), strict=True)
            written = dict(zip(ordered, _decode(reader, prompts, limits, frozenset(stop_ids), pick), strict=True))
            return [written[index] for index in group]

        lengths = [len(prompt) + limit for prompt, limit in items]
        return in_batches(lengths, run, batching, cache_tokens(model))

    with evaluating(model), faster_on_cpu(model):
        return share_out(model, list(zip(prompts, limits, strict=True)), work)


def next_tokens(
    model: Any, prompts: Sequence[Sequence[int]], candidates: Sequence[int], *, batching: Batching = PROMPTS_TOGETHER
) -> tuple[Tensor, Tensor]:
    """The most probable next id of each prompt [prompts], and the candidates' logits in fp32 [prompts, candidates]."""
    _check(model, prompts, [1] * len(prompts))

    def work(items: Sequence[Sequence[int]]) -> list[tuple[int, list[float]]]:
        reader = _PromptReader(model, items)

        def run(group: list[int]) -> list[tuple[int, list[float]]]:
            logits = reader.read_piece([items[index] for index in group])[0]
            scores = logits[:, list(candidates)].float().tolist()
            return list(zip(logits.argmax(-1).tolist(), scores, strict=True))

        return in_batches([*map(len, items)], run, batching, cache_tokens(model))

    with evaluating(model), faster_on_cpu(model):
        found = share_out(model, prompts, work)
    scores = torch.tensor([row for _, row in found]).reshape(len(found), len(candidates))
    return torch.tensor([best for best, _ in found], dtype=torch.long), scores


def _check(model: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
    context = context_length(model)
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if not len(prompt):
            raise ValueError(f"prompt {index} has no tokens: a model needs at least one to continue from")
        if limit < 1:
            raise ValueError(f"max_new_tokens is {limit}: at least 1 is needed")
        if len(prompt) + limit > context:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and {limit} are to follow, but the model's context "
                f"is {context}: shorten the prompt, or drop its oldest tokens (long_prompts = 'cut')"
            )


class _PromptReader:
    """Reads prompts into a key-value cache, their shared beginning only once."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.arguments = accepted_arguments(model)
        self.piece_tokens = _PIECE_TOKENS.get(model.device.type, _PIECE_TOKENS["cpu"])
        self.shared = 0
        self.shared_cache: Any = None
        shared = _shared_length(prompts)
        if len(prompts) > 1 and shared >= _SHARED_LENGTH:
            ids = torch.tensor([list(prompts[0][:shared])], device=model.device)
            positions = torch.arange(shared, device=ids.device)[None]
            cache = self.forward(ids, torch.ones_like(ids), positions, None)[1]
            if is_plain(cache):
                self.shared, self.shared_cache = shared, cache

    def read(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[Tensor, Any, Tensor]:
        """Read a batch, longest first, in pieces of similar length, and put their caches together.

        Gives the logits after each prompt [B, V], the cache, and its mask [B, P + T].
        """
        width = len(prompts[0]) - self.shared
        all_logits: list[Tensor] = []
        layers: list[RoomyLayer] = []
        start = 0
        while start < len(prompts):
            longest = len(prompts[start]) - self.shared
            piece = prompts[start : start + max(1, self.piece_tokens // longest)]
            logits, cache, mask = self.read_piece(piece)
            if not is_plain(cache):
                return (logits, cache, mask) if len(piece) == len(prompts) else self.read_piece(prompts)
            layers = layers or [RoomyLayer(each, len(prompts), self.shared + width, room) for each in cache.layers]
            for whole, layer in zip(layers, cache.layers, strict=True):
                whole.take(layer, slice(start, start + len(piece)), self.shared)
            all_logits.append(logits)
            start += len(piece)
        cache.layers = layers
        return torch.cat(all_logits), cache, self.mask(prompts, width)

    def mask(self, prompts: Sequence[Sequence[int]], width: int) -> Tensor:
        """1 for the shared columns and, right of the padding, each prompt's own [B, P + width]."""
        own = torch.tensor([[len(prompt) - self.shared] for prompt in prompts])
        columns = torch.arange(-self.shared, width)
        return ((columns < 0) | (columns >= width - own)).long().to(self.model.device)

    def read_piece(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Any, Tensor]:
        """Read prompts in one pass; gives the same as `read`."""
        remainders = [torch.tensor(prompt[self.shared :]) for prompt in prompts]
        ids = pad_sequence(remainders, batch_first=True, padding_side="left").to(self.model.device)
        mask = self.mask(prompts, ids.shape[1])
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, self.shared :]
        cache = copy.deepcopy(self.shared_cache)
        if cache is not None:
            cache.batch_repeat_interleave(len(prompts))
        logits, cache = self.forward(ids, mask, positions, cache)
        if torch.isnan(logits).any():
            raise ValueError("the model's logits are NaN: its weights are broken, nothing can be measured")
        return logits, cache, mask

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """One pass over new tokens: logits after the last [B, V] and the extended cache."""
        extra = {"position_ids": positions, "logits_to_keep": 1}
        extra = {name: value for name, value in extra.items() if name in self.arguments}
        result = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        return result.logits[:, -1], result.past_key_values


def _decode(
    reader: _PromptReader, prompts: Sequence[Sequence[int]], limits: Sequence[int], stops: frozenset[int], pick: Pick
) -> list[list[int]]:
    """Continue the prompts of one batch, longest first.

    In steps of fixed shape where that can be done, else finished rows leave the cache once they are a quarter of it.
    """
    logits, cache, mask = reader.read(prompts, room=max(limits))
    positions = torch.tensor([len(prompt) for prompt in prompts], device=mask.device)
    outputs: list[list[int]] = [[] for _ in prompts]
    last = context_length(reader.model) - 1
    rows = list(range(len(prompts)))  # rows[i]: which prompt row i of the cache belongs to
    going = set(rows)

    def write(tokens: Sequence[int]) -> None:
        for prompt, token in zip(rows, tokens, strict=True):
            if prompt in going and token not in stops:
                outputs[prompt].append(token)
            if token in stops or len(outputs[prompt]) == limits[prompt]:
                going.discard(prompt)

    tokens = pick(logits)
    write(tokens.tolist())
    if going and pick is most_probable and can_fix(reader.model, cache, max(limits) - 1):
        for block in fixed_steps(reader.model, tokens, cache, mask, positions, max(limits) - 1):
            for column in block:
                write(column)
            if not going:
                break
        return outputs
    while going:
        alive = [row for row, prompt in enumerate(rows) if prompt in going]
        if len(alive) <= _SHRINK_AT * len(rows) and hasattr(cache, "batch_select_indices"):
            kept = torch.tensor(alive, device=mask.device)
            cache.batch_select_indices(kept)
            tokens, mask, positions = tokens[kept], mask[kept], positions[kept]
            rows = [rows[row] for row in alive]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        logits, cache = reader.forward(tokens[:, None], mask, positions[:, None], cache)
        positions = (positions + 1).clamp(max=last)  # of rows that have ended
        tokens = pick(logits)
        write(tokens.tolist())
    return outputs


def _shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many ids all prompts begin with, leaving each at least one of its own."""
    most = min(map(len, prompts), default=1) - 1
    first, last = min(map(list, prompts), default=[]), max(map(list, prompts), default=[])  # in dictionary order
    return next((place for place in range(most) if first[place] != last[place]), most)
