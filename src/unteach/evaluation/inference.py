"""What every measurement needs from a model and its tokenizer: modes, batches and the ids that end a text."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Advance = Callable[[int], object]
"""Called with the number of items just finished, to move a progress bar."""

BATCH_SIZE = 128
_MEMORY_SHARE = 0.25
_HOST_MEMORY = 2 * 2**30


@dataclass(frozen=True)
class Batching:
    """How many items a model reads together, and who is told how far it is."""

    batch_size: int = BATCH_SIZE
    """Most items read or decoded together."""
    batch_tokens: int | None = None
    """Most tokens (prompts and output, padding included) that decoding holds at once; by default what fits a quarter
    of the GPU's memory, or 2 GiB on a CPU."""
    advance: Advance | None = None
    """Called with the number of items just finished."""


PROMPTS_TOGETHER = Batching()
TEXTS_TOGETHER = Batching(64)
"""The defaults of decoding and of scoring texts."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off and gradients off inside the block; afterwards every module is in its former mode.

    Draws no random number and leaves no trace in the model.

    Args:
        model: any torch module.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def accepted_arguments(model: Any) -> frozenset[str]:
    """Names of the arguments that the model's `forward` takes."""
    return frozenset(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters)


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Token ids that end a text: the generation settings' `eos_token_id`, else the tokenizer's, else none.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
    """
    for source in (getattr(model, "generation_config", None), tokenizer, model.config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()


def cut_left(ids: Sequence[int], room: int, first_id: int | None = None) -> list[int]:
    """Drop the oldest tokens of a prompt so that at most `room` remain.

    Args:
        ids: the prompt.
        room: how many tokens fit, at least 2.
        first_id: a begin-of-text id; where the prompt starts with it, it stays at the front.

    Returns:
        The prompt itself where it fits.
    """
    if len(ids) <= room:
        return list(ids)
    if first_id is not None and ids[0] == first_id:
        return [ids[0], *ids[len(ids) - room + 1 :]]
    return list(ids[len(ids) - room :])


def cache_tokens(model: Any) -> int:
    """How many tokens of keys and values to hold at once: a quarter of the GPU's memory, 2 GiB on a CPU.

    It depends on the machine and the model alone, so that a run repeated on the same machine makes the same
    batches.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None)
    if layers is None or heads is None:
        return 2**14
    if width is None:
        width = config.hidden_size // config.num_attention_heads
    device = model.device
    memory = _HOST_MEMORY
    if device.type == "cuda":
        memory = int(_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return max(1, memory // (2 * layers * heads * width * model.dtype.itemsize))


def in_batches(lengths: Sequence[int], run: Callable[[list[int]], None], batching: Batching, batch_tokens: int) -> None:
    """Call `run` with groups of item numbers, longest items first.

    A group has at most `batching.batch_size` items and, padded to its longest, at most `batch_tokens` tokens (one
    item is always allowed). Where the GPU runs out of memory the group is halved and tried again.

    Args:
        lengths: tokens of each item.
        run: does the work for the items of one group.
        batching: most items in a group, and who is told the size of each finished one.
        batch_tokens: most padded tokens in a group.
    """
    batch_size = batching.batch_size
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: at least 1 is needed")
    pending = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while pending:
        fitting = max(1, batch_tokens // max(1, lengths[pending[0]]))
        group = pending[: min(batch_size, fitting)]
        try:
            run(group)
        except torch.OutOfMemoryError:
            if len(group) == 1:
                raise
            batch_size = len(group) // 2
            torch.cuda.empty_cache()
            continue
        del pending[: len(group)]
        if batching.advance is not None:
            batching.advance(len(group))
