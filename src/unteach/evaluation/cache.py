"""A key-value cache with room to grow, filled from caches of smaller batches.

Transformers' own cache copies all keys and values at every step to add one token; for a batch that copy costs
more than the rest of the step. Here the room is allocated once. Only plain attention layers are handled;
models with other caches (sliding windows, recurrent states) keep their own.

Shapes: B rows, H key heads, S cache columns, D width of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer as views into larger buffers [B, H, columns, D]."""

    def __init__(self, key_buffer: Tensor, value_buffer: Tensor, length: int) -> None:
        super().__init__()
        self.dtype, self.device = key_buffer.dtype, key_buffer.device
        self.is_initialized = True
        self._set(key_buffer, value_buffer, length)

    def _set(self, key_buffer: Tensor, value_buffer: Tensor, length: int) -> None:
        self.key_buffer, self.value_buffer = key_buffer, value_buffer
        self.keys, self.values = key_buffer[:, :, :length], value_buffer[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new keys and values [B, H, new, D] and return all so far."""
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        self._set(self.key_buffer, self.value_buffer, end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._set(self.key_buffer[indices], self.value_buffer[indices], self.keys.shape[2])


def is_plain(cache: Any) -> bool:
    """Whether every layer of a cache is plain attention, so that its rows may be padded and copied freely."""
    layers = getattr(cache, "layers", None) or []
    return len(layers) > 0 and all(type(layer) is DynamicLayer for layer in layers)


class Collector:
    """Gathers the caches of pieces of a batch into one cache with room.

    Columns of the whole: those shared by all prompts, padding, the prompt's own part, room.
    """

    def __init__(self, rows: int, shared: int, width: int, room: int) -> None:
        self.rows, self.shared, self.end, self.room = rows, shared, shared + width, room
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.cache: Any = None

    def add(self, cache: Any, rows: Sequence[int]) -> None:
        """Take over the cache of one piece.

        Args:
            cache: a plain cache whose rows have the shared columns first and their own, padded on the left,
            last.
            rows: which rows of the whole these are.
        """
        if not self.buffers:
            self.cache = cache
            for layer in cache.layers:
                shape = (self.rows, layer.keys.shape[1], self.end + self.room)
                self.buffers.append(
                    (
                        layer.keys.new_zeros(*shape, layer.keys.shape[3]),
                        layer.values.new_zeros(*shape, layer.values.shape[3]),
                    )
                )
        where = torch.tensor(list(rows), device=self.buffers[0][0].device)
        for layer, buffers in zip(cache.layers, self.buffers, strict=True):
            for buffer, piece in zip(buffers, (layer.keys, layer.values), strict=True):
                own = piece.shape[2] - self.shared
                buffer[where, :, : self.shared] = piece[:, :, : self.shared]
                buffer[where, :, self.end - own : self.end] = piece[:, :, self.shared :]

    def finish(self) -> Any:
        """The cache of the whole batch."""
        self.cache.layers = [RoomyLayer(keys, values, self.end) for keys, values in self.buffers]
        return self.cache
