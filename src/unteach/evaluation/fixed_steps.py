"""Decoding steps of fixed shape, which a GPU replays as one CUDA graph.

A step of a small model is about a thousand kernels of some microseconds each; to start them one by one from Python
takes ten times as long as to run them. Where no tensor changes its shape or place from step to step, they are started
once and replayed. So keys and values have room for the whole output, later columns are masked, the next token is
chosen on the GPU, and rows that have ended go on until all have.

Shapes: B rows, S cache columns.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from unteach.errors import first_line
from unteach.evaluation.cache import RoomyLayer
from unteach.models import context_length
from unteach.models.distributed import has_shards

__all__ = ["can_fix", "fixed_steps", "has_steady_steps"]

FAMILIES = frozenset({"gpt2", "gpt_neox", "llama", "qwen2"})
"""Models that read a finished mask and given positions, and nothing else; others decode in the usual way."""
FEWEST_STEPS = 16
"""Below this, recording a step costs more than it saves."""
READ_EVERY = 16
"""Steps between two looks at the output."""
_ROOM = 2**31
"""Bytes left free on the GPU below which cached memory is given back first: a recording cannot do that."""
_not_recorded: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Models of which a step could not be recorded: not tried again."""


class FixedLayer(DynamicLayer):
    """Keys and values of one layer, of which a step writes one column and reads all."""

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.keys, self.values, self.place = keys, values, place

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H, 1, D] to the column of this step and return all columns."""
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values


def can_fix(model: Any, cache: Any, steps: int) -> bool:
    """Whether a decoding of so many steps is better made in fixed shapes."""
    return (
        model.device.type == "cuda"
        and steps >= FEWEST_STEPS
        and has_steady_steps(model.config)
        and all(type(layer) is RoomyLayer for layer in cache.layers)
        and not has_shards(model)
    )


def has_steady_steps(config: Any) -> bool:
    """Whether a model reads a finished mask, and does the same at every position."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    return (
        getattr(config, "model_type", None) in FAMILIES
        and getattr(config, "_attn_implementation", None) in ("sdpa", "eager")
        and kind != "longrope"
        and "dynamic" not in kind
    )


def fixed_steps(
    model: Any, tokens: Tensor, cache: Any, mask: Tensor, positions: Tensor, steps: int
) -> Iterator[list[list[int]]]:
    """Decode greedily, a few steps at a time.

    Args:
        model: a model of one of the families.
        tokens: the first new token of each row [B].
        cache: keys and values of the prompts in layers with room for all steps; not usable afterwards.
        mask: which of its columns are read [B, columns so far].
        positions: where the first new tokens stand [B].
        steps: how many tokens to add at most.

    Yields:
        The next tokens, a list of B ids for each step.
    """
    columns = cache.layers[0].key_buffer.shape[2]
    place = torch.tensor([mask.shape[1]], device=mask.device)
    count = torch.zeros_like(place)
    written = tokens.new_zeros(len(tokens), steps)
    tokens, positions = tokens[:, None].clone(), positions[:, None].clone()
    added = torch.full(
        (len(tokens), 1, 1, columns), torch.finfo(model.dtype).min, dtype=model.dtype, device=mask.device
    )
    added[:, 0, 0, : mask.shape[1]].masked_fill_(mask.bool(), 0.0)
    cache.layers = [FixedLayer(layer.key_buffer, layer.value_buffer, place) for layer in cache.layers]
    last = context_length(model) - 1

    def step() -> None:
        added.index_fill_(3, place, 0.0)
        result = model(
            input_ids=tokens, attention_mask=added, position_ids=positions, past_key_values=cache, use_cache=True
        )
        tokens.copy_(result.logits[:, -1].argmax(-1, keepdim=True))
        written.index_copy_(1, count, tokens)
        for number in (positions, place, count):
            number.add_(1)
        positions.clamp_(max=last)  # of rows that have ended

    run = _recorded(model, step, (tokens, positions, place, count)) if mask.device.type == "cuda" else step
    done = 0
    while done < steps:
        block = min(READ_EVERY, steps - done)
        for _ in range(block):
            run()
        yield written[:, done : done + block].T.tolist()
        done += block


def _recorded(model: Any, step: Callable[[], None], changed: tuple[Tensor, ...]) -> Callable[[], None]:
    """A step as a CUDA graph; what the trial steps change is put back. (Columns they write are masked or rewritten.)

    Where a step cannot be recorded, the step itself, which is slower.
    """
    if model in _not_recorded:
        return step
    device, before = changed[0].device, [tensor.clone() for tensor in changed]

    def put_back() -> None:
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)

    stream = _stream(device)
    run, stream_before = step, torch.cuda.current_stream(device)
    stream.wait_stream(stream_before)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        try:
            step()  # libraries set themselves up
            put_back()
            with _waiting_refused():
                step()  # a recording that fails half way leaves the allocator in a bad state: find out before
            put_back()
            if torch.cuda.mem_get_info(device)[0] < _ROOM:
                torch.cuda.empty_cache()
            run = _capture(step)
        except RuntimeError as error:
            put_back()
            _not_recorded.add(model)
            reason = first_line(error.__context__ or error)
            warnings.warn(f"decoding without a CUDA graph, which is slower: {reason}", stacklevel=2)
    stream_before.wait_stream(stream)
    return run


def _capture(step: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        step()
    finally:
        graph.capture_end()
    return graph.replay


@functools.cache
def _stream(device: torch.device) -> Any:
    """The stream on which steps are recorded: one, since libraries keep a workspace for each."""
    return torch.cuda.Stream(device)


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Inside, an operation that waits for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
