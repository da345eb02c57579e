"""Conversations as a chat model reads them: in the tokenizer's own template, or as plain lines where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unteach.errors import InputError, first_line

Turn = dict[str, str]
"""A message: `role` (user, assistant, ...) and `content`."""


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer says how its model is spoken to."""
    return bool(getattr(tokenizer, "chat_template", None))


def is_conversation(value: Any) -> bool:
    """Whether a value of a record is a list of messages, each with role and content as text."""

    def is_turn(turn: Any) -> bool:
        return isinstance(turn, dict) and all(isinstance(turn.get(part), str) for part in ("role", "content"))

    return isinstance(value, list) and bool(value) and all(map(is_turn, value))


def plain_text(turns: Sequence[Turn]) -> str:
    """A conversation as lines `role: content`."""
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def chat_text(tokenizer: Any, turns: Sequence[Turn], *, answer: bool = False) -> str:
    """A conversation in the tokenizer's template, with `answer` up to where the model's next turn begins.

    It has the special tokens that the template writes: encode it without others. A model that can do both is asked to
    answer without thinking aloud (`enable_thinking`, which other templates do not look at).
    """
    form: dict[str, Any] = {"tokenize": False, "add_generation_prompt": answer, "enable_thinking": False}
    try:
        return tokenizer.apply_chat_template(list(turns), **form)
    except ImportError:
        raise InputError("the tokenizer has a chat template, which needs jinja2: pip install jinja2") from None
    except Exception as error:  # whatever a template raises: roles that must alternate, a role it does not know
        raise InputError(f"the tokenizer's chat template refuses a conversation: {first_line(error)}") from error
