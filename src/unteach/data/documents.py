"""Documents: texts with the places they come from, as token ids and as words; one reader for every source.

Sources are folders of text and record files, standard input, Hugging Face datasets and parts of the embedded benchmark.
Nothing is guessed or left out silently: a file that cannot be read is an error with its name and place, or is counted
as skipped where that is wished, like a document without text; an encoding that had to be assumed is said. All problems
of a source are reported together.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unteach.data.chat import Turn, chat_text, has_template, is_conversation, plain_text
from unteach.data.encoding import TokenIds, encode_texts
from unteach.data.records import (
    MESSAGES,
    READERS,
    RecordNote,
    RecordProblem,
    extension_of,
    iterate_records,
    records_of_bytes,
)
from unteach.errors import InputError, first_line
from unteach.errors import shown as in_a_line

ALTERNATE = "alternate"
"""Field of a record that holds what is to be said instead of its text."""
MOST_PROBLEMS = 20
"""So many are shown; after ten times as many nothing more is read."""
_EXPANSION = {".gz": 3, ".parquet": 2}
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]*){0,2}|\w[\w.-]*(:[\w.-]*){1,2}")
_SHUFFLE_BUFFER = 10_000


@dataclass
class Documents:
    """Texts, where each comes from, and what was left out."""

    name: str
    """The source as it was given."""
    texts: list[str]
    labels: list[str] = field(default_factory=list)
    """Where each text comes from: a file name, a file name with line number, or a number."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """What was left out: label and reason; of what cannot be read, ``unreadable: `` and why."""
    conversations: dict[int, list[Turn]] = field(default_factory=dict)
    """The texts, by number, that are conversations: lines `role: content` until they are `in_form_of` a model."""
    notes: list[str] = field(default_factory=list)
    """What people should know of how it was read."""
    _encoded: tuple[Any, TokenIds] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.labels:
            self.labels = [f"document {number}" for number in range(1, len(self.texts) + 1)]
        if len(self.labels) != len(self.texts):
            raise ValueError(f"labels are {len(self.labels)}, must be as many as texts: {len(self.texts)}")

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sha256(self) -> str:
        """Hash of all texts in their order: equal for equal texts, wherever they were read from."""
        digest = hashlib.sha256()
        for text in self.texts:
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()

    def encode(self, tokenizer: Any) -> TokenIds:
        """Token ids of each text, without special ids; the texts are encoded once, whoever asks for their ids."""
        if self._encoded is None or self._encoded[0] is not tokenizer:
            self._encoded = tokenizer, encode_texts(tokenizer, self.texts)
        return self._encoded[1]

    def in_form_of(self, tokenizer: Any) -> Documents:
        """The same with conversations in the tokenizer's chat template, where it has one.

        What the tokenizer puts before and after every text by itself is left out where the template writes it, too.
        """
        if not (self.conversations and has_template(tokenizer)):
            return self
        before, after = (tokenizer.decode(ids) for ids in special_ids(tokenizer))
        texts = list(self.texts)
        for number, turns in self.conversations.items():
            try:
                texts[number] = chat_text(tokenizer, turns).removeprefix(before).removesuffix(after)
            except InputError as error:
                raise InputError(f"{self.name}, {self.labels[number]}: {error}") from None
        return replace(self, texts=texts, conversations={})

    def set_aside(self, count: int, seed: int) -> tuple[Documents, Documents]:
        """Split at random into the documents to work with and `count` others that nothing is trained on.

        Both are in their old order; `count` is less than there are.
        """
        total = len(self.texts)
        if not 0 <= count < total:
            raise ValueError(f"count is {count}, must be at least 0 and less than the {total} documents")
        aside = sorted(np.random.default_rng([seed, total]).permutation(total)[:count].tolist())
        rest = sorted({*range(total)} - {*aside})
        first, second = (
            Documents(self.name, [self.texts[n] for n in numbers], [self.labels[n] for n in numbers])
            for numbers in (rest, aside)
        )
        return first, second


def skipped_summary(skipped: Iterable[tuple[str, str]]) -> str:
    """Count what was skipped by reason, as in `3 skipped (2 empty, 1 shorter than two tokens)`; empty for nothing."""
    reasons = Counter(reason.partition(":")[0] for _, reason in skipped)
    if not reasons:
        return ""
    return f"{reasons.total():,} skipped ({', '.join(f'{count:,} {reason}' for reason, count in reasons.items())})"


# ---- reading -----------------------------------------------------------------------------------------

Found = Iterator[tuple[str, str, Any]]
"""File or source, place in it, and a text, a row or a `RecordProblem`."""


def read_documents(
    source: str,
    *,
    text_field: str = "text",
    max_bytes: int | None = None,
    seed: int = 0,
    option: str = "documents",
    skip_unreadable: bool = False,
) -> Documents:
    """Read all documents of a source, or an even sample of a large one.

    Args:
        source: A folder (read with all folders in it, in the order of the names), a file, `-` for standard input (JSON
            lines, or one text), `micro:PART`, or a Hugging Face dataset as `owner/name[:subset[:split]]` (split `train`
            unless given). Files are .txt, .md, .html, .docx and .pdf (a document each), .jsonl, .json, .csv, .tsv and
            .parquet (a document per record); all but .parquet also gzipped. A record without the text field that has
            `messages` (objects with `role` and `content`) is a conversation.
        text_field: The field of a record that holds the text.
        max_bytes: At most about this much text is read. Of a larger source every document is then drawn with the same
            probability, the one that its size in bytes suggests; a dataset is streamed in shuffled order.
        seed: Decides which documents of a larger source are drawn.
        option: What the error messages call this source.
        skip_unreadable: Count files and records that cannot be read as skipped instead of refusing all.

    Raises:
        InputError: With every problem found.
    """
    shown, most = f"{option} is {source!r}", 10 * MOST_PROBLEMS
    try:
        path = Path(source).expanduser()
        here = path.is_dir() or path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, no such home
        raise InputError(f"{shown}: {getattr(error, 'strerror', None) or error}: name a file or folder") from None
    if source == "-":
        found = _piped(text_field, option)
    elif source.startswith("micro:"):
        found = _embedded(source, shown)
    elif here:
        found = _in_files(path, text_field, max_bytes, seed, shown)
    elif _is_hub_name(source):
        found, most = _in_dataset(source, None if max_bytes is None else seed, shown), 0
    else:
        raise InputError(f"{shown}: there is no such file or folder")

    documents, size = Documents(source, []), 0
    problems: list[str] = []
    without_field: dict[tuple[str, str], list[str]] = {}
    for where, label, record in found:
        if (max_bytes is not None and size >= max_bytes) or len(problems) + len(without_field) > most:
            break
        place = ", ".join(part for part in (where, label) if part)
        if isinstance(record, RecordNote):
            documents.notes.append(f"{option}: {place}: {record}")
            continue
        chosen = text_field if not isinstance(record, dict) or text_field in record else MESSAGES
        if isinstance(record, dict) and chosen not in record:
            fields = in_a_line(", ".join(map(repr, record)), bare=True) or "no field at all"
            without_field.setdefault((where, fields), []).append(label)
            continue
        text = record[chosen] if isinstance(record, dict) else record
        if is_conversation(text):
            documents.conversations[len(documents.texts)] = text
            text = plain_text(text)
        elif chosen != text_field and text is not None:
            text = [text]  # no conversation
        if isinstance(text, str) and text.strip():
            try:
                size += len(text.encode())
                documents.texts.append(text)
                documents.labels.append(place)
            except UnicodeEncodeError as error:
                problems.append(f"{place}: character {error.start} is half of a surrogate pair, which is no text")
        elif isinstance(record, RecordProblem):
            problems.append(f"{place}: {record}")
        elif isinstance(text, str) or (text is None and isinstance(record, dict)):
            documents.skipped.append((place, "empty"))
        elif isinstance(record, dict):
            wrong = f"is {type(text).__name__}, must be text"
            wrong = "must be a list of objects with role and content, both text" if chosen == MESSAGES else wrong
            problems.append(f"{place}: field {chosen!r} {wrong}")
        else:
            problems.append(f"{place}: must be an object with field {text_field!r}")
        if skip_unreadable and problems:
            documents.skipped.append((place, f"unreadable: {problems.pop().removeprefix(f'{place}: ')}"))
    for (where, fields), labels in without_field.items():
        several = f" and {len(labels) - 1:,} more" if len(labels) > 1 else ""
        better = "every record needs one" if text_field == ALTERNATE else "set text_field"
        problems.append(f"{where}: no field {text_field!r} in {labels[0]}{several}; there is {fields}: {better}")
    if problems:
        left = len(problems) - MOST_PROBLEMS
        listed = problems[:MOST_PROBLEMS] + ([f"and {left:,} more problems like these"] if left > 0 else [])
        raise InputError(f"{shown}: {problem}" for problem in listed)
    if not documents.texts:
        why = skipped_summary(documents.skipped) or "it has no records"
        raise InputError(f"{shown}: there is no document in it: {why}")
    return documents


def _is_hub_name(source: str) -> bool:
    """Whether a source that is not here can be meant as a dataset's name; not where the folder it would be in is."""
    path = Path(source)
    in_folder_here = path.parent != Path() and path.parent.is_dir()
    return bool(_HUB_NAME.fullmatch(source)) and extension_of(path) not in READERS and not in_folder_here


