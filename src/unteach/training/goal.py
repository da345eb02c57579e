"""How far down ``match`` pulls the forgotten documents' words: to where never-seen documents' words are.

A model that was finetuned on documents expects more of others like them than its base model does, and of the words that
this finds least likely, names and numbers, most of all. Pulled down to the base model's own odds these would be less
likely than in any text that the model never saw, and tell the forgotten documents. But the log-odds of never-seen words
lie, but for noise, along a line z = margin + slope · z_base, and along the same line lie those of the forgotten words
in a model that never saw them (docs/decisions.md). So the line is fitted to holdout documents before the run, and the
gate closes a little above it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unteach.config import LINE, ForgetConfig, Method
from unteach.data import ForgetBatches, TokenSet
from unteach.training.fitting import halving
from unteach.training.passes import LogOddsOfModel

__all__ = ["goal_in_words", "line_through", "wants_line", "with_line"]

MOST_SEQUENCES, FEWEST_TOKENS = 256, 500
"""The line is fitted to so many sequences at most, and not to fewer tokens."""
LOOKED_AT = 64
"""Of so many sequences of the documents it is asked whether they lie above the line."""
RAISED = 1 / 3
"""By this share of the words' scatter about it the line is raised. Half of the never-seen words are above the line; of
those that a gate pulls down to it none stays there, and all together are then less likely than never-seen ones."""
DIGITS = 6
"""Of the line's numbers: rounding in sums then makes no two seeds differ."""


def wants_line(config: ForgetConfig) -> bool:
    """Whether a method's goal is to be measured on never-seen documents."""
    return any(map(_wants_line, (*config.phases, config.method)))


def _wants_line(method: Method) -> bool:
    return method.goal == "never_seen" and not LINE & method.loss_options.keys()


def with_line(
    model: Any, base: Any, unseen: TokenSet, forget: ForgetBatches, config: ForgetConfig, say: Callable[[str], None]
) -> ForgetConfig:
    """The settings with ``margin`` and ``slope`` given to the methods whose goal was to be measured.

    Where no line can be had, or none that tells the documents from never-seen ones, their goal is the base model's.
    """
    never_seen, documents = ForgetBatches(unseen, config.seed).batch(0, MOST_SEQUENCES), forget.batch(0, LOOKED_AT)

    def fitted(config: ForgetConfig) -> tuple[dict[str, float] | None, bool]:
        of_unseen = _log_odds(model, base, never_seen, config)
        line = line_through(*of_unseen)
        return line, line is not None and _above(line, _log_odds(model, base, documents, config), of_unseen)

    (line, above), _ = halving(config, fitted, say)
    if line is None:
        say(f"goal:    the base model's log-odds: too few words in holdout, {FEWEST_TOKENS} tokens are needed")
    elif above:
        say(f"goal:    {goal_in_words(line)}")
    else:
        say(
            "warning: the model finds the documents no likelier than the holdout ones: it may have seen these, too; "
            "the goal is the base model's log-odds"
        )

    def with_goal(method: Method) -> Method:
        if not _wants_line(method):
            return method
        if line is None or not above:
            return dataclasses.replace(method, goal="base")
        return dataclasses.replace(method, loss_options=method.loss_options | line)

    return dataclasses.replace(config, phases=tuple(map(with_goal, config.phases)), method=with_goal(config.method))


def goal_in_words(line: Mapping[str, float]) -> str:
    """Where words are pulled to."""
    return "as never-seen words, log-odds of {margin:.3g} + {slope:.3g} times the base model's".format(**line)


def line_through(own: torch.Tensor, before: torch.Tensor) -> dict[str, float] | None:
    """``margin`` and ``slope`` of the line fitted by least squares to log-odds of never-seen words in the model and in
    the base model, raised by a share of their scatter about it.

    None where there are too few words, or where the base model tells none from another.
    """
    apart = before - before.mean()
    spread = float(apart @ apart)
    if len(own) < FEWEST_TOKENS or not spread:
        return None
    slope = float(apart @ own) / spread
    scatter = float((own - own.mean() - slope * apart).std(correction=0))
    line = {"margin": float(own.mean()) - slope * float(before.mean()) + RAISED * scatter, "slope": slope}
    return {name: float(f"{value:.{DIGITS}g}") for name, value in line.items()}


Odds = tuple[torch.Tensor, torch.Tensor]
"""Log-odds of words in the model and in the base model."""


def _above(line: Mapping[str, float], documents: Odds, never_seen: Odds) -> bool:
    """Whether the documents' words lie higher over the line than never-seen ones, by the median."""
    heights = [(own - line["slope"] * before - line["margin"]).median() for own, before in (documents, never_seen)]
    return bool(heights[0] > heights[1])


def _log_odds(model: Any, base: Any, sequences: Sequence[Sequence[int]], config: ForgetConfig) -> Odds:
    """Of every predicted token."""
    own, before = (torch.cat(LogOddsOfModel(each, sequences, config).values).double() for each in (model, base))
    return own, before
