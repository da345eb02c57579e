"""Model folders on disk: find them, say what is wrong with them, read what is stored."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from unteach.errors import InputError, first_line

__all__ = [
    "StoredTensor",
    "check_folder",
    "find_folder",
    "has_tokenizer",
    "stored_tensors",
    "weight_files",
]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a weights file, known from the file's header alone."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: F32, BF16, ..."""


def find_folder(name: str, option: str = "model") -> Path:
    """The folder that holds a model.

    Args:
        name: A folder, `micro:NAME` for an embedded model, or a Hugging Face id as `owner/name[@revision]`, of which
            configuration, tokenizer and safetensors weights are downloaded once.
        option: What the error messages call it.

    Raises:
        InputError: If there is none.
    """
    if name.startswith("micro:"):
        from unteach.corpora import micro

        try:
            folder = micro.model_folder(name.removeprefix("micro:"))
        except ValueError as error:
            raise InputError(f"{option} is {name!r}: {first_line(error)}") from error
        if not folder.is_dir():
            raise InputError(f"{option} is {name!r}: this installation has no embedded models, install it again")
        return folder
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{option} is {name!r}: a file, must be a folder with config.json and {WEIGHTS}")
    in_folder_here = path.parent != Path() and path.parent.is_dir()
    if in_folder_here or not _HUB_NAME.fullmatch(name):
        raise InputError(f"{option} is {name!r}: there is no such folder")
    try:
        return _download(name)
    except Exception as error:  # the hub's own exceptions and those of the network below it
        raise InputError(
            f"{option} is {name!r}: there is no such folder here, and it cannot be had from the Hugging Face hub:"
            f" {first_line(error)}"
        ) from error


@functools.cache
def _download(name: str) -> Path:
    """The local copy of a hub model; the same one, whatever is published meanwhile, as long as the program runs."""
    from huggingface_hub import snapshot_download

    identifier, _, revision = name.partition("@")
    wanted = [INDEX, "model*.safetensors", *(f"*{ending}" for ending in COPIED), "LICEN*", "NOTICE*", "USE_POLICY*"]
    return Path(
        snapshot_download(identifier, revision=revision or None, allow_patterns=wanted, ignore_patterns=["*/*"])
    )


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's vocabulary."""
    return any((folder / name).is_file() for name in VOCABULARY_FILES) or any(folder.glob("*.tiktoken"))


def check_folder(folder: Path, option: str = "model") -> list[str]:
    """What keeps a folder from being loaded, one line each; an empty list if nothing.

    Args:
        folder: The model's folder.
        option: What the messages call it.
    """
    problems = []
    names = {entry.name for entry in folder.iterdir()}
    if "config.json" not in names:
        problems.append("config.json is missing")
    else:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if "quantization_config" in config:
                problems.append("its weights are quantised, and cannot be trained: give the model it was made from")
        except (ValueError, TypeError) as error:
            problems.append(f"config.json is not readable JSON: {first_line(error)}")
    if not has_tokenizer(folder):
        problems.append("it has no tokenizer (tokenizer.json or tokenizer.model): copy the one it was trained with")
    if WEIGHTS in names or INDEX in names:
        problems += _weight_problems(folder)
    elif "adapter_config.json" in names:
        problems.append("it holds an adapter, not a model: merge it into its base model first (merge_and_unload)")
    elif pickled := sorted(name for name in names if Path(name).suffix in _PICKLED and name != "training_args.bin"):
        problems.append(
            f"its weights are pickled ({pickled[0]}), which can run code and is not read; if you trust them, convert"
            ' with: python -c "from transformers import AutoModelForCausalLM as M;'
            f" M.from_pretrained('{folder}', use_safetensors=False).save_pretrained('{folder}')\""
        )
    else:
        problems.append(f"it has no weights: must hold {WEIGHTS}, or {INDEX} and the files it names")
    return [f"{option} is '{folder}': {problem}" for problem in problems]


def _weight_problems(folder: Path) -> list[str]:
    try:
        files = weight_files(folder)
    except (ValueError, KeyError, TypeError) as error:
        return [f"{INDEX} is not readable: {first_line(error)}"]
    problems = []
    for file in files:
        if not (folder / file).is_file():
            problems.append(f"{file} is missing, {INDEX} names it")
            continue
        try:
            with safe_open(folder / file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} is not a whole safetensors file: {first_line(error)}")
    return problems


def weight_files(folder: Path) -> list[str]:
    """Names of the weights files, as Transformers chooses them: the single file before the shards."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder by name, read from the headers of its weights files.

    Args:
        folder: A folder that `check_folder` finds nothing wrong with.
    """
    found = {}
    for file in weight_files(folder):
        with safe_open(folder / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                part = tensors.get_slice(name)
                found[name] = StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
    return found
