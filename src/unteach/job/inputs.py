"""What a job works with: models loaded and divided between processes, texts read, and whether they fit together."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from unteach.config import LINE, ForgetConfig
from unteach.corpora.own import question_problems
from unteach.data import EMBEDDED_GENERAL, Documents, TokenSet, overlap, read_documents, tokenise
from unteach.data.documents import ALTERNATE
from unteach.data.overlap import SharedPassages
from unteach.errors import InputError
from unteach.evaluation.command import hash_weights
from unteach.models import decoder_layers, load_model, load_tokenizer, trainable_parameters
from unteach.models.adapters import RANK, adapted_layers, adapter_parameters, add_adapters, keep_base_in, without_peft
from unteach.models.distributed import check_ranks, has_shards, in_turns, is_first_rank, mesh_of, ranks, shard
from unteach.models.load import COPIED, find_folder, half_of
from unteach.models.precision import HALF, resolved_precision
from unteach.training.goal import goal_in_words
from unteach.writing import file_sha256

__all__ = [
    "Inputs", "as_documents", "check_pairs", "choice", "given_inputs", "has_own_questions", "never_seen", "paired",
    "prepared", "read_inputs", "read_texts", "without_overlap",
]  # fmt: skip

_SPACES = re.compile(r"\s+")
MOST_NOTES = 20
"""So many lines on how texts were read are shown."""
PIPED = "documents.jsonl"
"""Where a run keeps documents that came from standard input: a resumed run reads them there."""

MOSTLY = 0.5
"""A document of which this share of the words stands in others has been seen with them."""
LITTLE = 2000
"""Words under which every token of the documents is pulled, not only those that the model is least sure of."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Models and texts of a run."""

    model: Any
    tokenizer: Any
    documents: Documents
    general: Documents
    alternates: Documents | None = None
    """What to say instead of each of the documents, in their order."""
    keep: Documents | None = None
    """Documents like the forgotten ones that the model should keep."""
    holdout: Documents | None = None
    """Documents like the forgotten ones that the model never saw."""
    reference: Any = None
    """A model that never saw the documents, whose scores the stop rule compares with."""
    base: Any = None
    """A model that never saw the documents, which the loss compares with."""
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of the models' files by what they are (``weights model``), where they were loaded from folders."""

    @property
    def little(self) -> bool:
        """Whether there is but little to forget."""
        left = LITTLE
        for text in self.documents.texts:
            left -= len(text.split(maxsplit=LITTLE))  # no list of a million words where two thousand are enough
            if left <= 0:
                return False
        return True

    def __post_init__(self) -> None:
        for option in ("model", "reference", "base"):
            model = without_peft(getattr(self, option), option)
            object.__setattr__(self, option, model)
            if getattr(model, "is_quantized", False):
                raise InputError(f"{option} has quantised weights, which cannot be trained: load it in float32")

    @property
    def texts(self) -> dict[str, Documents]:
        """The sources of texts that are there, by the options that name them."""
        sources = {name: getattr(self, name) for name in ("documents", "alternates", "general", "keep", "holdout")}
        return {name: source for name, source in sources.items() if source is not None}

    def in_form_of_model(self) -> Inputs:
        """The same with conversations as the model reads them, see ``Documents.in_form_of``."""
        texts: dict[str, Any] = {name: each.in_form_of(self.tokenizer) for name, each in self.texts.items()}
        return dataclasses.replace(self, **texts)

    def notes(self, *, private: bool = False) -> list[str]:
        """How texts were read, where people should know it: encodings that were assumed, and what was left out.

        In private only how many such notes there are: names of files and fields may tell something.
        """
        lines = [note for source in self.texts.values() for note in source.notes]
        for option, source in self.texts.items():
            lines += [f"{option}: {label}: skipped, {why}" for label, why in source.skipped if _unreadable(why)]
        if private:
            return [f"{len(lines):,} notes on how texts were read are not shown (--private)"] if lines else []
        return lines[:MOST_NOTES] + ([f"and {len(lines) - MOST_NOTES:,} more like these"] if lines[MOST_NOTES:] else [])

    def unreadable(self) -> dict[str, dict[str, int]]:
        """How many files and records of each source were skipped as ``unreadable``; nothing where none was."""
        counts = {name: sum(_unreadable(why) for _, why in source.skipped) for name, source in self.texts.items()}
        found = {name: count for name, count in counts.items() if count}
        return {"unreadable": found} if found else {}


