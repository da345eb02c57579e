"""Reading tables of texts: JSON lines, JSON, Parquet, plain or gzipped, local or from the Hugging Face hub."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def read_rows(path: Path) -> list[Row]:
    """All rows of one file.

    Args:
        path: a file ending in one of `EXTENSIONS`. JSON holds a list of objects, JSON lines one per line.

    Raises:
        ValueError: for another ending, or content that is not a list of objects.
    """
    if not path.name.endswith(EXTENSIONS):
        raise ValueError(f"{path}: cannot read this kind of file; it must end in {', '.join(EXTENSIONS)}")
    if path.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        return parquet.read_table(path).to_pylist()
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    if ".jsonl" in path.name:
        rows = [_parse(line, path, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        rows = _parse(text, path, 1)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: a list of objects is needed, one per text or question")
    return rows


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {line + error.lineno - 1}: not valid JSON ({error.msg})") from None


def find_table(folder: Path, name: str) -> Path | None:
    """The file of a table in a folder, whatever its ending, or None.

    Args:
        folder: where to look.
        name: the table's name without ending, with folders: `verbmem/forget`.
    """
    for extension in EXTENSIONS:
        path = folder / f"{name}{extension}"
        if path.is_file():
            return path
    return None


def read_table(folder: Path, name: str, columns: Sequence[str]) -> list[Row] | None:
    """Rows of a table in a folder, or None where it is absent.

    Args:
        folder: where to look.
        name: the table's name without ending.
        columns: what every row must have.
    """
    path = find_table(folder, name)
    if path is None:
        return None
    rows = read_rows(path)
    check_columns(rows, columns, str(path))
    return rows


def read_hub_table(dataset: str, subset: str | None, split: str, columns: Sequence[str]) -> list[Row]:
    """Rows of a data set on the Hugging Face hub (needs the `datasets` package and a network or a cached copy).

    Args:
        dataset: its id.
        subset: its configuration, or None for the only one.
        split: its split.
        columns: what every row must have.
    """
    from datasets import load_dataset

    rows = load_dataset(dataset, subset, split=split).to_list()
    check_columns(rows, columns, f"{dataset} {subset} {split}")
    return rows


def check_columns(rows: Sequence[Row], columns: Sequence[str], source: str) -> None:
    """Refuse rows that lack a column.

    Args:
        rows: the rows.
        columns: the needed columns.
        source: where the rows are from, for the error.
    """
    for number, row in enumerate(rows, 1):
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            raise ValueError(f"{source}: row {number} has no {' and no '.join(missing)}; it has {', '.join(row)}")
