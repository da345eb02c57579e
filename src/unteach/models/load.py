"""Load a causal language model, choose which weights are trained, and name its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from torch import nn

from unteach.errors import InputError, first_line
from unteach.method.vocab_head import Head
from unteach.models.folder import check_folder, find_folder, has_tokenizer, stored_tensors
from unteach.models.save import Rounding, rounding_loss, save_model

__all__ = [
    "Rounding",
    "backbone_and_head",
    "context_length",
    "decoder_layers",
    "find_folder",
    "load_model",
    "load_tokenizer",
    "read_context_length",
    "rounding_loss",
    "save_model",
    "stored_tensors",
    "trainable_parameters",
]

Trainable = Literal["blocks", "all"]
UNLIMITED = 2**20
"""The context length of a model whose configuration names none."""
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


def load_model(
    name: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", option: str = "model"
) -> tuple[Any, Any]:
    """Load a model, in evaluation mode (no dropout), and its tokenizer. Only safetensors are read, no code is run.

    Args:
        name: A folder, `micro:NAME` for an embedded model, or a Hugging Face id as `owner/name[@revision]`.
        dtype: The type of all parameters, whatever the files have.
        device: Where they are put.
        option: What the error messages call the model.

    Returns:
        The model and the tokenizer.

    Raises:
        InputError: If it cannot be used, with every problem found.
    """
    from transformers import AutoModelForCausalLM

    folder = find_folder(name, option)
    problems = check_folder(folder, option)
    if problems:
        raise InputError(problems)
    tokenizer = load_tokenizer(name, option=option)
    try:
        with _quiet_loading():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
    except torch.OutOfMemoryError:
        raise
    except (ImportError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise InputError(f"{option} is {name!r}: it cannot be loaded: {first_line(error)}") from error
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise InputError(
            f"{option} is {name!r}: its weights lack {len(missing)} tensors of a {type(model).__name__}, among them"
            f" {missing[0]}: it must be a complete causal language model"
        )
    problems = _tokenizer_problems(model, tokenizer)
    if problems:
        raise InputError(f"{option} is {name!r}: {problem}" for problem in problems)
    model.to(device).eval()
    _check_head(model, f"{option} is {name!r}")
    return model, tokenizer


def load_tokenizer(name: str, *, option: str = "model") -> Any:
    """Load a model's tokenizer alone; arguments as for `load_model`."""
    from transformers import AutoTokenizer

    folder = find_folder(name, option)
    if not has_tokenizer(folder):
        raise InputError(f"{option} is {name!r}: it has no tokenizer (tokenizer.json or tokenizer.model)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        usable = bool(tokenizer("a b", add_special_tokens=False)["input_ids"])
    except Exception as error:  # whatever a broken file makes the tokenizer libraries raise
        raise InputError(f"{option} is {name!r}: its tokenizer cannot be loaded: {first_line(error)}") from error
    if not usable:
        raise InputError(f"{option} is {name!r}: its tokenizer has no vocabulary: copy the one it was trained with")
    return tokenizer


def _tokenizer_problems(model: Any, tokenizer: Any) -> list[str]:
    """Why the tokenizer cannot be the model's own; an empty list where nothing speaks against it."""
    rows = model.get_input_embeddings().weight.shape[0]
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values())
    advice = "copy the one it was trained with"
    if largest >= rows:
        return [f"its tokenizer does not match: it has token ids up to {largest}, the model only {rows}: {advice}"]
    ends: set[int] = set()
    for settings in (model.config.get_text_config(), model.generation_config):
        end = getattr(settings, "eos_token_id", None)
        ends.update(end if isinstance(end, list | tuple) else [] if end is None else [end])
    if 2 * len(vocabulary) < rows and ends and tokenizer.eos_token_id not in ends:
        return [
            f"its tokenizer does not match: it has {len(vocabulary)} tokens for {rows} of the model, and ends texts"
            f" with id {tokenizer.eos_token_id} where the model knows {sorted(ends)}: {advice}"
        ]
    return []


def _check_head(model: Any, shown: str) -> None:
    """Refuse a model whose logits are not what `Head` computes from the backbone's last hidden states."""
    backbone, linear = backbone_and_head(model)
    ids = torch.arange(4, device=linear.weight.device).unsqueeze(0) % linear.weight.shape[0]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
        expected = Head.of(model).logits(backbone(input_ids=ids).last_hidden_state[0])
    if float((logits - expected).abs().max()) > 1e-3 * float(logits.abs().max()):
        raise InputError(
            f"{shown}: {type(model).__name__} changes the logits after its head in another way than by a constant scale"
            " and a soft cap, which is not supported"
        )


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bar and no table of loaded weights inside the block."""
    from transformers.utils import logging

    bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of decoder blocks.

    Args:
        model: A Hugging Face causal language model.

    Raises:
        ValueError: If it has no such list.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    for module in lists:
        if len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder blocks: use trainable 'all'")


def backbone_and_head(model: Any) -> tuple[nn.Module, nn.Linear]:
    """The part that gives hidden states, and the linear map from those to logits.

    `Head.of(model).logits(hidden)` are the model's logits, with the scale or soft cap that some families have.

    Args:
        model: A Hugging Face causal language model.

    Raises:
        ValueError: If its head is not one linear map.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no linear head on top of a backbone, which is needed")
    return model.base_model, head


def context_length(model: Any) -> int:
    """How many tokens the model can read; `UNLIMITED` where its configuration names no limit."""
    return _limit(model.config)


def read_context_length(name: str) -> int:
    """The same for a model by its name or folder; no weights are loaded."""
    from transformers import AutoConfig

    return _limit(AutoConfig.from_pretrained(find_folder(name), trust_remote_code=False))


def _limit(config: Any) -> int:
    text_config = config.get_text_config()
    for name in _CONTEXT_NAMES:
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return UNLIMITED


def trainable_parameters(model: Any, trainable: Trainable) -> dict[str, nn.Parameter]:
    """Choose the parameters to train, and freeze all others.

    Args:
        model: A Hugging Face causal language model; `requires_grad` of every parameter is set.
        trainable: `blocks`: the weights and biases of the decoder blocks except those of norms, so that embeddings,
            head and norms stay as they are; `all`: every parameter.

    Returns:
        The trainable parameters by name, a tied one once.
    """
    if trainable not in get_args(Trainable):
        raise ValueError(f"trainable is {trainable!r}, must be one of {', '.join(get_args(Trainable))}")
    chosen: set[int] = set()
    if trainable == "blocks":
        for module in decoder_layers(model).modules():
            if "norm" not in type(module).__name__.lower():
                chosen.update(id(parameter) for parameter in module.parameters(recurse=False))
    else:
        chosen.update(id(parameter) for parameter in model.parameters())
    found = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) in chosen)
        if id(parameter) in chosen:
            found[name] = parameter
    return found