def _unreadable(why: str) -> bool:
    return why.startswith("unreadable")


def read_inputs(config: ForgetConfig) -> Inputs:
    """Load every model and read every text that a config names; an ``InputError`` has all problems of the texts."""
    texts = read_texts(config)
    model, tokenizer = _load(config.model, config, adapted=config.adapter is not None)
    reference = _load(config.reference, config)[0] if config.reference else None
    base = load_model(config.base, device=config.resolved_device())[0] if config.base else None
    named = {"model": config.model, "reference": config.reference, "base": config.base}
    hashes = dict[str, str]()
    for option, name in named.items() if is_first_rank() else ():
        hashes |= _hashes(option, find_folder(name)) if name else {}
    return Inputs(model, tokenizer, **texts, reference=reference, base=base, hashes=hashes)


def given_inputs(
    model: Any, tokenizer: Any, config: ForgetConfig, texts: Mapping[str, Any], **others: Any
) -> tuple[Inputs, ForgetConfig]:
    """The same of models and texts in memory, by the names of ``Inputs``; the config then says what they are.

    A model that PEFT has adapted is trained in its adapter; another one gets an adapter where the config wants one.
    """
    model.eval()  # dropout would set student and teacher apart
    named = {name: getattr(config, name) or name for name in ("alternates", "keep", "base", "holdout")}
    known: Any = {name: None if {**texts, **others}[name] is None else named[name] for name in named}
    source = config.model or str(getattr(model, "name_or_path", "") or "model")
    given: dict[str, Any] = {name: as_documents(each, name) for name, each in texts.items() if each is not None}
    given.setdefault("general", read_documents(EMBEDDED_GENERAL))
    check_pairs(given["documents"], given.get("alternates"))
    inputs = Inputs(model, tokenizer, **given, **others)
    adapter = "lora" if adapted_layers(inputs.model) else config.adapter
    config = dataclasses.replace(config, model=source, adapter=adapter, **known)
    if adapter:
        _adapt(inputs.model, config, None)
    return inputs, config


def check_pairs(documents: Documents, alternates: Documents | None) -> None:
    """Refuse alternates that are not one to each document; which belongs to which their order says."""
    if alternates is None:
        return
    given = f"alternates is {alternates.name!r}: "
    for name, source in (("documents", documents), ("alternates", alternates)):
        if source.skipped:
            (label, why), more = source.skipped[0], len(source.skipped) - 1
            several = f" and {more:,} more" if more else ""
            line = f"{label}{several} of {name} cannot be used ({why}), and a pair needs both texts"
            raise InputError(f"{given}{line}: complete it, or take both out")
    if len(alternates) != len(documents):
        counts = f"it has {len(alternates):,} texts, and there are {len(documents):,} documents"
        raise InputError(f"{given}{counts}: give one for each, in the same order")
    for label, text, other in zip(documents.labels, documents.texts, alternates.texts, strict=True):
        if text.strip() == other.strip():
            raise InputError(f"{given}that of {label} is the document itself: give another text")


def paired(
    inputs: Inputs, tokens: TokenSet, mode: Literal["chunk", "truncate"], max_tokens: int
) -> Sequence[list[int]]:
    """The alternate of each sequence to be forgotten; refused where a text is not one sequence."""
    if inputs.alternates is None:
        return ()
    given = f"alternates is {inputs.alternates.name!r}: "
    found = tokenise(inputs.alternates, inputs.tokenizer, mode=mode, max_tokens=max_tokens)
    for name, texts in (("documents", tokens), ("alternates", found)):
        if texts.skipped:
            label, why = texts.skipped[0]
            raise InputError(f"{given}{label} of {name} is {why}, and a pair needs both texts: take both out")
        if mode == "chunk" and texts.counts["cut"]:
            longer = f"{texts.counts['cut']:,} of the {name} are longer than max_tokens, {max_tokens:,}"
            raise InputError(f"{given}{longer}, and a pair is not cut: raise it, or set document_mode to truncate")
    return found.sequences


