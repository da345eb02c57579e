"""Attacks on a model that has forgotten: does it hold when the documents are asked for in another way?

    texts.py (what is asked) ─▶ one file an attack ─▶ judging.py (against a control) ─▶ running.py (one JSON file each)

To add an attack, add a file here with an ``ATTACK``; ``unteach audit`` finds it. An attack measures one model on one
set of documents and gives back ``Reading``s; which models are measured, and what is compared with what, is not its
concern.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unteach.audits.texts import Case

__all__ = ["Attack", "Reading", "attacks"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What an attack measured at one place: a score of each item, which are compared between models item by item."""

    line: str
    """What was measured: readings of one line, at several places, are one curve."""
    at: float | str
    """The place: steps, bits, samples, a layer; or the name of a form or of a score."""
    scores: tuple[float, ...]
    """Of each item: from 0 to 1, as a percentage; where there is ``against``, losses of texts."""
    against: tuple[float, ...] = ()
    """Losses of texts that were never seen: the reading is then a membership AUC."""
    chance: tuple[float, ...] | float | None = None
    """What a model that knows nothing has: of each item, or a number (of an AUC one half). None: holdout documents
    tell."""
    two_sided: bool = False
    """Whether less than the control gives the documents away, too."""

    @property
    def unit(self) -> str:
        """``auc`` from 0 to 1, or ``percent``."""
        return "auc" if self.against else "percent"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One way to get the documents back."""

    title: str
    """What is done, in a few words."""
    protocol: str
    """What exactly is done and measured, in a sentence or two."""
    source: str
    """Where the protocol was published."""
    over: str
    """What the places of its readings are."""
    measure: Callable[[Case, Any], Sequence[Reading]]
    """Measures the model of a case, which it leaves as it was, with these settings."""
    quick: Any
    """Settings, a dataclass, for minutes on two cores."""
    full: Any
    """The same, in full."""
    installed: Callable[[Any], Any] = lambda settings: settings
    """Settings with what packages add that are not required but installed."""


@functools.cache
def attacks() -> Mapping[str, Attack]:
    """All attacks by name, which is that of their file."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    found = {name: getattr(importlib.import_module(f"{__name__}.{name}"), "ATTACK", None) for name in names}
    return {name: attack for name, attack in found.items() if attack is not None}
