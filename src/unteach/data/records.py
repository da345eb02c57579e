"""The one reader of records: JSON lines, JSON and Parquet, plain or gzipped; tables of a folder or of the hub.

`iterate_records` goes on after a broken record and says what is wrong with it; `read_rows` refuses the whole file.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from unteach.errors import first_line
from unteach.writing import write_whole

__all__ = [
    "RecordProblem", "Row", "check_columns", "decode_bytes", "find_table", "iterate_records", "open_bytes",
    "read_rows", "read_table", "write_texts",
]  # fmt: skip

Row = dict[str, Any]
TABLE_EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


@dataclass(frozen=True, slots=True)
class RecordProblem:
    """What stands in place of a record that cannot be read."""

    text: str
    json: str = ""
    """The JSON parser's own message, where it is that which failed."""


def iterate_records(
    file: Path, *, draw: Callable[[], bool] | None = None, column: str | None = None
) -> Iterator[tuple[str, Any]]:
    """Read a file record by record.

    Args:
        file: .jsonl has a record per line; .json is one array, or one object, or has a record per line; .parquet.
        draw: Asked before each record whether it is to be read; None: all are.
        column: Only this column of a .parquet file is read. Without it, one object alone in a .json file is refused.

    Yields:
        Where the record is in the file (`line 3`; empty for the file as a whole), and the record: a decoded JSON value,
        the columns of a row, or a `RecordProblem`. After a line that is not UTF-8 nothing more is read.
    """
    name = file.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _parquet_rows(file, draw, column)
    elif name.endswith(".json"):
        yield from _json_records(file, draw, column)
    else:
        yield from _lines(file, draw)


def _lines(file: Path, draw: Callable[[], bool] | None) -> Iterator[tuple[str, Any]]:
    start = 0
    with open_bytes(file) as stream:
        for number, line in enumerate(stream, start=1):
            line_start, start = start, start + len(line)
            if not line.strip() or (draw and not draw()):
                continue
            text = decode_bytes(line.rstrip(b"\r\n"), line_start)
            if isinstance(text, RecordProblem):
                yield f"line {number}", text
                return
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                record = RecordProblem(f"broken JSON: {error.msg} at column {error.colno}", error.msg)
            yield f"line {number}", record


def _json_records(file: Path, draw: Callable[[], bool] | None, column: str | None) -> Iterator[tuple[str, Any]]:
    with open_bytes(file) as stream:
        text = decode_bytes(stream.read())
    if isinstance(text, RecordProblem):
        yield "", text
        return
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Extra data"):
            yield from _lines(file, draw)
        else:
            place = f"line {error.lineno}, column {error.colno}"
            yield place, RecordProblem(f"broken JSON: {error.msg}", error.msg)
        return
    if isinstance(records, dict) and column:
        records = [records]
    if not isinstance(records, list):
        needed = f"must be an array of objects with field {column!r}" if column else _NO_OBJECTS
        yield "", RecordProblem(needed)
        return
    for number, record in enumerate(records, start=1):
        if draw is None or draw():
            yield f"record {number}", record


def _parquet_rows(file: Path, draw: Callable[[], bool] | None, column: str | None) -> Iterator[tuple[str, Any]]:
    """A batch of rows at a time; a file without the column gives one record that has the names alone."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        yield "", RecordProblem("reading .parquet needs pyarrow: pip install pyarrow")
        return
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column is not None and column not in names:
                yield "its columns", dict.fromkeys(names)
                return
            number = 0
            for rows in table.iter_batches(batch_size=1024, columns=None if column is None else [column]):
                for row in rows.to_pylist():
                    number += 1
                    if draw is None or draw():
                        yield f"row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        yield "", RecordProblem(f"not a readable .parquet file: {first_line(error)}")


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading its bytes, unpacking .gz."""
    return gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb")  # type: ignore[return-value]


def decode_bytes(content: bytes, start: int = 0) -> str | RecordProblem:
    """Decode UTF-8 that begins at byte `start` of a file."""
    if (position := content.find(b"\0")) >= 0:
        return RecordProblem(f"not a text but a binary file (or UTF-16): NUL at byte {start + position}")
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return RecordProblem(f"invalid UTF-8 at byte {start + error.start} (0x{content[error.start]:02x})")


# Tables: files whose every row must be right.

_NO_OBJECTS = "a list of objects is needed, one per text or question"


def read_rows(path: Path) -> list[Row]:
    """All rows of one file whose name ends in one of `TABLE_EXTENSIONS`.

    Raises:
        ValueError: For another ending, or content that is not a list of objects.
    """
    if not path.name.endswith(TABLE_EXTENSIONS):
        raise ValueError(f"{path}: cannot read this kind of file; it must end in {', '.join(TABLE_EXTENSIONS)}")
    rows = []
    for place, record in iterate_records(path):
        if isinstance(record, RecordProblem):
            text = f"not valid JSON ({record.json})" if record.json else record.text
            raise ValueError(f"{path}, {place}: {text}" if place else f"{path}: {text}")
        if not isinstance(record, dict):
            raise ValueError(f"{path}: {_NO_OBJECTS}")
        rows.append(record)
    return rows


def find_table(folder: Path, name: str) -> Path | None:
    """The file of a table in a folder, whatever its ending, or None; a name may have folders: `verbmem/forget`."""
    paths = (folder / f"{name}{extension}" for extension in TABLE_EXTENSIONS)
    return next((path for path in paths if path.is_file()), None)


def read_table(
    data: Path | None, name: str, columns: Sequence[str], *, hub: tuple[str, str, str] | None = None
) -> list[Row] | None:
    """Rows of a table that must have the given columns; None where a folder has no such table.

    Args:
        data: The folder; None: the Hugging Face hub (needs a network or a cached copy).
        name: The table's name without ending.
        columns: What every row must have.
        hub: Data set, subset and split on the hub.
    """
    if data is None:
        if hub is None:
            raise ValueError(f"data is missing: name the folder with the table {name}")
        try:
            from datasets import load_dataset
        except ImportError:
            needed = "reading it from the Hugging Face hub needs: pip install 'unteach[benchmarks]'"
            raise ValueError(f"{hub[0]}: {needed}, or name a folder with its tables") from None
        rows, source = load_dataset(*hub[:2], split=hub[2]).to_list(), " ".join(hub)
    else:
        path = find_table(data, name)
        if path is None:
            return None
        rows, source = read_rows(path), str(path)
    check_columns(rows, columns, source)
    return rows


def check_columns(rows: Sequence[Row], columns: Sequence[str], source: str) -> None:
    """Refuse rows that lack a column; `source` says where they are from."""
    for number, row in enumerate(rows, 1):
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            raise ValueError(f"{source}: row {number} has no {' and no '.join(missing)}; it has {', '.join(row)}")


def write_texts(path: Path, texts: Sequence[str]) -> str:
    """Write texts as JSON lines, all or nothing; returns the path as the name of a source."""
    write_whole(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)