def _adapt(model: Any, config: ForgetConfig, half: torch.dtype | None) -> None:
    """Give a model the adapters that a config wants, unless it has some, and keep what lies under them as it says;
    ``half`` is what the model's files are in."""
    if not (layers := adapted_layers(model)):
        add_adapters(model, decoder_layers(model), config.rank or RANK, config.seed)
    elif config.rank and {len(layer.a) for layer in layers.values()} != {config.rank}:
        ranks_there = ", ".join(map(str, sorted({len(layer.a) for layer in layers.values()})))
        raise InputError(f"rank is {config.rank}: the adapter of the model has rank {ranks_there}, leave it out")
    if hasattr(model, "peft_config") and config.base_bits:
        raise InputError(f"base_bits is {config.base_bits}: PEFT's models keep their weights as they are, leave it out")
    keep_base_in(model, config.base_bits, half, config.resolved_device() if ranks() == 1 else None)


def _hashes(option: str, folder: Path) -> dict[str, str]:
    """SHA-256 of a model's weights, and of what else of its folder decides how it reads and writes."""
    digest = hashlib.sha256()
    for file in sorted(entry for entry in folder.iterdir() if entry.suffix in COPIED and entry.is_file()):
        digest.update(f"{file.name}\0{file_sha256(file)}\0".encode(errors="surrogateescape"))
    return {f"weights {option}": hash_weights(folder), f"files {option}": digest.hexdigest()}


def as_documents(texts: Sequence[str] | Documents, name: str) -> Documents:
    """Texts as if they had been read from a source of that name."""
    return texts if isinstance(texts, Documents) else Documents(name, list(texts))


def prepared(model: Any, config: ForgetConfig) -> dict[str, torch.nn.Parameter]:
    """Choose the trainable weights, freeze the others, and on several ranks divide all between them."""

    def chosen() -> dict[str, torch.nn.Parameter]:
        return adapter_parameters(model) if adapted_layers(model) else trainable_parameters(model, config.trainable)

    check_ranks(config, ranks())
    if ranks() > 1 and not has_shards(model):
        chosen()
        device = config.resolved_device()
        passes = {resolved_precision(name, device) for name in dataclasses.astuple(config.precision)}
        alike = len(passes) == 1 and config.trainable == "blocks"  # norms, kept exact, stay frozen
        shard(model, device.type, HALF.get(passes.pop()) if alike else None)
    return chosen()


def without_overlap(keep: Documents, documents: Documents) -> tuple[str, Documents]:
    """Keep documents without what they share with the forget documents (an ``InputError`` where nothing is left), and a
    line for people."""
    forgotten = {_as_one_line(text) for text in documents.texts}  # also those too short to look for
    others = [n for n, text in enumerate(keep.texts) if _as_one_line(text) not in forgotten]
    rest = Documents(keep.name, [keep.texts[n] for n in others], [keep.labels[n] for n in others])
    report, left = overlap(documents, rest)
    if not left.texts:
        what = "has no documents" if not keep.texts else "is what is to be forgotten, word for word or nearly"
        better = "name other documents of the same kind, or leave --keep out"
        raise InputError(f"keep is {keep.name!r}: it {what}; {better}")
    same = len(keep.texts) - len(others)
    equal = f"; {same:,} equal to documents that are to be forgotten left out" if same else ""
    return f"{len(left.texts):,} documents{equal}; {report.summary()}", left


def never_seen(holdout: Documents, *seen: Documents | None) -> tuple[str, Documents]:
    """Holdout documents that are not among documents which the model has ``seen``, as a whole or by half (an
    ``InputError`` where none is left), and a line for people."""
    texts = [text for documents in seen if documents is not None for text in documents.texts]
    equal, passages = {_as_one_line(text) for text in texts}, SharedPassages(texts, holdout.texts)
    known = [_as_one_line(text) in equal or passages.share(text) >= MOSTLY for text in holdout.texts]
    rest = [number for number, was_seen in enumerate(known) if not was_seen]
    if not rest:
        better = "give documents of the same kind that the model never saw, or leave --holdout out"
        raise InputError(f"holdout is {holdout.name!r}: it is among the documents to forget or to keep; {better}")
    out = f"; {sum(known):,} that stand among those to forget or to keep left out" if any(known) else ""
    found = Documents(holdout.name, [holdout.texts[n] for n in rest], [holdout.labels[n] for n in rest])
    return f"{len(rest):,} documents{out}", found


