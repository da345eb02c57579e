"""What every measurement needs of a model: modes, batches, ids that end a text, log-probabilities of given texts."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unteach.models import context_length
from unteach.models.distributed import share_out
from unteach.models.precision import precision_of_pass

R = TypeVar("R")
Advance = Callable[[int], object]
"""Called with the number of items just finished, to move a progress bar."""

BATCH_SIZE = 128
_MEMORY_SHARE, _HOST_MEMORY = 0.25, 2 * 2**30
_LOGITS = {"cuda": 2**29, "cpu": 2**27}
"""Most logits held at once, by kind of device: 2 GiB in fp32 on a GPU, half a GiB on a CPU."""
_POSITIONS = {"cuda": 2**16, "cpu": 2**11}
"""Most positions read at once; more is slower on a CPU."""


@dataclass(frozen=True)
class Batching:
    """How many items a model reads together, and who is told how far it is."""

    batch_size: int = BATCH_SIZE
    """Most items read or decoded together."""
    advance: Advance | None = None


PROMPTS_TOGETHER, TEXTS_TOGETHER = Batching(), Batching(64)
"""The defaults of decoding and of scoring texts."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off and gradients off inside the block; afterwards every module is in its former mode."""
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
    """Token ids that end a text: the generation settings' `eos_token_id`, else the tokenizer's, else none."""
    for source in (getattr(model, "generation_config", None), tokenizer, model.config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()


def cut_left(ids: Sequence[int], room: int, first_id: int | None = None) -> list[int]:
    """Drop the oldest tokens of a prompt so that at most `room` remain; a begin-of-text `first_id` stays in front."""
    if len(ids) <= room:
        return list(ids)
    front = [first_id] if first_id is not None and ids[0] == first_id else []
    return [*front, *ids[len(ids) - room + len(front) :]]


def cache_tokens(model: Any) -> int:
    """How many tokens (prompts and output, padding included) to hold: a quarter of the GPU's memory, 2 GiB on a CPU.

    By the machine and the model alone, so that a run repeated on the same machine makes the same batches.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if layers is None or heads is None:
        return 2**14
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    memory = _HOST_MEMORY
    if model.device.type == "cuda":
        memory = int(_MEMORY_SHARE * torch.cuda.get_device_properties(model.device).total_memory)
    return max(1, memory // (2 * layers * heads * width * model.dtype.itemsize))


def in_batches(
    lengths: Sequence[int], run: Callable[[list[int]], Sequence[R]], batching: Batching, batch_tokens: int
) -> list[R]:
    """Call `run` with groups of item numbers, longest items first; it gives one result for each.

    A group has at most `batching.batch_size` items and, padded to its longest, at most `batch_tokens` tokens (one
    item is always allowed). Where the GPU runs out of memory the group is halved and tried again.
    """
    batch_size = batching.batch_size
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: at least 1 is needed")
    results: dict[int, R] = {}
    pending = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while pending:
        fitting = max(1, batch_tokens // max(1, lengths[pending[0]]))
        group = pending[: min(batch_size, fitting)]
        try:
            results.update(zip(group, run(group), strict=True))
        except torch.OutOfMemoryError:
            if len(group) == 1:
                raise
            batch_size = len(group) // 2
            torch.cuda.empty_cache()
            continue
        del pending[: len(group)]
        if batching.advance is not None:
            batching.advance(len(group))
    return [results[index] for index in range(len(lengths))]


def token_logprobs(
    model: Any, sequences: Sequence[Sequence[int]], *, batching: Batching = TEXTS_TOGETHER
) -> list[NDArray[np.float64]]:
    """log p(token | tokens before it) for every token but the first of each sequence.

    Sequences (token ids, at least two and no more than the context) are sorted by length and padded on the right, where
    a causal model cannot see the padding; one that is too long for a pass is read in pieces through the key-value
    cache. On a GPU float32 weights are multiplied in TF32 (10 bits): a thousandth of a nat per token, far below every
    interval, and several times faster. The model's mode (train or eval) is the same afterwards.
    """
    context = context_length(model)
    for index, sequence in enumerate(sequences):
        if len(sequence) < 2:
            raise ValueError(
                f"text {index} has {len(sequence)} token(s): at least 2 are needed, since the first has "
                "nothing before it; leave the text out"
            )
        if len(sequence) > context:
            raise ValueError(
                f"text {index} has {len(sequence)} tokens, but the model's context is {context}: cut it first"
            )
    vocabulary = model.config.get_text_config().vocab_size
    kind = "cuda" if model.device.type == "cuda" else "cpu"
    most = max(1, min(_POSITIONS[kind], _LOGITS[kind] // vocabulary))

    def work(items: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        def run(group: list[int]) -> list[NDArray[np.float64]]:
            chosen = [items[index] for index in group]
            fits = len(chosen[0]) <= most
            return _score_batch(model, chosen) if fits else [_score_pieces(model, chosen[0], most)]

        return in_batches([*map(len, items)], run, batching, most)

    with evaluating(model), precision_of_pass("tf32" if kind == "cuda" else "fp32", model.device):
        results = share_out(model, sequences, work)
    for index, values in enumerate(results):
        if np.isnan(values).any():
            raise ValueError(f"the log-probabilities of text {index} are NaN: broken weights?")
    return results


def _score_batch(model: Any, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
    """Sequences that fit together: one pass over the right-padded batch."""
    ids = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True).to(model.device)
    extra = {"use_cache": False} if "use_cache" in accepted_arguments(model) else {}
    logits = model(input_ids=ids, **extra).logits  # [B, T, V]
    return [
        _gather(logits[row, : len(sequence) - 1], ids[row, 1 : len(sequence)]) for row, sequence in enumerate(sequences)
    ]


def _score_pieces(model: Any, sequence: Sequence[int], most: int) -> NDArray[np.float64]:
    """One long sequence: pieces of `most` tokens, each reading the cache of those before."""
    ids = torch.tensor([list(sequence)], device=model.device)
    cache: Any = None
    parts: list[NDArray[np.float64]] = []
    for start in range(0, len(sequence) - 1, most):
        end = min(start + most, len(sequence) - 1)
        result = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        parts.append(_gather(result.logits[0], ids[0, start + 1 : end + 1]))
    return np.concatenate(parts)


def _gather(logits: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """log softmax of `logits` [T, V] at `labels` [T], in fp32."""
    logits = logits.float()
    chosen = logits.gather(-1, labels[:, None]).squeeze(-1)
    return (chosen - logits.logsumexp(-1)).double().cpu().numpy()