def _in_files(path: Path, column: str, max_bytes: int | None, seed: int, shown: str) -> Found:
    """A file, or all of a folder but hidden ones; of more than `max_bytes` all records have the same probability."""
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if _counts(entry))
    files = [file for file in files if file == path or "/." not in f"/{file.relative_to(folder).as_posix()}"]
    if not files:
        raise InputError(f"{shown}: the folder is empty, it must hold {', '.join(READERS)} files")
    kinds = Counter(file.suffix.lower() or "without extension" for file in files)
    if len(files) > 1 and not any(_has_reader(file) for file in files):
        there = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(5))
        raise InputError(f"{shown}: no file in it can be read ({there}), it must hold {', '.join(READERS)} files")
    size = sum(file.stat().st_size * _EXPANSION.get(file.suffix.lower(), 1) for file in files if file.is_file())
    generator = np.random.default_rng(seed)

    def draw() -> bool:
        return max_bytes is None or size <= max_bytes or bool(generator.random() < max_bytes / size)

    for file in files:
        where = str(file.relative_to(folder))
        if not file.is_file():
            wrong = "a folder that cannot be looked into, or a link to one" if file.is_dir() else "not a file"
            yield where, "", RecordProblem(f"{wrong}: put the texts themselves there, or take it away")
            continue
        if not _has_reader(file):
            wrong = f"unknown extension {file.suffix!r}" if file.suffix else "no extension"
            yield where, "", RecordProblem(f"{wrong}, must be one of {', '.join(READERS)}")
            continue
        try:
            for label, record in iterate_records(file, draw=draw, column=column):
                yield where, label, record
        except (OSError, EOFError, zlib.error) as error:
            yield where, "", RecordProblem(f"cannot be read: {first_line(error)}")


