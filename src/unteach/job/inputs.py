"""What a job works with: models loaded and divided between processes, texts read, and whether they fit together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unteach.config import ForgetConfig
from unteach.data import EMBEDDED_GENERAL, GENERAL_BYTES, Documents, overlap, read_documents
from unteach.errors import InputError
from unteach.models import load_model, load_tokenizer, trainable_parameters
from unteach.models.distributed import has_shards, in_turns, mesh_of, ranks, shard
from unteach.models.precision import HALF, resolved_precision

__all__ = ["Inputs", "as_documents", "prepared", "read_inputs"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Models and texts of a run."""

    model: Any
    tokenizer: Any
    documents: Documents
    general: Documents
    keep: Documents | None = None
    """Documents like the forgotten ones that the model should keep."""
    holdout: Documents | None = None
    """Documents like the forgotten ones that the model never saw."""
    reference: Any = None
    """A model that never saw the documents, whose scores the stop rule compares with."""
    base: Any = None
    """A model that never saw the documents, which the loss compares with."""


def read_inputs(config: ForgetConfig) -> Inputs:
    """Load every model and read every text that a config names.

    Raises:
        InputError: With all problems that were found.
    """
    texts = _read_texts(config)
    if config.base:
        _check_tokenizer(config)
    model, tokenizer = _load(config.model, config)
    return Inputs(
        model=model,
        tokenizer=tokenizer,
        reference=_load(config.reference, config)[0] if config.reference else None,
        base=load_model(config.base, device=config.resolved_device())[0] if config.base else None,
        **texts,
    )


def as_documents(texts: Sequence[str] | Documents, name: str) -> Documents:
    """Texts as if they had been read from a source of that name."""
    if isinstance(texts, Documents):
        return texts
    return Documents(name, list(texts), [f"{name} {n}" for n in range(1, len(texts) + 1)], [])


def prepared(model: Any, config: ForgetConfig) -> dict[str, torch.nn.Parameter]:
    """Choose the trainable weights, freeze the others, and on several ranks divide all between them."""
    if ranks() > 1 and not has_shards(model):
        trainable_parameters(model, config.trainable)
        shard(model, config.resolved_device().type, _half_of_all_passes(config))
    return trainable_parameters(model, config.trainable)


def without_overlap(keep: Documents, documents: Documents) -> tuple[str, Documents]:
    """Keep documents without what they share with the forget documents, and a line for people.

    Raises:
        InputError: Nothing is left.
    """
    forgotten = {" ".join(text.split()) for text in documents.texts}  # also those too short to be looked for in others
    others = [n for n, text in enumerate(keep.texts) if " ".join(text.split()) not in forgotten]
    parts = [keep.texts[n] for n in others], [keep.labels[n] for n in others]
    report, left = overlap(documents, Documents(keep.name, *parts, list(keep.skipped)))
    if not left.texts:
        what = "has no documents" if not keep.texts else "is what is to be forgotten, word for word or nearly"
        raise InputError(
            f"keep is {keep.name!r}: it {what}; name other documents of the same kind, or leave --keep out"
        )
    same = len(keep.texts) - len(others)
    equal = f"; {same:,} equal to documents that are to be forgotten left out" if same else ""
    return f"{len(left.texts):,} documents{equal}; {report.summary()}", left


def _load(name: str, config: ForgetConfig) -> tuple[Any, Any]:
    """Load a model and its tokenizer; for several ranks in turns, so that main memory holds one whole model at once."""
    device = config.resolved_device()
    if ranks() == 1:
        return load_model(name, device=device)
    mesh_of(device.type)

    def load_and_shard() -> tuple[Any, Any]:
        model, tokenizer = load_model(name, device="cpu")
        prepared(model, config)
        return model, tokenizer

    return in_turns(load_and_shard)


def _check_tokenizer(config: ForgetConfig) -> None:
    """Refuse a base model that reads token ids otherwise than the model does."""
    own, other = load_tokenizer(config.model), load_tokenizer(str(config.base))
    if own.get_vocab() != other.get_vocab():
        raise InputError(
            f"base is {config.base!r}: its tokenizer is not that of {config.model!r} ({len(other.get_vocab()):,} and "
            f"{len(own.get_vocab()):,} tokens): give a model with the same tokenizer, best the one before finetuning"
        )


def _half_of_all_passes(config: ForgetConfig) -> torch.dtype | None:
    """The half precision in which every pass of a run computes, if there is one and norms, kept exact, stay frozen."""
    passes = {resolved_precision(name, config.resolved_device()) for name in dataclasses.astuple(config.precision)}
    return HALF.get(passes.pop()) if len(passes) == 1 and config.trainable == "blocks" else None


def _read_texts(config: ForgetConfig) -> dict[str, Any]:
    """Read every document source, collecting the problems of all of them."""
    problems: list[str] = []

    def read(source: str | None, option: str, max_bytes: int | None = None) -> Documents | None:
        if source is None:
            return None
        try:
            return read_documents(source, text_field=config.text_field, option=option, max_bytes=max_bytes)
        except InputError as error:
            problems.extend(error.problems)
            return None

    if not config.documents:
        problems.append("documents is missing: name the folder or file of texts to forget")
    for option in ("questions", "keep_questions"):
        file = getattr(config, option)
        if file and not Path(file).is_file():
            problems.append(f"{option} is {file!r}: there is no such file")
    texts = {
        "documents": read(config.documents or None, "documents"),
        "general": read(config.general or EMBEDDED_GENERAL, "general", GENERAL_BYTES),
        "keep": read(config.keep, "keep"),
        "holdout": read(config.holdout, "holdout"),
    }
    if problems:
        raise InputError(problems)
    return texts
