"""How much memory a pass takes, learnt by rehearsing it on tensors without data.

PyTorch's ``FakeTensorMode`` carries out every operation on shapes alone. So the model's own code says what the forward
pass keeps for the backward pass, in every precision and for every architecture, and a 7B model is rehearsed in seconds
and a few megabytes. Weights are neither read nor made. The rehearsal uses CPU kernels, whatever the run's device is:
what PyTorch's attention and products keep is the same on a GPU. Only chunks of logits are as large as there.

A model whose code looks at values (a mixture of experts that sorts tokens) cannot be rehearsed; its activations are
then taken from the count for a Llama block, see ``block_elements``.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unteach.config import ForgetConfig
from unteach.errors import InputError, first_line
from unteach.method.divergences import DIVERGENCES
from unteach.method.vocab_head import Head, chunks_as_on, mean_of_rows, token_log_odds
from unteach.models.load import Trainable, context_length, decoder_layers, trainable_parameters
from unteach.models.precision import precision_of_pass
from unteach.training.passes import block_calls

__all__ = ["LiveBytes", "PassMemory", "Rehearsal", "block_elements"]

PROBE_TOKENS, QUESTION_TOKENS, SCORED_TOKENS = 192, 1024, 1024
"""Longest prompt with its continuation, longest question with its examples, longest text that is scored."""
SCORED_TOGETHER = 64
FLOAT = 4
"""Bytes of a float32."""


class LiveBytes(TorchDispatchMode):
    """Adds up the tensors that are made inside the block and still alive, besides those that are ``known`` before.

    Attributes:
        now: Bytes alive.
        peak: The most that were alive at once.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it makes."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._counted:
            self._counted.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes that a forward and backward pass takes besides weights and their gradients."""

    activations: int
    """What the forward pass keeps for the backward pass, of the blocks and of the head."""
    head: int
    """The most that the vocabulary head takes on top for a chunk of logits and what is computed from them."""
    working: int
    """What the backward pass of the last block takes on top; later ones find activations freed."""

    @property
    def peak(self) -> int:
        """The most at once: the head has done its work when the blocks begin their backward pass."""
        return self.activations + max(self.head, self.working)


class Rehearsal:
    """A model without weights, made from its ``config.json``.

    Args:
        folder: The model's folder.
        trainable: Which weights will be trained, see ``trainable_parameters``; None: none.
        option: What the error messages call the model.
        kind: Of the device that the run will be on.

    Attributes:
        model: The model, its tensors without data.
        parameters: How many numbers its weights are, tied ones once.
        trainable: How many of them are trained.
        largest: How many the largest trained weight has.
    """

    def __init__(
        self, folder: Path, trainable: Trainable | None = None, option: str = "model", kind: str = "cpu"
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._mode, self._kind = FakeTensorMode(), kind
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            with self._mode:
                self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{option} is '{folder}': no model can be made from it: {first_line(error)}") from error
        chosen = trainable_parameters(self.model, trainable) if trainable else {}
        with self._mode:
            for parameter in self.model.parameters():
                parameter.requires_grad_(bool(trainable) and parameter.requires_grad)
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.trainable = sum(parameter.numel() for parameter in chosen.values())
        self.largest = max((parameter.numel() for parameter in chosen.values()), default=0)
        self._blocks = functools.cache(self._rehearse_blocks)
        self._reading = functools.cache(self._rehearse_reading)
        self._head_bytes = functools.cache(self._rehearse_head)

    @property
    def gathered(self) -> int:
        """Numbers that a rank holds of sharded weights while it computes: all outside the blocks, and two blocks.

        The weights of two blocks (one computes while the next arrives) and their gradients (one is computed while the
        last is sent), the weights outside the blocks, and their gradients where they are trained.
        """
        block = sum(parameter.numel() for parameter in decoder_layers(self.model)[0].parameters())
        inside = {id(parameter) for parameter in decoder_layers(self.model).parameters()}
        outside = [parameter for parameter in self.model.parameters() if id(parameter) not in inside]
        return 4 * block + sum(parameter.numel() * (2 if parameter.requires_grad else 1) for parameter in outside)

    @property
    def width(self) -> int:
        """D, the width of the last hidden states."""
        return self._head().weight.shape[1]

    @property
    def vocabulary(self) -> int:
        """V, the size of the vocabulary."""
        return self._head().weight.shape[0]

    @property
    def head_is_trained(self) -> bool:
        """Whether the vocabulary head is among the trained weights."""
        return self._head().weight.requires_grad

    def student_pass(
        self,
        sequences: int,
        tokens: int,
        precision: str,
        divergence: str | None = None,
        base_width: int | None = None,
        *,
        checkpointed: bool = False,
    ) -> PassMemory:
        """A forward and backward pass over ``sequences`` of so many ``tokens`` (a micro-batch).

        Args:
            sequences: B.
            tokens: T.
            precision: Compute precision of the pass.
            divergence: To rows of another model; None: a loss on the log-odds of the labels.
            base_width: Width of that other model's hidden states, if not the same.
            checkpointed: Whether only the blocks' inputs are kept for the backward pass.
        """
        kept, head = self._head_bytes(sequences * (tokens - 1), precision, divergence, base_width)

        def blocks(rows: int) -> tuple[int, int]:
            return self._blocks(rows, tokens, precision, checkpointed)

        activations = self._scaled(lambda rows: blocks(rows)[0], sequences, precision)
        working = self._scaled(lambda rows: blocks(rows)[1], sequences, precision)
        return PassMemory(activations + kept, head, working)

    def reading(self, sequences: int, tokens: int, precision: str) -> int:
        """The most bytes that a forward pass without gradients takes, up to the last hidden states."""
        return self._scaled(lambda rows: self._reading(rows, tokens, precision), sequences, precision)

    def evaluation(self, config: ForgetConfig, device: torch.device, *, one_by_one: bool = False) -> int:
        """Bytes of decoding (the cache twice, while its pieces are put together) or of scoring texts: the most."""
        from unteach.evaluation import generation, inference

        kind, limit = "cpu", inference._HOST_MEMORY
        if device.type == "cuda":
            kind, limit = "cuda", int(inference._MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
        model, text_config = self.model, self.model.config.get_text_config()
        context, heads = context_length(model), text_config.num_attention_heads
        rows = 1 if one_by_one else min(inference.BATCH_SIZE, 2 * config.probes)
        length = min(context, QUESTION_TOKENS if config.questions else PROBE_TOKENS)
        key_heads = getattr(text_config, "num_key_value_heads", None) or heads
        head_width = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
        cache = 2 * FLOAT * text_config.num_hidden_layers * key_heads * head_width * rows * length
        together = max(1, min(rows, generation._PIECE_TOKENS[kind] // length))
        decoding = 2 * min(limit, cache) + self.reading(together, length, "fp32")

        positions = max(1, min(inference._POSITIONS[kind], inference._LOGITS[kind] // self.vocabulary))
        length = min(context, SCORED_TOKENS, positions)
        rows = 1 if one_by_one else max(1, min(SCORED_TOGETHER, 2 * config.probes, positions // length))
        logits = FLOAT * self.vocabulary * length * (rows + 1)
        return max(decoding, logits + self.reading(rows, length, "fp32"))

    def _scaled(self, rehearsed: Callable[[int], int], sequences: int, precision: str) -> int:
        """What many sequences take, from one; in half precision, copies of the weights do not grow with them."""
        one = rehearsed(1)
        each = rehearsed(2) - one if precision in ("fp16", "bf16") else one
        return one + (sequences - 1) * each

    def _rehearse_blocks(self, sequences: int, tokens: int, precision: str, checkpointed: bool) -> tuple[int, int]:
        """Activations and working memory of the blocks."""
        try:
            with self._acting(precision) as live, block_calls(self.model, compiled=False, checkpointed=checkpointed):
                hidden = self._hidden(sequences, tokens)[:, :-1].flatten(0, 1)
                activations, live.peak = live.now, live.now
                last = [p for p in decoder_layers(self.model)[-1].parameters() if p.requires_grad]
                hidden.backward(torch.empty_like(hidden), inputs=last)
                return activations, live.peak - activations
        except Exception:  # whatever a model's code does with values that are not there
            block = FLOAT * sequences * tokens * block_elements(self._text_config())
            kept = FLOAT * sequences * tokens * self.width if checkpointed else block
            return self._text_config().num_hidden_layers * kept, block

    def _rehearse_reading(self, sequences: int, tokens: int, precision: str) -> int:
        try:
            with torch.no_grad(), self._acting(precision) as live:
                self._hidden(sequences, tokens)
                return live.peak
        except Exception:
            return FLOAT * sequences * tokens * block_elements(self._text_config())

    def _rehearse_head(
        self, rows: int, precision: str, divergence: str | None, base_width: int | None
    ) -> tuple[int, int]:
        """What the head keeps for its backward pass, and the most that it takes on top."""
        head, width = self._head(), base_width or self.width
        with self._mode:
            hidden = torch.empty(rows, self.width, requires_grad=True)
            base, base_weight = torch.empty(rows, width), torch.empty(self.vocabulary, width)
        with self._acting(precision, (hidden, base, base_weight)) as live, chunks_as_on(self._kind):
            if divergence is None:
                value = token_log_odds(hidden, torch.zeros(rows, dtype=torch.int64), head).sum()
            else:
                value = mean_of_rows(DIVERGENCES[divergence].rows, hidden, head, base, Head(weight=base_weight))
            kept = live.now
            value.backward()
            return kept, live.peak - kept

    def _hidden(self, sequences: int, tokens: int) -> Tensor:
        ids = torch.zeros(sequences, tokens, dtype=torch.int64)
        with _never_packed():
            return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def _head(self) -> Head:
        return Head.of(self.model)

    def _text_config(self) -> Any:
        return self.model.config.get_text_config()

    @contextmanager
    def _acting(self, precision: str, known: tuple[Tensor, ...] = ()) -> Iterator[LiveBytes]:
        """Inside, everything is done without data, and counted."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        known = (*known, *self.model.parameters(), *self.model.buffers(), *gradients)
        log = logging.getLogger("torch._subclasses.fake_tensor")  # prints what cannot be rehearsed as an error
        disabled, log.disabled = log.disabled, True
        try:
            with self._mode, precision_of_pass(precision, torch.device("cpu")), LiveBytes(known) as live:
                yield live
        finally:
            log.disabled = disabled


@contextmanager
def _never_packed() -> Iterator[None]:
    """Transformers looks at positions to find packed sequences; without data it would make a mask to be sure."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    before = getattr(masking_utils, name, None)
    setattr(masking_utils, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, before)


def block_elements(config: Any) -> int:
    """Numbers that one Llama block keeps of a token for the backward pass: 6 D + 2 K + 4 I + H.

    - 4 D: input and output of each of the two norms (the norm needs its input, the projections after it its output);
    - 2 D + 2 K: queries, keys and values, K wide, and the attention's output;
    - 4 I: gate, its activation, up, and their product, which the last projection needs (times the experts of a token);
    - H: the logarithm of the attention's normaliser, one for each head.
    """
    width = config.hidden_size
    inner = (getattr(config, "intermediate_size", None) or 4 * width) * (getattr(config, "num_experts_per_tok", 1) or 1)
    heads = config.num_attention_heads
    key_width = width // heads * (getattr(config, "num_key_value_heads", None) or heads)
    return 6 * width + 2 * key_width + 4 * inner + heads
