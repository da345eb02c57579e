"""Random draws that are the same on every Python version: SplitMix64 on plain integers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

_MASK = (1 << 64) - 1


class Draws:
    """A stream of pseudo-random choices, made with integer arithmetic alone.

    The standard library promises a stable sequence for `random.Random.random` only, not for `choice` or
    `shuffle`; the texts of this benchmark are identified by their hashes, so they use this generator.

    Args:
        *key: Anything printable; the stream depends on these values and on nothing else.
    """

    def __init__(self, *key: object) -> None:
        text = "/".join(str(part) for part in key)
        self._state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def below(self, bound: int) -> int:
        """Return an integer in [0, bound)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64

    def percent(self, chance: int) -> bool:
        """Return True with a probability of `chance` percent."""
        return self.below(100) < chance

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return the items in a random order (Fisher-Yates)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Return `count` different items in a random order."""
        return self.shuffled(items)[:count]
