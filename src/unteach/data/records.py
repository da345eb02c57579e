"""The one reader of files, texts and tables of records, plain or gzipped; tables of a folder or of the hub.

`iterate_records` goes on after a broken record and says what is wrong with it; `read_rows` refuses the whole file. To
add a kind of file: a function that yields its records, and its extension in `READERS`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from unteach.data.formats import RecordProblem, byte_order_mark, decode_text, docx_text, html_text, pdf_text
from unteach.errors import first_line, shown
from unteach.writing import write_whole

Row = dict[str, Any]
Records = Iterator[tuple[str, Any]]
"""Where each record is in its file (`line 3`; empty for the file as a whole), and the record."""
MESSAGES = "messages"
"""The field of a conversation, read where a record has no text field."""
Draw = Callable[[], bool]
Reader = Callable[[Path, Draw, str | None], Records]
TABLE_EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv", ".tsv")
_TOO_MUCH = "broken JSON: nested too deeply, or a number of thousands of digits"
_MOST_UNPACKED, _UNPACKED_RATIO = 2**26, 200
"""More than so many bytes are unpacked from a .gz file only where they are at most so many times the packed ones: text
is packed to a tenth."""
_NO_OBJECTS = "a list of objects is needed, one per text or question"


class RecordNote(str):
    """What people should know of how a file was read; comes before its records."""


def extension_of(file: Path) -> str:
    """The extension that says how to read a file, in lower case, without .gz."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def iterate_records(file: Path, *, draw: Draw = lambda: True, column: str | None = None) -> Records:
    """Read a file record by record.

    Args:
        file: .txt, .md, .html, .docx and .pdf are one text; .jsonl has a record per line; .json is one array, or one
            object, or has a record per line; .csv, .tsv and .parquet have rows.
        draw: Asked before each record whether it is to be read.
        column: Only this column of a .parquet file is read. Without it, one object alone in a .json file is refused.

    Yields:
        Where the record is, and a text, a decoded JSON value, the columns of a row, a `RecordProblem` or a
        `RecordNote`. After a line of JSON that is not UTF-8 nothing more is read.
    """
    try:
        yield from READERS[extension_of(file)](file, draw, column)
    except RecordProblem as problem:
        yield problem.place, problem


def records_of_bytes(content: bytes, column: str | None = None) -> Records:
    """Read what has no name, such as standard input: JSON (lines) if it begins like objects, else one text."""
    try:
        text, note = decode_text(content)
        if note:
            yield "", RecordNote(note)
        if re.match(r"\s*(\{|\[\s*\{)", text):
            yield from _json_of(text, lambda: True, column)
        else:
            yield "", text
    except RecordProblem as problem:
        yield problem.place, problem


def _whole(text_of: Callable[[bytes], tuple[str, str]]) -> Reader:
    """How a file that is one text is read, by what gives its text and what there is to say of it."""

    def read(file: Path, draw: Draw, column: str | None) -> Records:
        if draw():
            text, note = text_of(_read(file))
            if note:
                yield "", RecordNote(note)
            yield "", text

    return read


def _table(file: Path, draw: Draw, column: str | None) -> Records:
    """Rows below a row of names; in a .csv file between commas, or semicolons or tabs if its first line has more."""
    text, note = decode_text(_read(file))
    if not text.strip():
        yield "", ""
        return
    if note:
        yield "", RecordNote(note)
    first = text.lstrip().split("\n", 1)[0]
    separator = "\t" if extension_of(file) == ".tsv" else max(",;\t", key=first.count)
    csv.field_size_limit(2**31 - 1)  # a document may be long
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    names: list[str] = []
    last = 0
    try:
        for row in rows:
            place, last = f"line {last + 1}", rows.line_num
            if not names:
                names = [name.strip() for name in row]
            elif row and len(row) != len(names):
                yield place, RecordProblem(f"{len(row)} fields between {separator!r}, must be {len(names)} as above")
            elif row and draw():
                yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise RecordProblem(f"broken table: {error}", f"line {last + 1}") from None


def _json_lines(file: Path, draw: Draw, column: str | None) -> Records:
    with _open(file) as stream:
        marked = byte_order_mark(stream.read(4)) or "utf-8"
        stream.seek(0)
        whole = None if marked.startswith("utf-8") else io.BytesIO(decode_text(stream.read())[0].encode())
        yield from _lines_of(whole or stream, draw)