def _counts(entry: Path) -> bool:
    """Whether something in a folder is to be read, or to be said: not a folder, unless nobody will look into it."""
    return entry.is_symlink() or not entry.is_dir() or not os.access(entry, os.R_OK | os.X_OK)


def _has_reader(file: Path) -> bool:
    return extension_of(file) in READERS and not file.name.lower().endswith(".parquet.gz")


def _piped(column: str, option: str) -> Found:
    """Standard input, which can be read once: every reader of this process gets the same."""
    if option != "documents":
        raise InputError(f"{option} is '-': only documents can come from standard input, give a file or folder")
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("documents is '-': nothing is piped in: add < FILE, or name a file or folder")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("documents is '-': several processes cannot share standard input, give a file or folder")
    for label, record in records_of_bytes(_standard_input(), column):
        yield "standard input", label, record


@functools.cache
def _standard_input() -> bytes:
    return sys.stdin.buffer.read()


def _embedded(source: str, shown: str) -> Found:
    """A part of the embedded benchmark."""
    from unteach.corpora import micro

    try:
        texts = micro.documents(source.removeprefix("micro:"))
    except ValueError as error:
        raise InputError(f"{shown}: {first_line(error)}") from error
    for number, text in enumerate(texts, start=1):
        yield "", f"{source} {number}", text


def _in_dataset(source: str, seed: int | None, shown: str) -> Found:
    """A Hugging Face dataset, streamed, shuffled by a seed; with HF_HUB_OFFLINE=1 the copy downloaded before."""
    name, _, rest = source.partition(":")
    subset, _, split = rest.partition(":")
    missing = f"{shown}: there is no such file or folder here"
    try:
        import datasets
        from huggingface_hub import HfApi, constants
    except ImportError:
        raise InputError(f"{missing}, and reading Hugging Face datasets needs: pip install datasets") from None
    offline = constants.HF_HUB_OFFLINE
    try:
        if not offline:
            HfApi().dataset_info(name, timeout=10)
        rows = datasets.load_dataset(name, subset or None, split=split or "train", streaming=not offline)
        if seed is not None:
            rows = rows.shuffle(seed=seed) if offline else rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
        for number, row in enumerate(rows, start=1):
            yield source, f"row {number}", row
    except Exception as error:
        wrong = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{missing}, and the Hugging Face dataset cannot be read: {wrong}") from error


# ---- tokens and words: one form for training, benchmarks and measurements --------------------------------


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text with the special tokens the tokenizer adds by itself; never truncated."""
    return list(tokenizer(text, add_special_tokens=True, truncation=False, verbose=False)["input_ids"])


def special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after a text by itself, often a begin-of-text id and nothing."""
    whole = list(tokenizer("a")["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids without special tokens.

    Differs from MUSE's code: there spaces before punctuation are removed too, which changes no word that
    ROUGE sees except in texts written like `do n't`.
    """
    return tokenizer.decode(list(ids), skip_special_tokens=True)


Words = Literal["latin", "unicode"]
# Thai, Lao, Burmese, Khmer, Japanese, Chinese: written without spaces between words.
_UNSPACED = r"\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u3040-\u30FF\u3400-\u9FFF\U00020000-\U0003FFFF"
_PATTERNS = {"latin": re.compile(r"[a-z0-9]+"), "unicode": re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")}


def split_words(text: str, words: Words = "latin") -> list[str]:
    """Split a text into the units ROUGE compares.

    `"latin"` is as MUSE and `rouge-score` do: lower-case runs of a-z and 0-9, everything else is a separator, so a
    text in Greek or Chinese has **no** words and always scores 0. `"unicode"`: runs of letters and digits of any
    script; in scripts written without spaces each character is a word.
    """
    if words not in _PATTERNS:
        raise ValueError(f"words is {words!r}: allowed are {' and '.join(map(repr, _PATTERNS))}")
    return _PATTERNS[words].findall(text.lower())
