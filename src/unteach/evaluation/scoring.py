"""Log-probabilities of given texts, in batches, without holding all logits of a long text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unteach.evaluation.inference import TEXTS_TOGETHER, Batching, accepted_arguments, evaluating, in_batches
from unteach.models import context_length
from unteach.models.distributed import share_out
from unteach.models.precision import precision_of_pass

_LOGITS = {"cuda": 2**29, "cpu": 2**27}
"""Most logits held at once, by kind of device: 2 GiB in fp32 on a GPU, half a GiB on a CPU."""
_POSITIONS = {"cuda": 2**16, "cpu": 2**11}
"""Most positions read at once; more is slower on a CPU."""


def token_logprobs(
    model: Any,
    sequences: Sequence[Sequence[int]],
    *,
    batching: Batching = TEXTS_TOGETHER,
    positions: int | None = None,
) -> list[NDArray[np.float64]]:
    """log p(token | tokens before it) for every token but the first of each sequence.

    Sequences are sorted by length and padded on the right, where a causal model cannot see the padding. A
    sequence longer than `positions` is read in pieces through the key-value cache. On a GPU float32 weights are
    multiplied in TF32 (10 bits): a thousandth of a nat per token, far below every interval, and several times faster.

    Args:
        model: a Hugging Face causal language model. Its mode (train or eval) is the same afterwards.
        sequences: token ids of each text, at least two each.
        batching: how many sequences are read together; `batch_tokens` plays no part.
        positions: most positions read at once; by default at most 2,048 on a CPU and 65,536 on a GPU, and no
            more than make half a GiB or 2 GiB of fp32 logits.

    Returns:
        One array per sequence, one shorter than the sequence.

    Raises:
        ValueError: for a sequence of fewer than two tokens or longer than the context, or NaN.
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
    most = positions or max(1, min(_POSITIONS[kind], _LOGITS[kind] // vocabulary))

    def work(items: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        results: list[NDArray[np.float64]] = [np.empty(0)] * len(items)

        def run(group: list[int]) -> None:
            chosen = [items[index] for index in group]
            fits = len(chosen[0]) <= most
            scores = _score_batch(model, chosen) if fits else [_score_pieces(model, chosen[0], most)]
            for index, values in zip(group, scores, strict=True):
                results[index] = values

        in_batches([*map(len, items)], run, batching, most)
        return results

    with evaluating(model), precision_of_pass("tf32" if kind == "cuda" else "fp32", model.device):
        results = share_out(model, sequences, work)
    for index, values in enumerate(results):
        if np.isnan(values).any():
            raise ValueError(f"the log-probabilities of text {index} are NaN: broken weights?")
    return results


def _score_batch(model: Any, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
    """Sequences that fit together: one pass over the right-padded batch."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
    ids = ids.to(model.device)
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
