"""SmolLM2-135M as a model to unlearn: conversion, articles learned by heart, target and retrained models."""

import sys
from collections.abc import Callable


def exit_status(command: Callable[[], int | None]) -> int:
    """The exit status of a command: its own, or 2 with one line where its input is wrong."""
    try:
        return command() or 0
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
