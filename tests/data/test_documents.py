from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from unteach.data import documents as module
from unteach.data.documents import Documents, read_documents, skipped_summary
from unteach.errors import InputError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def problems_of(source: Path | str, **options: object) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_documents(str(source), **options)  # type: ignore[arg-type]
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def test_error_has_one_line_per_problem_and_survives_pickling() -> None:
    error = InputError(["first\n  line", "second"])
    assert error.problems == ["first line", "second"]
    assert str(error) == "first line\nsecond"
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
    assert InputError("one\nproblem").problems == ["one problem"]


def test_folder_is_read_in_the_order_of_names_with_its_folders(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "second\r\nline")
    write(tmp_path / "a.md", "\ufefffirst")
    write(tmp_path / "c" / "d.TXT", "fünfte")
    write(tmp_path / "c" / "a.jsonl", '{"text": "third"}\n\n{"text": "fourth"}\n')
    write(tmp_path / ".hidden" / "x.bin", b"\0")
    write(tmp_path / "e.txt", " \n\t")
    documents = read_documents(str(tmp_path))
    assert documents.texts == ["first", "second\r\nline", "third", "fourth", "fünfte"]
    assert documents.labels == ["a.md", "b.txt", "c/a.jsonl, line 1", "c/a.jsonl, line 3", "c/d.TXT"]
    assert documents.skipped == [("e.txt", "empty")]
    assert skipped_summary(documents.skipped) == "1 skipped (1 empty)"
    assert documents.name == str(tmp_path)


RECORDS = [{"text": "one", "id": 1}, {"text": "zwei ü", "id": 2}, {"text": None, "id": 3}]


