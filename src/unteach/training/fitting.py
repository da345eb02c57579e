"""Where the memory of a device runs out, the same batch is read in smaller parts: the same step, made once more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.models.distributed import ranks

__all__ = ["halving"]

T = TypeVar("T")


def halving(
    config: ForgetConfig, work: Callable[[ForgetConfig], T], say: Callable[[str], None] = lambda line: None
) -> tuple[T, ForgetConfig]:
    """Do some work; where the device's memory runs out, again with half the ``micro_batch``, as often as that helps.

    Gradients are added up over micro-batches, so the batch, and the step that is taken with it, stay the same. What the
    work had done when it failed must not count: it begins by clearing gradients, and changes weights as its last act.
    Several ranks wait for each other in the middle of a pass, so that none can begin anew alone.

    Returns:
        What the work gives, and the settings with which it did; ``say`` gets one line if they are not those given.
    """
    rows = max(config.batch, config.general_batch, config.keep_batch if config.keep else 0)
    used = config
    while True:
        failed = ""
        try:
            result = work(used)
        except torch.OutOfMemoryError as error:
            failed = str(error).partition("\n")[0].partition(". ")[0]
        if not failed:  # outside of `except`: the error holds what the failed pass had allocated
            break
        size = min(used.micro_batch or rows, rows)
        if size == 1 or ranks() > 1:
            smaller = "set checkpoint_activations, or lower max_tokens, general_tokens"
            smaller += "" if size == 1 else " or micro_batch"
            raise InputError(f"the device's memory ran out with micro_batch {size} ({failed}): {smaller}")
        used = dataclasses.replace(used, micro_batch=size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if used is not config:
        say(f"the device's memory ran out: micro_batch is {used.micro_batch} from here on, the batch stays as it was")
    return result, used