def _lines_of(stream: IO[bytes], draw: Draw) -> Records:
    start = 0
    for number, line in enumerate(stream, start=1):
        line_start, start, place = start, start + len(line), f"line {number}"
        if not line.strip() or not draw():
            continue
        text = _decode(line.rstrip(b"\r\n"), line_start, place)
        try:
            yield place, json.loads(text)
        except json.JSONDecodeError as error:
            yield place, RecordProblem(f"broken JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError):
            yield place, RecordProblem(_TOO_MUCH)


def _json(file: Path, draw: Draw, column: str | None) -> Records:
    content = _read(file)
    yield from _json_of(decode_text(content)[0] if byte_order_mark(content) else _decode(content), draw, column)


def _json_of(text: str, draw: Draw, column: str | None) -> Records:
    if not text.strip():
        yield "", ""
        return
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Extra data"):
            yield from _lines_of(io.BytesIO(text.encode()), draw)
            return
        place = f"line {error.lineno}, column {error.colno}"
        raise RecordProblem(f"broken JSON: {error.msg}", place) from None
    except (ValueError, RecursionError):
        raise RecordProblem(_TOO_MUCH) from None
    if isinstance(records, dict) and column:
        records = [records]
    if not isinstance(records, list):
        raise RecordProblem(f"must be an array of objects with field {column!r}" if column else _NO_OBJECTS)
    for number, record in enumerate(records, start=1):
        if draw():
            yield f"record {number}", record


def _parquet(file: Path, draw: Draw, column: str | None) -> Records:
    """A batch of rows at a time; a file without the column gives one record that has the names alone."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise RecordProblem("reading .parquet needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            column = MESSAGES if column and column not in names and MESSAGES in names else column
            if column is not None and column not in names:
                yield "its columns", dict.fromkeys(names)
                return
            batches = table.iter_batches(batch_size=1024, columns=None if column is None else [column])
            for number, row in enumerate((row for rows in batches for row in rows.to_pylist()), start=1):
                if draw():
                    yield f"row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise RecordProblem(f"not a readable .parquet file: {first_line(error)}") from error


READERS: dict[str, Reader] = {
    ".txt": _whole(decode_text), ".md": _whole(decode_text), ".html": _whole(html_text), ".htm": _whole(html_text),
    ".docx": _whole(docx_text), ".pdf": _whole(pdf_text), ".csv": _table, ".tsv": _table,
    ".jsonl": _json_lines, ".json": _json, ".parquet": _parquet,
}  # fmt: skip
"""How a file is read, by its extension; all but .parquet also with .gz after it."""


def _open(file: Path) -> IO[bytes]:
    if file.suffix.lower() != ".gz":
        return file.open("rb")
    return io.BufferedReader(_Unpacked(file))


class _Unpacked(io.RawIOBase):
    """What is in a .gz file; one that would fill the memory is refused."""

    def __init__(self, file: Path) -> None:
        self._stream = gzip.open(file)  # noqa: SIM115  (closed with this)
        self._most, self._read = max(_MOST_UNPACKED, _UNPACKED_RATIO * file.stat().st_size), 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes, from the start."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of the stream."""
        return self._stream.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._read += len(content)
        if self._read > self._most:
            raise RecordProblem(
                f"unpacks to more than {self._most:,} bytes, which no packed text does: unpack it first"
            )
        return len(content)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()


def _read(file: Path) -> bytes:
    with _open(file) as stream:
        return stream.read()


def _decode(content: bytes, start: int = 0, place: str = "") -> str:
    """Decode UTF-8, as JSON must be, that begins at byte `start` of a file."""
    if (position := content.find(b"\0")) >= 0:
        raise RecordProblem(f"not a text but a binary file (or UTF-16): NUL at byte {start + position}", place)
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        wrong = f"invalid UTF-8 at byte {start + error.start} (0x{content[error.start]:02x})"
        raise RecordProblem(wrong, place) from None


# Tables: files whose every row must be right.


def read_rows(path: Path, columns: Sequence[str] = ()) -> list[Row]:
    """All rows of one file, whose name ends in one of `TABLE_EXTENSIONS`; each must be an object with these columns."""
    if not path.name.endswith(TABLE_EXTENSIONS):
        raise ValueError(f"{path}: cannot read this kind of file; it must end in {', '.join(TABLE_EXTENSIONS)}")
    rows = []
    for place, record in iterate_records(path):
        if isinstance(record, RecordProblem | RecordNote):
            raise ValueError(f"{path}, {place}: {record}" if place else f"{path}: {record}")
        if record == "":  # an empty file
            continue
        if not isinstance(record, dict):
            raise ValueError(f"{path}: {_NO_OBJECTS}")
        rows.append(record)
    return _with_columns(rows, columns, str(path))


def find_table(folder: Path, name: str) -> Path | None:
    """The file of a table in a folder, whatever its ending, or None; a name may have folders: `verbmem/forget`."""
    paths = (folder / f"{name}{extension}" for extension in TABLE_EXTENSIONS)
    return next((path for path in paths if path.is_file()), None)


def read_table(
    data: Path | None, name: str, columns: Sequence[str], hub: tuple[str, str, str], required: bool = True
) -> list[Row]:
    """Rows of a table that must have the given columns.

    Args:
        data: The folder; None: the Hugging Face hub (needs a network or a cached copy).
        name: The table's name without ending.
        columns: What every row must have.
        hub: Data set, subset and split on the hub.
        required: Whether a folder without the table is refused; else it gives no rows.
    """
    if data is None:
        try:
            from datasets import load_dataset
        except ImportError:
            needed = "reading it from the Hugging Face hub needs: pip install 'unteach[benchmarks]'"
            raise ValueError(f"{hub[0]}: {needed}, or name a folder with its tables") from None
        return _with_columns(load_dataset(*hub[:2], split=hub[2]).to_list(), columns, " ".join(hub))
    path = find_table(data, name)
    if path is None and required:
        raise ValueError(f"{data} has no table `{name}` with {', '.join(columns)}")
    return read_rows(path, columns) if path else []


def _with_columns(rows: list[Row], columns: Sequence[str], source: str) -> list[Row]:
    for number, row in enumerate(rows, 1):
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            there = shown(", ".join(row), bare=True)
            raise ValueError(f"{source}: row {number} has no {' and no '.join(missing)}; it has {there}")
    return rows


def write_texts(path: Path, texts: Sequence[str]) -> str:
    """Write texts as JSON lines, all or nothing; returns the path as the name of a source."""
    write_whole(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)
