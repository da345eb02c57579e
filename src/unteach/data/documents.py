"""Read documents: folders of text files, record files, Hugging Face datasets, parts of the embedded benchmark.

Nothing is guessed and nothing is left out silently: a file that cannot be read is an error with its name and place,
and a document without text is counted as skipped. All problems of a source are reported together.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unteach.data.records import RecordProblem, decode_bytes, iterate_records, open_bytes
from unteach.data.text import encode_texts
from unteach.errors import InputError, first_line

__all__ = ["Documents", "read_documents", "skipped_summary"]

RECORD_FILES = (".jsonl", ".json", ".parquet")
EXTENSIONS = (".txt", ".md", *RECORD_FILES)
"""What is read; all but .parquet also with .gz after it."""
MOST_PROBLEMS = 20
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
    """What was left out: label and reason."""
    share: float = 1.0
    """The share of a large source that was drawn; 1 where all of it was read."""
    _encoded: tuple[Any, list[list[int]]] | None = field(default=None, init=False, repr=False, compare=False)

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

    def encode(self, tokenizer: Any) -> list[list[int]]:
        """Token ids of each text, without special ids; the texts are encoded once, whoever asks for their ids."""
        if self._encoded is None or self._encoded[0] is not tokenizer:
            self._encoded = tokenizer, list(encode_texts(tokenizer, self.texts))
        return self._encoded[1]

    def choose(self, numbers: Iterable[int]) -> Documents:
        """The documents with the given numbers, in that order."""
        numbers = list(numbers)
        return Documents(
            self.name,
            [self.texts[number] for number in numbers],
            [self.labels[number] for number in numbers],
            share=self.share,
        )

    def set_aside(self, count: int, seed: int) -> tuple[Documents, Documents]:
        """Split at random into the documents to work with and `count` others that nothing is trained on.

        Both are in their old order; `count` is less than there are.
        """
        if not 0 <= count < len(self.texts):
            raise ValueError(f"count is {count}, must be at least 0 and less than the {len(self.texts)} documents")
        chosen = np.zeros(len(self.texts), dtype=bool)
        chosen[np.random.default_rng([seed, len(self.texts)]).permutation(len(self.texts))[:count]] = True
        return self.choose(np.flatnonzero(~chosen).tolist()), self.choose(np.flatnonzero(chosen).tolist())


def skipped_summary(skipped: Iterable[tuple[str, str]]) -> str:
    """Count what was skipped by reason, as in `3 skipped (2 empty, 1 shorter than two tokens)`; empty for nothing."""
    reasons = Counter(reason for _, reason in skipped)
    if not reasons:
        return ""
    return f"{reasons.total():,} skipped ({', '.join(f'{count:,} {reason}' for reason, count in reasons.items())})"


def read_documents(
    source: str, *, text_field: str = "text", max_bytes: int | None = None, seed: int = 0, option: str = "documents"
) -> Documents:
    """Read all documents of a source, or an even sample of a large one.

    Args:
        source: A folder (read with all folders in it, in the order of the names), a file, `micro:PART`, or a Hugging
            Face dataset as `owner/name[:subset[:split]]` (split `train` unless given). Files are .txt and .md (a
            document each), .jsonl, .json and .parquet (a document per record); all but .parquet also gzipped.
        text_field: The field of a record that holds the text.
        max_bytes: At most about this much text is read. Of a larger source every document is then drawn with the same
            probability, the one that its size in bytes suggests; a dataset is streamed in shuffled order.
        seed: Decides which documents of a larger source are drawn.
        option: What the error messages call this source.

    Raises:
        InputError: With every problem found.
    """
    path = Path(source).expanduser()
    reader = _Reader(text_field, option, source, max_bytes)
    if source.startswith("micro:"):
        reader.read_micro(source.removeprefix("micro:"))
    elif path.is_dir():
        files = sorted(entry for entry in path.rglob("*") if entry.is_file() and not _is_hidden(entry, path))
        if not files:
            raise InputError(f"{option} is {source!r}: the folder is empty, it must hold {', '.join(EXTENSIONS)} files")
        reader.read_files(files, path, seed)
    elif path.is_file():
        reader.read_files([path], path.parent, seed)
    elif _is_hub_name(source):
        reader.read_hub(source, seed)
    else:
        raise InputError(f"{option} is {source!r}: there is no such file or folder")
    return reader.documents()


def _is_hub_name(source: str) -> bool:
    """Whether a source that is not here can be meant as a dataset's name; not where the folder it would be in is."""
    path = Path(source)
    in_folder_here = path.parent != Path() and path.parent.is_dir()
    return bool(_HUB_NAME.fullmatch(source)) and _extension(path) not in EXTENSIONS and not in_folder_here


def _is_hidden(entry: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in entry.relative_to(folder).parts)