def test_record_files_of_every_kind_give_the_same_documents(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    parquet.write_table(Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    files = [
        write(tmp_path / "a.jsonl", lines),
        write(tmp_path / "a.jsonl.gz", gzip.compress(lines.encode())),
        write(tmp_path / "a.json", json.dumps(RECORDS, indent=1)),
        write(tmp_path / "a.json.gz", gzip.compress(json.dumps(RECORDS).encode())),
        write(tmp_path / "lines.json", lines),
        write(tmp_path / "texts.json", json.dumps(["one", "zwei ü", ""])),
        tmp_path / "a.parquet",
    ]
    for file in files:
        documents = read_documents(str(file))
        assert documents.texts == ["one", "zwei ü"], file
        assert [reason for _, reason in documents.skipped] == ["empty"], file
    assert len({read_documents(str(file)).sha256 for file in files}) == 1
    file = write(tmp_path / "b.jsonl", '{"body": "yes", "text": "no"}\n')
    assert read_documents(str(file), text_field="body").texts == ["yes"]


def test_every_problem_of_a_folder_is_reported_at_once(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    for name, content in {
        "a.txt": "good",
        "binary.txt": b"PK\x03\0\x04",
        "latin.md": b"Gr\xfc\xdfe",
        "photo.png": b"\x89PNG",
        "README": "no extension",
        "broken.jsonl": '{"text": "good"}\n{"text": \n{"text": 5}\n[1]\n',
        "fields.jsonl": '{"body": "x", "id": 1}\n' * 3,
        "bytes.jsonl": b'{"text": "good"}\n{"text": "\xff"}\n',
        "nul.jsonl": b'{"text": "good"}\n{"text": "\0"}\n{"text": \n',
        "half.jsonl": '{"text": "a\\ud800"}\n',
        "broken.json": '[{"text": "a"},\n {"text"]',
        "number.json": "3",
        "cut.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 100)[:-12],
        "broken.parquet": b"PAR1 and no more",
    }.items():
        write(tmp_path / name, content)
    parquet.write_table(Table.from_pylist([{"body": "x"}]), tmp_path / "fields.parquet")
    start = f"documents is '{tmp_path}': "
    problems = problems_of(tmp_path)
    assert all(problem.startswith(start) for problem in problems)
    found = "\n".join(problem.removeprefix(start) for problem in problems)
    for expected in (
        "binary.txt: not a text but a binary file (or UTF-16): NUL at byte 3",
        "latin.md: invalid UTF-8 at byte 2 (0xfc)",
        "photo.png: unknown extension '.png', must be one of .txt, .md, .jsonl, .json, .parquet",
        "README: no extension",
        "broken.jsonl, line 2: broken JSON: Expecting value at column 10",
        "broken.jsonl, line 3: field 'text' is int, must be text",
        "broken.jsonl, line 4: must be an object with field 'text'",
        "fields.jsonl: no field 'text' in line 1 and 2 more; there is 'body', 'id': set text_field",
        "bytes.jsonl, line 2: invalid UTF-8 at byte 27 (0xff)",
        "nul.jsonl, line 2: not a text but a binary file (or UTF-16): NUL at byte 27",
        "half.jsonl, line 1: character 1 is half of a surrogate pair",
        "broken.json, line 2, column 9: broken JSON",
        "number.json: must be an array of objects with field 'text'",
        "cut.jsonl.gz: cannot be read: ",
        "broken.parquet: not a readable .parquet file: ",
        "fields.parquet: no field 'text' in its columns; there is 'body': set text_field",
    ):
        assert expected in found
    assert len(problems) == 16


def test_missing_and_empty_sources_and_many_problems(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "none") == [f"documents is '{tmp_path}/none': there is no such file or folder"]
    (tmp_path / "empty").mkdir()
    assert problems_of(tmp_path / "empty", option="general")[0].startswith(
        f"general is '{tmp_path}/empty': the folder is empty"
    )
    for name, content, reason in (("a.jsonl", "\n\n", "it has no records"), ("a.txt", " ", "1 skipped (1 empty)")):
        file = write(tmp_path / name, content)
        assert problems_of(file)[0].endswith(f"there is no document in it: {reason}")
    for number in range(30):
        write(tmp_path / "many" / f"{number:02}.pdf", b"%PDF")
    problems = problems_of(tmp_path / "many")
    assert len(problems) == 21
    assert problems[-1].endswith("and 10 more problems like these")


def test_names_that_look_like_paths_are_never_asked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_in_dataset", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for source in ("texts/mine", "./a/b", "../a", "a/b/c", "folder/", "plain", "owner/name.jsonl", "~/x"):
        assert problems_of(source) == [f"documents is {source!r}: there is no such file or folder"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("offline")
def test_a_dataset_that_cannot_be_had_is_one_line() -> None:
    (problem,) = problems_of("unteach-tests/not-there:news:train")
    assert problem.startswith("documents is 'unteach-tests/not-there:news:train': there is no such file or folder here")
    assert "the Hugging Face dataset cannot be read" in problem


@pytest.mark.usefixtures("offline")
def test_dataset_names_have_subset_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_hub_name", lambda source: True)
    monkeypatch.chdir(tmp_path)  # where the name is a folder here, the library reads that
    splits = "[{split: train, path: a.jsonl}, {split: test, path: b.jsonl}]"
    write(tmp_path / "owner/name/README.md", f"---\nconfigs:\n- config_name: news\n  data_files: {splits}\n---\n")
    for file in "ab":
        write(tmp_path / f"owner/name/{file}.jsonl", "".join(f'{{"text": "{file}{n}"}}\n' for n in range(5)))
    for source, expected in (("owner/name:", "a"), ("owner/name:news", "a"), ("owner/name:news:test", "b")):
        assert read_documents(source).texts == [f"{expected}{n}" for n in range(5)]
    assert len(read_documents("owner/name:", max_bytes=6, seed=1)) == 3


@pytest.mark.usefixtures("offline")
def test_rows_of_a_streamed_dataset_are_read_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    read = []

    def rows() -> Iterator[dict[str, object]]:
        for number in range(50):
            read.append(number)
            yield {"body": "x" * 100, "number": number}

    streamed = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: streamed)
    monkeypatch.setattr(streamed, "shuffle", lambda seed: streamed)
    assert len(read_documents("owner/name", text_field="body", max_bytes=1000)) == 10
    assert len(read) == 11
    (problem,) = problems_of("owner/name")
    assert problem.endswith("no field 'text' in row 1; there is 'body', 'number': set text_field")
    assert len(read) == 13


def test_embedded_parts_have_names() -> None:
    from unteach.corpora import micro

    assert read_documents("micro:general_heldout").texts == micro.documents("general_heldout")
    assert "micro:nonsense" in problems_of("micro:nonsense")[0]


def test_large_sources_are_sampled_evenly_and_the_same_for_a_seed(tmp_path: Path) -> None:
    texts = [f"{number:04} " + "x" * 95 for number in range(2000)]
    file = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    sample = read_documents(str(file), max_bytes=40_000, seed=3)
    assert sample.texts == read_documents(str(file), max_bytes=40_000, seed=3).texts
    assert sample.texts != read_documents(str(file), max_bytes=40_000, seed=4).texts
    assert sum(map(len, sample.texts)) <= 40_100
    assert 250 < len(sample) <= 400
    numbers = [int(text[:4]) for text in sample.texts]
    assert numbers == sorted(numbers)
    assert all(sum(start <= number < start + 500 for number in numbers) > 25 for start in (0, 500, 1000, 1500))
    for number, text in enumerate(texts[:100]):
        write(tmp_path / "folder" / f"{number:03}.txt", text)
    assert 10 < len(read_documents(str(tmp_path / "folder"), max_bytes=3_000)) <= 31
    assert read_documents(str(file), max_bytes=10**9).texts == texts


def test_set_aside_splits_without_loss() -> None:
    documents = Documents("name", [f"text {number}" for number in range(20)])
    rest, aside = documents.set_aside(5, seed=1)
    assert (len(rest), len(aside)) == (15, 5)
    assert sorted(rest.labels + aside.labels) == sorted(documents.labels)
    assert aside.texts == documents.set_aside(5, seed=1)[1].texts
    assert aside.texts != documents.set_aside(5, seed=2)[1].texts
    assert documents.labels[0] == "document 1"
