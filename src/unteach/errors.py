"""What ends a command: wrong input, every problem on a line of its own, a wish to pause, or a signal."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "InputError", "Interrupted", "RanksParted", "ending_on_signals", "first_line", "given_path", "has_ended",
    "out_of_range", "printable", "shown", "template_problems",
]  # fmt: skip

_LONGEST_LINE = 300
"""PyTorch's message for want of GPU memory lists every process in one line."""
SWALLOWED = (3.0, 5.0)
"""Seconds after which a signal comes again that has ended nothing, first and from then on."""
SOON = (0.01, 5.0)
"""The same where it is known that an exception went nowhere."""
_LONGEST_PROBLEM = 1500
_LONGEST_SHOWN = 120
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal would obey instead of showing it, and what is no text."""
_RANGES: dict[str, Callable[[float], bool]] = {
    "positive": lambda x: x > 0,
    "positive and finite": lambda x: 0 < x < math.inf,
    "zero or positive": lambda x: 0 <= x < math.inf,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
    "at least 1": lambda x: x >= 1,
    "at least 2": lambda x: x >= 2,
    "4, 8, 16 or 32": lambda x: x in (4, 8, 16, 32),
    "16 or 32": lambda x: x in (16, 32),
    "from 1 to 4096": lambda x: 1 <= x <= 4096,
}


class InputError(ValueError):
    """What the user gave cannot be used: ``problems``, each one line. The command ends with status 2."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        given = [problems] if isinstance(problems, str) else list(problems)
        lines = (" ".join(line.strip() for line in problem.splitlines() if line.strip()) for problem in given)
        self.problems = [printable(line, _LONGEST_PROBLEM) for line in lines]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[list[str]]]:
        return type(self), (self.problems,)


class Interrupted(Exception):  # noqa: N818  (not an error: the run was asked to pause)
    """The run was asked to stop; its checkpoint is written."""


class RanksParted(Exception):  # noqa: N818  (what it says is for people)
    """This rank ends without the others: one of them is gone, or a signal came. ``line`` is empty where another says
    it, ``status`` is the exit status."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.line, self.status = line, status


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, cut where it is very long, or its type's name where it has none."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE].rstrip() + "…"


def given_path(given: str, option: str) -> Path:
    """A path as a user gave it, with the home that ``~`` means; an ``InputError`` where none can have that name."""
    try:
        path = Path(given).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, no such home
        raise InputError(f"{option} is {given!r}: {getattr(error, 'strerror', None) or error}") from None
    return path


def printable(text: str, longest: int | None = None) -> str:
    """A text as a terminal can show it: control characters in words, the middle left out where it is very long."""
    if longest is not None and len(text) > longest:
        text = f"{text[: longest // 2]} … {text[-longest // 2 :]}"
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(value: Any, *, bare: bool = False) -> str:
    """A value in a line of bounded length, the middle left out where it is long; text in quotes unless ``bare``."""
    try:
        text = value if bare and isinstance(value, str) else repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return printable(printable(text), _LONGEST_SHOWN)


def out_of_range(settings: Any, where: str, must: str, *names: str) -> list[str]:
    """A line for each of these settings that is given and not as it must be, see ``_RANGES``."""
    given, holds = {name: getattr(settings, name) for name in names}, _RANGES[must]
    return [f"{where}{name} is {x}: it must be {must}" for name, x in given.items() if x is not None and not holds(x)]


def has_ended() -> None:
    """The signal that came has ended the command: it need not come again."""
    if hasattr(signal, "SIGALRM"):
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def ending_on_signals(*, program: bool) -> Iterator[list[int]]:
    """Inside the block SIGINT and SIGTERM raise ``KeyboardInterrupt``; the second one ends the process, status 130.

    The list has the signals that came. ``program``: the process ends after the block, and no signal disturbs that. A
    library may make nothing of the exception (PyTorch does, while it looks for NumPy): it comes again until the block
    is left.
    """
    came: list[int] = []
    report = sys.unraisablehook
    alarm = getattr(signal, "SIGALRM", None)  # there is none on Windows

    def end(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            os.write(2, b"unteach: interrupted\n")
            os._exit(130)
        if alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, *SWALLOWED)
        raise KeyboardInterrupt

    def once_more(number: int, frame: Any) -> None:
        while frame is not None:
            if frame.f_code is again.__code__:  # there it would be printed, and go nowhere
                signal.setitimer(signal.ITIMER_REAL, *SOON)
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    def again(lost: Any) -> None:
        """In a destructor, or a callback of the import system, an exception goes nowhere: let it come again soon."""
        if lost.exc_type is not KeyboardInterrupt or not came or alarm is None:
            report(lost)
        else:
            signal.setitimer(signal.ITIMER_REAL, *SOON)

    try:
        previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        if alarm is not None:
            previous[alarm] = signal.signal(alarm, once_more)
    except ValueError:  # not in the main thread: signals are someone else's business
        previous = {}
    if previous:
        sys.unraisablehook = again
    try:
        yield came
    finally:
        sys.unraisablehook = report
        if alarm in previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if program else handler)


def template_problems(template: str | None, questions: object) -> list[str]:
    """What is wrong with a question template, beside the questions that were given."""
    if template is None:
        return []
    wrong = [] if questions else ["question_template is given, but no questions to ask: give questions, too"]
    if "{question}" not in template:
        wrong.append(f"question_template is {shown(template)}: it must have {{question}} where the question stands")
    return wrong
