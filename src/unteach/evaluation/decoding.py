"""Three fast paths of decoding, each beside a plain form that gives the same numbers up to rounding.

*Shared key heads on a CPU* (`faster_on_cpu`): with a padding mask, Transformers copies keys and values once per query
head before it calls PyTorch's attention, which takes most of a step. PyTorch can share them instead (`enable_gqa`).

*A key-value cache with room* (`RoomyLayer`): Transformers' own cache copies all keys and values at every step to add
one token; for a batch that costs more than the rest of the step. Here the room is allocated once, and filled from
caches of smaller batches. Models with other caches than plain attention's (sliding windows, recurrent states) keep
their own.

*Steps of fixed shape* (`fixed_steps`), which a GPU replays as one CUDA graph: to start the thousand short kernels of a
small model's step from Python takes ten times as long as to run them. Where no tensor changes its shape or place, they
are started once and replayed. So keys and values have room for the whole output, later columns are masked, the next
token is chosen on the GPU, and rows that have ended go on until all have.

Shapes: B rows, H key heads, S cache columns, D width of a head.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from unteach.errors import first_line
from unteach.models import context_length
from unteach.models.distributed import has_shards

NAME = "unteach_grouped"
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


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with shared key heads, in the form Transformers expects."""
    special = any(options.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if attention_mask is None or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=options.get("scaling"), enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def faster_on_cpu(model: Any) -> Iterator[None]:
    """Inside the block the model uses `grouped_attention` where that pays; afterwards what it used before."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 0
    shares = (getattr(config, "num_key_value_heads", None) or heads) < heads
    before = getattr(config, "_attn_implementation", None)
    if model.device.type != "cpu" or before != "sdpa" or not shares:
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer as views into larger buffers [B, H, S, D], filled from caches of smaller batches."""

    def __init__(self, like: Any, rows: int, length: int, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = like.keys.dtype, like.keys.device, True
        self.key_buffer, self.value_buffer = (
            piece.new_zeros(rows, piece.shape[1], length + room, piece.shape[3]) for piece in (like.keys, like.values)
        )
        self.place: Tensor | None = None
        self._show(length)

    def _show(self, length: int | None) -> None:
        self.keys, self.values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]

    def take(self, layer: Any, rows: slice, shared: int) -> None:
        """Copy some rows: the columns shared by all prompts, and right of the padding the prompts' own."""
        for whole, piece in ((self.keys, layer.keys), (self.values, layer.values)):
            whole[rows, :, :shared] = piece[:, :, :shared]
            whole[rows, :, whole.shape[2] - piece.shape[2] + shared :] = piece[:, :, shared:]

    def fix(self, place: Tensor) -> None:
        """From now on a step writes the one column `place` and reads all."""
        self.place = place
        self._show(None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new keys and values [B, H, new, D] and return all so far."""
        if self.place is not None:
            self.keys.index_copy_(2, self.place, key_states)
            self.values.index_copy_(2, self.place, value_states)
            return self.keys, self.values
        start = self.keys.shape[2]
        self._show(start + key_states.shape[2])
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self.key_buffer, self.value_buffer = self.key_buffer[indices], self.value_buffer[indices]
        self._show(self.keys.shape[2])


def is_plain(cache: Any) -> bool:
    """Whether every layer of a cache is plain attention, so that its rows may be padded and copied freely."""
    layers = getattr(cache, "layers", None) or []
    return len(layers) > 0 and all(type(layer) is DynamicLayer for layer in layers)


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
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        getattr(config, "model_type", None) in FAMILIES
        and getattr(config, "_attn_implementation", None) in ("sdpa", "eager")
        and kind != "longrope"
        and "dynamic" not in kind
    )


def fixed_steps(
    model: Any, tokens: Tensor, cache: Any, mask: Tensor, positions: Tensor, steps: int
) -> Iterator[list[list[int]]]:
    """Decode greedily, a few steps at a time; yields lists of B ids, one for each step."""
    columns = cache.layers[0].key_buffer.shape[2]
    place = torch.tensor([mask.shape[1]], device=mask.device)
    count = torch.zeros_like(place)
    written = tokens.new_zeros(len(tokens), steps)
    tokens, positions = tokens[:, None].clone(), positions[:, None].clone()
    hidden = torch.finfo(model.dtype).min
    added = torch.full((len(tokens), 1, 1, columns), hidden, dtype=model.dtype, device=mask.device)
    added[:, 0, 0, : mask.shape[1]].masked_fill_(mask.bool(), 0.0)
    for layer in cache.layers:
        layer.fix(place)
    last = context_length(model) - 1

    def step() -> None:
        added.index_fill_(3, place, 0.0)
        given = {"attention_mask": added, "position_ids": positions, "past_key_values": cache}
        result = model(input_ids=tokens, **given, use_cache=True)
        tokens.copy_(result.logits[:, -1].argmax(-1, keepdim=True))
        written.index_copy_(1, count, tokens)
        for number in (positions, place, count):
            number.add_(1)
        positions.clamp_(max=last)  # of rows that have ended

    run = _recorded(model, step, (tokens, positions, place, count)) if mask.device.type == "cuda" else step
    for start in range(0, steps, READ_EVERY):
        end = min(start + READ_EVERY, steps)
        for _ in range(start, end):
            run()
        yield written[:, start:end].T.tolist()


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
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                step()
            finally:
                graph.capture_end()
            run = graph.replay
        except RuntimeError as error:
            put_back()
            _not_recorded.add(model)
            reason = first_line(error.__context__ or error)
            warnings.warn(f"decoding without a CUDA graph, which is slower: {reason}", stacklevel=2)
    stream_before.wait_stream(stream)
    return run


_stream = functools.cache(torch.cuda.Stream)
"""The stream of a device on which steps are recorded: one, since libraries keep a workspace for each."""


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
