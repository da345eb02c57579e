"""How much memory a pass takes, learnt by rehearsing it on tensors without data.

PyTorch's ``FakeTensorMode`` carries out every operation on shapes alone. So the model's own code says what the forward
pass keeps for the backward pass, in every precision and for every architecture, and a 7B model is rehearsed in seconds
and a few megabytes. Weights are neither read nor made. The rehearsal uses CPU kernels, whatever the run's device is:
what PyTorch's attention keeps is the same on a GPU. Chunks of logits are as large as there, and products of half
precision need no copies of their factors.

A compiled block keeps what the compiler's partitioner chooses: fewer tensors, as it computes cheap ones again. It is
asked for its choice, without compiling. A compiled chunk of logits makes one matrix on the way to its gradient.

A model whose code looks at values (a mixture of experts that sorts tokens) cannot be rehearsed; its activations are
then taken from the count for a Llama block, see ``block_elements``.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unteach.config import ForgetConfig
from unteach.errors import InputError, first_line
from unteach.method import vocab_head
from unteach.method.divergences import DIVERGENCES
from unteach.method.losses import LOSSES
from unteach.method.vocab_head import Head, chunks_as_on, mean_of_rows, token_log_odds
from unteach.models import precision as precision_module
from unteach.models import quantised
from unteach.models.adapters import (
    RANK,
    adapted_layers,
    adapter_parameters,
    add_adapters,
    is_adapter,
    keep_base_in,
    read_adapter,
)
from unteach.models.load import (
    Trainable,
    context_length,
    decoder_layers,
    half_of,
    quiet_loading,
    trainable_parameters,
    whole_folder,
)
from unteach.models.precision import HALF, half_weights, precision_of_pass, rounded_layers
from unteach.models.quantised import FrozenLinear
from unteach.planning.compiled import BlockCall, kept_compiled, watching
from unteach.training.passes import block_calls

PROBE_TOKENS, QUESTION_TOKENS, SCORED_TOKENS, SCORED_TOGETHER = 192, 1024, 1024, 64
"""Longest prompt with its continuation, question with its examples, text that is scored; how many of those at once."""
FLOAT = 4
"""Bytes of a float32."""


class LiveBytes(TorchDispatchMode):
    """Adds up the tensors that are made inside the block and still alive, besides those that are ``known`` before.

    ``now`` are the bytes alive, ``peak`` the most that were alive at once.
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
                storage = leaf.untyped_storage()
                if storage._cdata not in self._counted:
                    self._counted.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


class Calls(NamedTuple):
    """How a pass calls the blocks, see ``training.passes.computing``."""

    checkpointed: bool = False
    compiled: bool = False
    once: bool = True