def _extension(path: Path) -> str:
    """The extension that says how to read a file, in lower case, without .gz."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


class _Reader:
    """Collects the texts, what is skipped, and the problems of one source."""

    def __init__(self, text_field: str, option: str, source: str, max_bytes: int | None) -> None:
        self.text_field = text_field
        self.option = option
        self.source = source
        self.max_bytes = max_bytes
        self.share = 1.0
        self.read_bytes = 0
        self.texts: list[str] = []
        self.labels: list[str] = []
        self.skipped: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.without_field: dict[tuple[str, str], list[str]] = {}

    def documents(self) -> Documents:
        """Return what was read, or raise with what is wrong."""
        for (where, fields), labels in self.without_field.items():
            several = f" and {len(labels) - 1:,} more" if len(labels) > 1 else ""
            self.problems.append(
                f"{where}: no field {self.text_field!r} in {labels[0]}{several}; there is {fields}: set text_field"
            )
        if self.problems:
            left = len(self.problems) - MOST_PROBLEMS
            shown = self.problems[:MOST_PROBLEMS] + ([f"and {left:,} more problems like these"] if left > 0 else [])
            raise InputError(f"{self.option} is {self.source!r}: {problem}" for problem in shown)
        if not self.texts:
            why = skipped_summary(self.skipped) or "it has no records"
            raise InputError(f"{self.option} is {self.source!r}: there is no document in it: {why}")
        return Documents(self.source, self.texts, self.labels, self.skipped, self.share)

    @property
    def is_full(self) -> bool:
        return self.max_bytes is not None and self.read_bytes >= self.max_bytes

    def add(self, label: str, text: Any, where: str = "") -> None:
        """Take one text, or note why not."""
        place = f"{where}, {label}" if where else label
        if text is None or (isinstance(text, str) and not text.strip()):
            self.skipped.append((place, "empty"))
            return
        if not isinstance(text, str):
            self.problems.append(f"{place}: field {self.text_field!r} is {type(text).__name__}, must be text")
            return
        try:
            self.read_bytes += len(text.encode())
        except UnicodeEncodeError as error:
            self.problems.append(f"{place}: character {error.start} is half of a surrogate pair, which is no text")
            return
        self.texts.append(text)
        self.labels.append(place)

    def add_record(self, label: str, record: Any, where: str) -> None:
        """Take the text of one record: an object with the text field, or a text alone."""
        if isinstance(record, str):
            self.add(label, record, where)
        elif not isinstance(record, dict):
            self.problems.append(f"{where}, {label}: must be an object with field {self.text_field!r}")
        elif self.text_field not in record:
            fields = ", ".join(repr(name) for name in record) or "no field at all"
            self.without_field.setdefault((where, fields), []).append(label)
        else:
            self.add(label, record[self.text_field], where)

    # Files.

    def read_files(self, files: list[Path], folder: Path, seed: int) -> None:
        """Read files in the given order; of more than `max_bytes` every document is drawn with equal probability."""
        draws: np.random.Generator | None = None
        if self.max_bytes is not None:
            size = sum(file.stat().st_size * _EXPANSION.get(file.suffix.lower(), 1) for file in files)
            if size > self.max_bytes:
                self.share = self.max_bytes / size
                draws = np.random.default_rng(seed)
        for file in files:
            if self.is_full:
                break
            where, extension = str(file.relative_to(folder)), _extension(file)
            if extension not in EXTENSIONS or (extension == ".parquet" and file.suffix.lower() == ".gz"):
                found = f"unknown extension {file.suffix!r}" if file.suffix else "no extension"
                self.problems.append(f"{where}: {found}, must be one of {', '.join(EXTENSIONS)}")
                continue
            try:
                if extension in RECORD_FILES:
                    self.read_records(file, where, draws)
                elif self.draw(draws):
                    with open_bytes(file) as stream:
                        text = decode_bytes(stream.read())
                    if isinstance(text, RecordProblem):
                        self.problems.append(f"{where}: {text.text}")
                    else:
                        self.add(where, text)
            except (OSError, EOFError, zlib.error) as error:
                self.problems.append(f"{where}: cannot be read: {first_line(error)}")

    def draw(self, draws: np.random.Generator | None) -> bool:
        """Whether the next document is to be read."""
        return draws is None or bool(draws.random() < self.share)

    def read_records(self, file: Path, where: str, draws: np.random.Generator | None) -> None:
        """Read a file of records until there is enough, or too much is wrong with it."""
        for label, record in iterate_records(file, draw=lambda: self.draw(draws), column=self.text_field):
            if self.is_full or len(self.problems) > 10 * MOST_PROBLEMS:
                return
            if isinstance(record, RecordProblem):
                self.problems.append(f"{where}, {label}: {record.text}" if label else f"{where}: {record.text}")
            else:
                self.add_record(label, record, where)

    # Embedded and remote sources.

    def read_micro(self, part: str) -> None:
        """Read a part of the embedded benchmark."""
        from unteach.corpora import micro

        try:
            texts = micro.documents(part)
        except ValueError as error:
            raise InputError(f"{self.option} is {self.source!r}: {first_line(error)}") from error
        for number, text in enumerate(texts, start=1):
            if self.is_full:
                break
            self.add(f"{self.source} {number}", text)

    def read_hub(self, source: str, seed: int) -> None:
        """Stream a Hugging Face dataset; with HF_HUB_OFFLINE=1, read the copy that was downloaded before."""
        name, _, rest = source.partition(":")
        subset, _, split = rest.partition(":")
        missing = f"{self.option} is {source!r}: there is no such file or folder here"
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
            if self.max_bytes is not None:
                rows = rows.shuffle(seed=seed) if offline else rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
            self.read_rows(rows)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{missing}, and the Hugging Face dataset cannot be read: {type(error).__name__}: {first_line(error)}"
            ) from error

    def read_rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take the rows of a dataset until there is enough."""
        for number, row in enumerate(rows, start=1):
            if self.is_full or len(self.problems) + len(self.without_field) > 0:
                return
            self.add_record(f"row {number}", row, self.source)
