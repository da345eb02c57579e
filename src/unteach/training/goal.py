"""How far down ``match`` pulls the forgotten documents' words: to where never-seen documents' words are.

A model that was finetuned on documents expects more of others like them than its base model does, and of the words that
this finds least likely, names and numbers, most of all. Pulled down to the base model's own odds these would be less
likely than in any text that the model never saw, and tell the forgotten documents. But the log-odds of never-seen words
lie, but for noise, along a line z = margin + slope · z_base, and along the same line lie those of the forgotten words
in a model that never saw them (docs/decisions.md). So the line is fitted to holdout documents before the run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unteach.config import LINE, ForgetConfig, Method
from unteach.data import ForgetBatches, TokenSet
from unteach.training.fitting import halving
from unteach.training.passes import LogOddsOfModel

__all__ = ["line_of_never_seen", "wants_line", "with_line"]

MOST_SEQUENCES, FEWEST_TOKENS = 256, 500
"""The line is fitted to so many sequences at most, and not to fewer tokens."""


def wants_line(config: ForgetConfig) -> bool:
    """Whether a method's goal is to be measured on never-seen documents."""
    return any(map(_wants_line, (*config.phases, config.method)))


def _wants_line(method: Method) -> bool:
    return method.goal == "never_seen" and not LINE & method.loss_options.keys()


def with_line(
    model: Any, base: Any, unseen: TokenSet, config: ForgetConfig, say: Callable[[str], None]
) -> ForgetConfig:
    """The settings with ``margin`` and ``slope`` given to the methods whose goal was to be measured."""
    sequences = ForgetBatches(unseen, config.seed).batch(0, MOST_SEQUENCES)
    line, _ = halving(config, functools.partial(line_of_never_seen, model, base, sequences), say)
    if line is None:
        say(
            f"goal:    the base model's log-odds: too few words in holdout documents, {FEWEST_TOKENS} tokens are needed"
        )
        return config
    say("goal:    as never-seen words, log-odds of {margin:.3g} + {slope:.3g} times the base model's".format(**line))
    *phases, method = (
        dataclasses.replace(method, loss_options=method.loss_options | line) if _wants_line(method) else method
        for method in (*config.phases, config.method)
    )
    return dataclasses.replace(config, phases=tuple(phases), method=method)


def line_of_never_seen(
    model: Any, base: Any, sequences: Sequence[Sequence[int]], config: ForgetConfig
) -> dict[str, float] | None:
    """``margin`` and ``slope`` of the line fitted by least squares to the log-odds of all tokens in both models.

    None where there are too few tokens, or where the base model tells none from another.
    """
    own, before = (torch.cat(LogOddsOfModel(each, sequences, config).values).double() for each in (model, base))
    apart = before - before.mean()
    spread = float(apart @ apart)
    if len(own) < FEWEST_TOKENS or not spread:
        return None
    slope = float(apart @ own) / spread
    return {"margin": float(own.mean()) - slope * float(before.mean()), "slope": slope}