EAGER = Calls()


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
        folder: The model's.
        trainable: Which weights will be trained, see ``trainable_parameters``; None: none.
        option: What the error messages call the model.
        kind: Of the device that the run will be on.
        adapted: Rank of adapters, and bits under them, where these are trained (both may be None, as in a config).
        sharded: Whether several ranks divide the weights, which autocast then rounds, and inputs for each layer.

    Attributes:
        model: The model, its tensors without data.
        parameters: How many numbers its weights are, tied ones once, and its adapters; ``trainable`` are trained.
        changed: How many of its own numbers will be others in the end.
        kept: Bytes of weights under adapters that are kept in few bits.
        floats: How many numbers are kept in float32.
        largest: How many the largest trained weight has.
        rounded: How many of the trained weights a pass in half precision rounds once for all micro-batches.
        vocabulary, width: V and D, the shape of the vocabulary head.
        context: How many tokens it reads at most.
        head_is_trained: Whether the vocabulary head is among the trained weights.
        gathered: Numbers that a rank holds of sharded weights while it computes: the weights of two blocks (one
            computes while the next arrives) and their gradients (one is computed while the last is sent), the weights
            outside the blocks, and their gradients where they are trained.
    """

    def __init__(
        self, folder: Path, trainable: Trainable | None, option: str = "model", kind: str = "cpu",
        adapted: tuple[int | None, int | None] | None = None, sharded: bool = False,
    ) -> None:  # fmt: skip
        from transformers import AutoConfig, AutoModelForCausalLM

        self._mode, self._kind, self._sharded = FakeTensorMode(), kind, sharded
        try:
            with quiet_loading():
                config = AutoConfig.from_pretrained(whole_folder(folder, option), trust_remote_code=False)
            with quiet_loading(), self._mode:
                self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
                own = sum(parameter.numel() for parameter in self.model.parameters())
                if adapted is not None:
                    self._adapt(folder, *adapted)
        except MemoryError:
            raise
        except Exception as error:  # whatever broken files make Transformers raise
            raise InputError(f"{option} is '{folder}': no model can be made from it: {first_line(error)}") from error
        chosen = {}
        if trainable:
            chosen = adapter_parameters(self.model) if adapted else trainable_parameters(self.model, trainable)
        with self._mode:
            for parameter in self.model.parameters():
                parameter.requires_grad_(bool(trainable) and parameter.requires_grad)
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        sizes = {parameter: parameter.numel() for parameter in self.model.parameters()}
        frozen = [module for module in self.model.modules() if isinstance(module, FrozenLinear)]
        self.kept = sum(buffer.nbytes for module in frozen for buffer in module.buffers())
        self.floats = sum(sizes.values())
        self.trainable = self.changed = sum(sizes[parameter] for parameter in chosen.values())
        self.parameters = own + (self.trainable if adapted else 0)
        if adapted:
            layers = adapted_layers(self.model).values()
            self.changed = sum(len(layer.b) * layer.a.shape[1] for layer in layers)
        self.largest = max((sizes[parameter] for parameter in chosen.values()), default=0)
        linear = {layer.weight for layer in rounded_layers(self.model)}
        self.rounded = sum(sizes[parameter] for parameter in chosen.values() if parameter in linear)
        self._head, blocks = Head.of(self.model), decoder_layers(self.model)
        self.vocabulary, self.width = self._head.weight.shape
        self.head_is_trained = self._head.weight.requires_grad
        outside = sizes.keys() - set(blocks.parameters())
        self.gathered = 4 * sum(parameter.numel() for parameter in blocks[0].parameters())
        self.gathered += sum(sizes[parameter] * (2 if parameter.requires_grad else 1) for parameter in outside)
        self._config, self.context = self.model.config.get_text_config(), context_length(self.model)
        self._blocks, self._head_bytes = functools.cache(self._rehearse_blocks), functools.cache(self._rehearse_head)

    def _adapt(self, folder: Path, rank: int | None, bits: int | None) -> None:
        """Add adapters as a run does."""
        if is_adapter(folder):
            read_adapter(folder).add_to(self.model, empty=True)
        else:
            add_adapters(self.model, decoder_layers(self.model), rank or RANK)
        keep_base_in(self.model, bits, half_of(folder))

    def student_pass(
        self, texts: int, tokens: int, precision: str, term: str = "", width: int = 0, calls: Calls = EAGER
    ) -> PassMemory:
        """A forward and backward pass over so many texts (a micro-batch) of so many tokens.

        ``term`` is a divergence from the teacher, or a loss of rows of logits, perhaps beside those of another model
        whose hidden states have that ``width``; another loss is on the log-odds of the labels.
        """
        kept, head = self._head_bytes(texts * (tokens - 1), precision, term, width, calls.compiled)
        activations, working = _scaled(self._blocks, texts, tokens, precision, calls)
        return PassMemory(activations + kept, head, working)

    def reading(self, texts: int, tokens: int, precision: str) -> int:
        """The most bytes that a forward pass without gradients takes, up to the last hidden states."""
        return _scaled(self._blocks, texts, tokens, precision, None)[1]

    def reading_change(self, texts: int, tokens: int, precision: str) -> int:
        """The same of a pass that carries a derivative (``models.tangents``), whose attention holds all scores."""
        scores = FLOAT * texts * self._config.num_attention_heads * tokens**2
        return 2 * self.reading(texts, tokens, precision) + 7 * scores

    def evaluation(self, config: ForgetConfig, device: torch.device, *, one_by_one: bool = False) -> int:
        """Bytes of decoding (the cache twice, while its pieces are put together) or of scoring texts: the most."""
        from unteach.evaluation import generation, inference

        kind, limit = "cpu", inference._HOST_MEMORY
        if device.type == "cuda":
            kind, limit = "cuda", int(inference._MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
        model, heads = self._config, self._config.num_attention_heads
        rows = 1 if one_by_one else min(inference.BATCH_SIZE, 2 * config.probes)
        length = min(self.context, QUESTION_TOKENS if config.questions else PROBE_TOKENS)
        key_heads = getattr(model, "num_key_value_heads", None) or heads
        head_width = getattr(model, "head_dim", None) or model.hidden_size // heads
        cache = 2 * FLOAT * model.num_hidden_layers * key_heads * head_width * rows * length
        together = max(1, min(rows, generation._PIECE_TOKENS[kind] // length))
        decoding = 2 * min(limit, cache) + self.reading(together, length, "fp32")

        positions = max(1, min(inference._POSITIONS[kind], inference._LOGITS[kind] // self.vocabulary))
        length = min(self.context, SCORED_TOKENS, positions)
        rows = 1 if one_by_one else max(1, min(SCORED_TOGETHER, 2 * config.probes, positions // length))
        logits = FLOAT * self.vocabulary * length * (rows + 1)
        return max(decoding, logits + self.reading(rows, length, "fp32"))

    def _rehearse_blocks(self, texts: int, tokens: int, precision: str, calls: Calls | None) -> tuple[int, int]:
        """Activations and working memory of the blocks; ``calls`` None: of a pass without gradients."""
        *_, last = blocks = decoder_layers(self.model)
        again, once = (calls.checkpointed, calls.once) if calls else (False, True)
        watched, call = calls is not None and calls.compiled and not again, BlockCall()
        called = block_calls(self.model, compiled=False, checkpointed=again)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(calls is not None))
                live = stack.enter_context(self._acting(precision))
                stack.enter_context(self._rounding(precision, once))
                stack.enter_context(called)
                if watched:
                    stack.enter_context(watching(last, call, lambda: live.now))
                hidden = self._hidden(texts, tokens)
                if calls is None:
                    return 0, live.peak
                hidden = hidden[:, :-1].flatten(0, 1)
                activations, live.peak = live.now, live.now
                hidden.backward(torch.empty_like(hidden), inputs=[p for p in last.parameters() if p.requires_grad])
                working = live.peak - activations
        except Exception:  # whatever a model's code does with values that are not there
            block = FLOAT * texts * tokens * block_elements(self._config)
            kept = {None: 0, False: block, True: FLOAT * texts * tokens * self.width}[again if calls else None]
            return self._config.num_hidden_layers * kept, block
        if watched:
            with suppress(Exception), self._computing(precision, "cuda"), self._rounding(precision, once):
                activations -= (len(blocks) - 1) * (call.kept - kept_compiled(last, call))
        return activations, working

    def _rehearse_head(self, tokens: int, precision: str, term: str, width: int, compiled: bool) -> tuple[int, int]:
        """What the head keeps for its backward pass, and the most that it takes on top."""
        rows, beside = None, width
        if term in DIVERGENCES:
            rows, beside = DIVERGENCES[term].rows, self.width
        elif term in LOSSES:
            rows = LOSSES[term].rows
        with self._mode:
            hidden = torch.empty(tokens, self.width, requires_grad=True)
            base, weight = torch.empty(tokens, beside), torch.empty(self.vocabulary, beside)
        shared = term in DIVERGENCES and not self.head_is_trained
        others = (base, self._head if shared else Head(weight=weight)) if beside else (None, None)
        with self._acting(precision, (hidden, base, weight)) as live, chunks_as_on(self._kind), ExitStack() as stack:
            labels = torch.zeros(tokens, dtype=torch.int64)
            if compiled and not getattr(rows, "_torchdynamo_disable", False):
                one = functools.partial(_in_one_kernel, live)
                stack.enter_context(patch.object(vocab_head, "_run", one))
            if rows is not None:
                value = mean_of_rows(rows, hidden, self._head, others[0], others[1], labels if term in LOSSES else None)
            else:
                value = token_log_odds(hidden, labels, self._head).sum()
            kept = live.now
            value.backward()
            return kept, live.peak - kept

    def _hidden(self, texts: int, tokens: int) -> Tensor:
        """Without the search for packed sequences: without data, Transformers would make a mask to be sure."""
        ids, search = torch.zeros(texts, tokens, dtype=torch.int64), "find_packed_sequence_indices"
        with patch(f"transformers.masking_utils.{search}", lambda *args, **kwargs: None, create=True):
            return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    @contextmanager
    def _acting(self, precision: str, known: Iterable[Tensor] = ()) -> Iterator[LiveBytes]:
        """Inside, everything is done without data, and counted."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        known = (*known, *self.model.parameters(), *self.model.buffers(), *gradients)
        with self._computing(precision, self._kind), LiveBytes(known) as live:
            yield live

    @contextmanager
    def _computing(self, precision: str, kind: str) -> Iterator[None]:
        """Inside, everything is done without data, in a precision, with products as on a device of this kind."""
        log = logging.getLogger("torch._subclasses.fake_tensor")  # prints what cannot be rehearsed as an error
        with ExitStack() as stack:
            if kind == "cuda":
                for module in (vocab_head, precision_module, quantised):
                    stack.enter_context(patch.object(module, "product_in_float32", _product_on_gpu))
                stack.enter_context(patch.object(precision_module, "_product", torch.mm))
            stack.enter_context(patch.object(log, "disabled", True))
            stack.enter_context(self._mode)
            stack.enter_context(precision_of_pass(precision, torch.device("cpu")))
            yield

    def _rounding(self, precision: str, once: bool) -> AbstractContextManager[None]:
        """Inside, linear layers have rounded weights, as in a pass."""
        rounds = precision in HALF and not self._sharded
        return half_weights(self.model, HALF[precision], once=once) if rounds else nullcontext()


def _product_on_gpu(a: Tensor, b: Tensor) -> Tensor:
    """``product_in_float32`` without copies of its factors."""
    return torch.mm(a, b).float() if a.dtype in HALF.values() else torch.mm(a, b)


def _in_one_kernel(live: LiveBytes, function: Callable[..., Any], logits: Tensor, *others: Any) -> Any:
    """What a chunk function gives, counted as if it made one more matrix of the logits' size and no other."""
    before = live.peak
    result = function(logits, *others)
    live.peak = max(before, live.now + logits.nbytes)
    return result


def _scaled(rehearsed: Callable[..., tuple[int, ...]], texts: int, tokens: int, precision: str, *how: Any) -> list[int]:
    """What many texts take, from one; in half precision, copies of the weights do not grow with them."""
    one = each = rehearsed(1, tokens, precision, *how)
    if precision in ("fp16", "bf16"):
        each = tuple(two - first for two, first in zip(rehearsed(2, tokens, precision, *how), one, strict=True))
    return [first + (texts - 1) * more for first, more in zip(one, each, strict=True)]


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
