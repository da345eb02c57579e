"""What ends a command: wrong input, every problem on a line of its own, or a wish to pause."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["InputError", "Interrupted", "first_line"]

_LONGEST_LINE = 300
"""PyTorch's message for want of GPU memory lists every process in one line."""


class InputError(ValueError):
    """What the user gave cannot be used: ``problems``, each one line. The command ends with status 2."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        given = [problems] if isinstance(problems, str) else list(problems)
        self.problems = [" ".join(line.strip() for line in problem.splitlines() if line.strip()) for problem in given]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[list[str]]]:
        return type(self), (self.problems,)


class Interrupted(Exception):  # noqa: N818  (not an error: the run was asked to pause)
    """The run was asked to stop; its checkpoint is written."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, cut where it is very long, or its type's name where it has none."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE].rstrip() + "…"