def _as_one_line(text: str) -> int:
    """The hash of a text, white space aside."""
    return hash(_SPACES.sub(" ", text.strip()))


def has_own_questions(config: ForgetConfig) -> bool:
    """Whether the embedded benchmark's questions are asked, where none are given."""
    given = config.questions or config.keep_questions
    return config.model.startswith("micro:") and config.documents == "micro:forget" and not given


def choice(config: ForgetConfig, inputs: Inputs, *, parity: bool) -> str:
    """The method in one line, and what more could be given."""
    held = "general text" if inputs.keep is None else "general text and keep documents"
    missing = []
    if inputs.keep is None:
        missing.append("--keep, documents like these to be kept, to end knowledge and membership, too")
    elif inputs.base is None:
        missing.append("--base, a model that never saw the documents, to leave no trace in the wording")
    if inputs.holdout is None and parity:
        missing.append("--holdout, documents like these that the model never saw, to see whether they are detectable")
    if not config.questions and not has_own_questions(config) and parity:
        missing.append("--questions, to see whether it still answers about them")
    method = config.method
    line = f"{method.optimizer} with {method.loss}, held on {held}"
    if method.goal == "never_seen" and method.loss_options.keys() >= LINE:  # a run that goes on, or is made again
        line += f"; goal: {goal_in_words(method.loss_options)}"
    return line + (f"; give {'; and '.join(missing)}" if missing else "")


def _load(name: str, config: ForgetConfig, *, adapted: bool = False) -> tuple[Any, Any]:
    """Load a model and its tokenizer; for several ranks in turns, so that main memory holds one whole model at once.

    With adapters it is loaded in main memory, so that the device holds what lies under them only as it is kept.
    """
    device = config.resolved_device()

    def load(place: torch.device | str) -> tuple[Any, Any]:
        if not adapted:
            return load_model(name, device=place)
        model, tokenizer = load_model(name, device="cpu", merged=False)
        _adapt(model, config, half_of(find_folder(name)))
        return model.to(place), tokenizer

    if ranks() == 1:
        return load(device)
    mesh_of(device.type)

    def load_and_shard() -> tuple[Any, Any]:
        model, tokenizer = load("cpu")
        prepared(model, config)
        return model, tokenizer

    return in_turns(load_and_shard)


def _check_tokenizer(model: str, option: str, name: str) -> None:
    """Refuse a base or reference model that reads token ids otherwise than the model does."""
    own, other = load_tokenizer(model).get_vocab(), load_tokenizer(name, option=option).get_vocab()
    if own != other:
        better = ", best the one before finetuning" if option == "base" else ""
        raise InputError(
            f"{option} is {name!r}: its tokenizer is not that of {model!r} ({len(other):,} and {len(own):,} tokens): "
            f"give a model with the same tokenizer{better}"
        )


def read_texts(config: ForgetConfig) -> dict[str, Any]:
    """Read every document source, collecting the problems of all of them, and check the other models' tokenizers."""
    check_ranks(config, ranks())
    problems: list[str] = []
    if not config.documents:
        problems.append("documents is missing: name the folder or file of texts to forget")
    for option in ("questions", "keep_questions"):
        file = getattr(config, option)
        problems += question_problems(option, file and Path(file))
    sources = {"documents": config.documents or None, "general": config.general or EMBEDDED_GENERAL}
    sources |= {"keep": config.keep, "holdout": config.holdout, "alternates": config.alternates}
    texts: dict[str, Any] = dict.fromkeys(sources)
    for option, source in sources.items():
        if source is not None:
            text = ALTERNATE if option == "alternates" else config.text_field
            how: dict[str, Any] = {"text_field": text, "skip_unreadable": config.skip_unreadable}
            most = config.general_mib * 2**20 if option == "general" else None
            try:
                texts[option] = read_documents(source, option=option, max_bytes=most, **how)
            except InputError as error:
                problems += error.problems
    if problems:
        raise InputError(problems)
    check_pairs(texts["documents"], texts["alternates"])
    for option, name in (("base", config.base), ("reference", config.reference)):
        if name:
            _check_tokenizer(config.model, option, name)
    if config.documents == "-":
        texts["documents"].name = str(Path(config.out) / PIPED)
    return texts
