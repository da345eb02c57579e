"""Model folders: find them, say what is wrong with them, load them, and name the parts of a model."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from unteach.errors import InputError, first_line
from unteach.method.vocab_head import Head
from unteach.models import adapters, conversions

Trainable = Literal["blocks", "all"]
UNLIMITED = 2**20
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json",
)  # fmt: skip
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_SIZES = {
    ("num_hidden_layers", "n_layer", "num_layers"): 512,
    ("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"): 100_000,
    ("hidden_size", "n_embd", "intermediate_size", "n_inner", "vocab_size"): 2**22,
    ("max_position_embeddings", "n_positions"): 2**40,
}
"""Names of sizes in a configuration, and more than any model has of them."""
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
MERGED = "_merged_weights"
"""Attribute of a model that names the weights an adapter's folder has changed."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")


class StoredTensor(NamedTuple):
    """A tensor in a weights file, known from the file's header alone; the type as in F32, BF16."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def find_folder(name: str, option: str = "model") -> Path:
    """The folder that holds a model, which error messages call `option`.

    The name is a folder, `micro:NAME` for an embedded model, or a Hugging Face id as `owner/name[@revision]`, of which
    configuration, tokenizer and safetensors weights are downloaded once.
    """
    shown = f"{option} is {name!r}"
    if not name:
        raise InputError(f"{option} is missing: name a model folder, a Hugging Face id, or micro:target")
    if name.startswith("micro:"):
        from unteach.corpora import micro

        try:
            folder = micro.model_folder(name.removeprefix("micro:"))
        except ValueError as error:
            raise InputError(f"{shown}: {first_line(error)}") from error
        if not folder.is_dir():
            raise InputError(f"{shown}: this installation has no embedded models, install it again")
        return folder
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, no such home
        wrong = getattr(error, "strerror", None) or error
        raise InputError(f"{shown}: {wrong}: name a model folder, a Hugging Face id, or micro:target") from None
    if path.suffix.lower() == ".gguf" and path.is_file():
        raise InputError(f"{shown}: {conversions.gguf(path)}")
    if path.exists():
        raise InputError(f"{shown}: a file, must be a folder with config.json and {WEIGHTS}")
    if (path.parent != Path() and path.parent.is_dir()) or not _HUB_NAME.fullmatch(name):
        raise InputError(f"{shown}: there is no such folder")
    try:
        return _download(name)
    except Exception as error:  # the hub's own exceptions and those of the network below it
        wrong = f"there is no such folder here, and it cannot be had from the Hugging Face hub: {first_line(error)}"
        raise InputError(f"{shown}: {wrong}") from error


@functools.cache
def _download(name: str) -> Path:
    """The local copy of a hub model; the same one, whatever is published meanwhile, as long as the program runs."""
    from huggingface_hub import snapshot_download

    identifier, _, revision = name.partition("@")
    weights = [INDEX, "model*.safetensors", adapters.WEIGHTS]
    wanted = [*weights, *(f"*{ending}" for ending in COPIED), "LICEN*", "NOTICE*", "USE_POLICY*"]
    return Path(snapshot_download(identifier, revision=revision or None, allow_patterns=wanted, ignore_patterns="*/*"))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's vocabulary."""
    return any((folder / name).is_file() for name in VOCABULARY_FILES) or any(folder.glob("*.tiktoken"))


def check_folder(folder: Path, option: str = "model") -> list[str]:
    """What keeps a folder from being loaded, one line each; an empty list if nothing."""
    problems = []
    names = {entry.name for entry in folder.iterdir()}
    weights = WEIGHTS in names or INDEX in names
    packed = sorted(name for name in names if name.lower().endswith(".gguf"))
    if adapters.is_adapter(folder):
        try:
            adapters.read_adapter(folder)
            base = whole_folder(folder, option)
            again = ["its base is an adapter, too: merge that first"] if adapters.is_adapter(base) else []
            return [f"{option} is '{folder}': {problem}" for problem in again] or check_folder(base, f"{option}'s base")
        except ValueError as error:
            wrong = error.problems if isinstance(error, InputError) else [_unusable(folder, error)]
            return [f"{option} is '{folder}': {problem}" for problem in wrong]
    if packed and not weights:  # nothing else matters then
        return [f"{option} is '{folder}': {conversions.gguf(folder / packed[0])}"]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "quantization_config" in config:
            how = config["quantization_config"].get("quant_method", "method not named")
            problems.append(conversions.quantised(folder, how))
        problems += _impossible(config)
    except FileNotFoundError:
        problems.append("config.json is missing")
    except RecursionError:
        problems.append("config.json is nested too deeply")
    except (ValueError, TypeError, AttributeError, OSError) as error:
        problems.append(f"config.json is not readable JSON: {first_line(error)}")
    if not has_tokenizer(folder):
        problems.append("it has no tokenizer (tokenizer.json or tokenizer.model): copy the one it was trained with")
    if weights:
        try:
            problems += filter(None, (_wrong_with(folder / file) for file in weight_files(folder)))
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
            problems.append(f"{INDEX} is not readable: {first_line(error)}")
    elif pickled := sorted(name for name in names if Path(name).suffix in _PICKLED and name != "training_args.bin"):
        problems.append(
            f"its weights are pickled ({pickled[0]}), which can run code and is not read; if you trust them, convert"
            ' with: python -c "from transformers import AutoModelForCausalLM as M;'
            f" M.from_pretrained('{folder}', use_safetensors=False).save_pretrained('{folder}')\""
        )
    else:
        problems.append(f"it has no weights: must hold {WEIGHTS}, or {INDEX} and the files it names")
    return [f"{option} is '{folder}': {problem}" for problem in problems]


def _impossible(config: Any) -> list[str]:
    """What no model can have, of the sizes that a configuration names, also for the text part of one."""
    problems = []
    for part in (config, config.get("text_config") or {}):
        for names, largest in _SIZES.items():
            for name in names:
                value = part.get(name, 1)
                whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= largest
                if value is not None and not whole:
                    must = f"it must be a whole number from 1 to {largest:,}"
                    problems.append(f"{name} of config.json is {str(value)[:40]!r}: {must}")
    return problems


def _unusable(folder: Path, error: ValueError) -> str:
    """What to do with an adapter's folder that cannot be used, and why."""
    return conversions.adapter(folder, str(error), str(folder) if has_tokenizer(folder) else "BASE")


def _wrong_with(file: Path) -> str:
    """What is wrong with a weights file; empty if nothing."""
    if not file.is_file():
        return f"{file.name} is missing, {INDEX} names it"
    try:
        with safe_open(file, "pt"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"{file.name} is not a whole safetensors file: {first_line(error)}"


def weight_files(folder: Path) -> list[str]:
    """Names of the weights files, as Transformers chooses them: the single file before the shards."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    if not files or not all(isinstance(name, str) for name in files):
        raise ValueError("its weight_map names no files")
    for name in files:
        if not name.endswith(".safetensors") or name != re.split(r"[/\\]", name)[-1]:
            raise ValueError(f"it names {name!r}, which is no safetensors file of this folder")
    return sorted(files)


def whole_folder(folder: Path, option: str = "model") -> Path:
    """The folder itself or, of an adapter, that of the model that it changes; for errors as in `find_folder`."""
    if not adapters.is_adapter(folder):
        return folder
    stored = adapters.read_adapter(folder)
    for near in (Path(stored.base).expanduser(), folder / stored.base):
        if near.is_dir():
            return near
    revision = stored.config.get("revision")
    return find_folder(f"{stored.base}@{revision}" if revision else stored.base, f"{option}'s base")


def weight_paths(folder: Path) -> dict[str, Path]:
    """All files that a model's weights are in, by name; of an adapter, its base's too, as `base/NAME`."""
    if not adapters.is_adapter(folder):
        return {file: folder / file for file in weight_files(folder)}
    base = {f"base/{file}": path for file, path in weight_paths(whole_folder(folder)).items()}
    return {adapters.WEIGHTS: folder / adapters.WEIGHTS} | base


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a sound model folder by name, read from the headers of its weights files."""
    found = {}
    for file in weight_files(folder):
        with safe_open(folder / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                part = tensors.get_slice(name)
                found[name] = StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
    return found


def half_of(folder: Path) -> torch.dtype | None:
    """The half precision that most of a model's weights are stored in; None: they are in another type."""
    sizes = {"BF16": 0, "F16": 0, "other": 0}
    for tensor in stored_tensors(whole_folder(folder)).values():
        sizes[tensor.dtype if tensor.dtype in sizes else "other"] += math.prod(tensor.shape)
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(max(sizes, key=lambda kind: sizes[kind]))


def load_model(
    name: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", option: str = "model",
    merged: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Load a model, in evaluation mode (no dropout), and its tokenizer. Only safetensors are read, no code is run.

    The name and `option` are as for `find_folder`; all parameters are of type `dtype`, whatever the files have. Where
    it is an adapter's folder, the base is loaded and the adapter `merged` into it, or put beside it. An `InputError`
    names every problem found.
    """
    from transformers import AutoModelForCausalLM

    folder, shown = find_folder(name, option), f"{option} is {name!r}"
    if problems := check_folder(folder, option):
        raise InputError(problems)
    tokenizer = load_tokenizer(name, option=option)
    try:
        with quiet_loading():
            how = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
            model, found = AutoModelForCausalLM.from_pretrained(whole_folder(folder, option), **how)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever broken files make Transformers raise
        raise InputError(f"{shown}: it cannot be loaded: {first_line(error)}") from error
    if missing := sorted(found["missing_keys"]):
        raise InputError(
            f"{shown}: its weights lack {len(missing)} tensors of a {type(model).__name__}, among them {missing[0]}: it"
            " must be a complete causal language model"
        )
    _check_values(model, shown)
    if adapters.is_adapter(folder):
        try:
            adapters.read_adapter(folder).add_to(model)
        except ValueError as error:
            raise InputError(f"{shown}: {_unusable(folder, error)}") from None
        model.__dict__[MERGED] = adapters.merge(model) if merged else []
    _check_tokenizer(model, tokenizer, shown)
    model.to(device).eval()
    _check_head(model, shown)
    return model, tokenizer


def load_tokenizer(name: str, *, option: str = "model") -> Any:
    """Load a model's tokenizer alone; arguments as for `find_folder`."""
    from transformers import AutoTokenizer

    folder, shown = find_folder(name, option), f"{option} is {name!r}"
    folder = folder if has_tokenizer(folder) else whole_folder(folder, option)
    if not has_tokenizer(folder):
        raise InputError(f"{shown}: it has no tokenizer (tokenizer.json or tokenizer.model)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        usable = bool(tokenizer("a b", add_special_tokens=False)["input_ids"])
    except Exception as error:  # whatever a broken file makes the tokenizer libraries raise
        raise InputError(f"{shown}: its tokenizer cannot be loaded: {first_line(error)}") from error
    if not usable:
        raise InputError(f"{shown}: its tokenizer has no vocabulary: copy the one it was trained with")
    return tokenizer


def _check_values(model: Any, shown: str) -> None:
    """Refuse weights that are not finite, or all zero."""
    for name, value in model.named_parameters():
        if not bool(torch.isfinite(value.detach().sum(dtype=torch.float64 if value.numel() < 2**20 else None))):
            raise InputError(f"{shown}: {name} has values that are not finite: the model is broken, get it again")
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = getattr(part, "weight", None)
        if weight is not None and weight.numel() and not bool(weight.detach().any()):
            raise InputError(f"{shown}: all weights of its embeddings or head are zero: it is broken, get it again")


def _check_tokenizer(model: Any, tokenizer: Any, shown: str) -> None:
    """Refuse a tokenizer that cannot be the model's own."""
    rows, vocabulary = model.get_input_embeddings().weight.shape[0], tokenizer.get_vocab()
    largest, wrong = max(vocabulary.values()), ""
    ends: set[int] = set()
    for settings in (model.config.get_text_config(), model.generation_config):
        end = getattr(settings, "eos_token_id", None)
        ends.update(end if isinstance(end, list | tuple) else [] if end is None else [end])
    if largest >= rows:
        wrong = f"it has token ids up to {largest}, the model only {rows}"
    elif 2 * len(vocabulary) < rows and ends and tokenizer.eos_token_id not in ends:
        wrong = (
            f"it has {len(vocabulary)} tokens for {rows} of the model, and ends texts with id {tokenizer.eos_token_id}"
            f" where the model knows {sorted(ends)}"
        )
    if wrong:
        raise InputError(f"{shown}: its tokenizer does not match: {wrong}: copy the one it was trained with")


def _check_head(model: Any, shown: str) -> None:
    """Refuse a model whose logits are not what `Head` computes from the backbone's last hidden states."""
    backbone, linear = backbone_and_head(model)
    ids = torch.arange(4, device=linear.weight.device).unsqueeze(0) % linear.weight.shape[0]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
        expected = Head.of(model).logits(backbone(input_ids=ids).last_hidden_state[0])
    if float((logits - expected).abs().max()) > 1e-3 * float(logits.abs().max()):
        how = "changes the logits after its head in another way than by a constant scale and a soft cap"
        raise InputError(f"{shown}: {type(model).__name__} {how}, which is not supported")


@contextmanager
def quiet_loading() -> Iterator[None]:
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
    """The list of decoder blocks of a Hugging Face causal language model."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder blocks: use trainable 'all'")


def backbone_and_head(model: Any) -> tuple[nn.Module, nn.Linear]:
    """The part that gives hidden states, and the linear map from those to logits.

    `Head.of(model).logits(hidden)` are the model's logits, with the scale or soft cap that some families have.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no linear head on top of a backbone, which is needed")
    return model.base_model, head


def context_length(model: Any) -> int:
    """How many tokens a model (or one with this configuration) can read; `UNLIMITED` where it names no limit."""
    config = getattr(model, "config", model).get_text_config()
    limits = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), UNLIMITED)


def read_context_length(name: str) -> int:
    """The same for a model by its name or folder; no weights are loaded."""
    from transformers import AutoConfig

    return context_length(AutoConfig.from_pretrained(whole_folder(find_folder(name)), trust_remote_code=False))


def trainable_parameters(model: Any, trainable: Trainable) -> dict[str, nn.Parameter]:
    """Choose the parameters to train, by name, a tied one once, and freeze all others.

    `blocks`: the weights and biases of the decoder blocks but those of norms, so that embeddings and head stay, too.
    """
    if trainable not in get_args(Trainable):
        raise ValueError(f"trainable is {trainable!r}, must be one of {', '.join(get_args(Trainable))}")
    modules = (model if trainable == "all" else decoder_layers(model)).modules()
    parts = [m for m in modules if trainable == "all" or "norm" not in type(m).__name__.lower()]
    chosen = {id(parameter) for module in parts for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in chosen}
