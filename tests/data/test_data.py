"""Documents from every source, as token batches, without what they share with what is to be forgotten."""

import gzip
import io
import json
import pickle
import random
import string
import zipfile
from collections import Counter
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from pyarrow import Table, parquet

from tiny_models import SENTENCES, chat_tokenizer, small_tokenizer
from unteach.corpora import micro
from unteach.data import Documents, ForgetBatches, GeneralText, overlap, pad, read_documents, special_ids, tokenise
from unteach.data import documents as module
from unteach.data.documents import encode_texts, skipped_summary
from unteach.data.overlap import MARGIN, SharedPassages
from unteach.data.records import read_rows
from unteach.errors import InputError

TEXT = " ".join(SENTENCES)


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
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    for name, content in {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines.encode()),
        "a.json": json.dumps(RECORDS, indent=1),
        "a.json.gz": gzip.compress(json.dumps(RECORDS).encode()),
        "lines.json": lines,
        "texts.json": json.dumps(["one", "zwei ü", ""]),
    }.items():
        write(tmp_path / name, content)
    parquet.write_table(Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    found = [read_documents(str(file)) for file in tmp_path.iterdir()]
    assert all(documents.texts == ["one", "zwei ü"] for documents in found)
    assert all([reason for _, reason in documents.skipped] == ["empty"] for documents in found)
    assert (len(found), len({documents.sha256 for documents in found})) == (7, 1)
    file = write(tmp_path / "b.jsonl", '{"body": "yes", "text": "no"}\n')
    assert read_documents(str(file), text_field="body").texts == ["yes"]


def test_every_problem_of_a_folder_is_reported_at_once(tmp_path: Path, monkeypatch) -> None:
    table = [
        ("a.txt", "good"),
        ("binary.txt", b"PK\x03\0\x04", ": not a text but a binary file (or UTF-16 without byte-order mark): NUL at"),
        ("none.md", b"Gr\xfc\x81e", ": invalid UTF-8 at byte 2 (0xfc), and not windows-1252 (Latin-1) either: save it"),
        ("half.txt", b"\xff\xfeG\0r", ": invalid UTF-16 at byte 4"),
        (
            "photo.png",
            b"\x89PNG",
            ": unknown extension '.png', must be one of .txt, .md, .html, .htm, .docx, .pdf, .csv",
        ),
        ("letter.docx", b"PK no", ": not a readable .docx file: File is not a zip file"),
        ("letter.pdf", b"%PDF", ": not a readable .pdf file: "),
        ("a.csv", "text,id\nA, b,1\n", ", line 2: 3 fields between ',', must be 2 as above"),
        ("b.csv", 'text\n"open', ", line 2: broken table: unexpected end of data"),
        ("c.csv", "body;id\nx;1\n", ": no field 'text' in line 2; there is 'body', 'id': set text_field"),
        ("README", "text", ": no extension"),
        ("on.jsonl", '{"text": \n[1]\n', ", line 1: broken JSON: Expecting value at column 10", ", line 2: must be an"),
        ("int.jsonl", '{"text": 5}\n', ", line 1: field 'text' is int, must be text"),
        ("many.jsonl", '{"a": 1, "b": 2}\n' * 3, ": no field 'text' in line 1 and 2 more; there is 'a', 'b': set text"),
        ("bytes.jsonl", b'{"text": "good"}\n{"text": "\xff"}\n', ", line 2: invalid UTF-8 at byte 27 (0xff)"),
        ("nul.jsonl", b'{"text": "good"}\n{"text": "\0"}\n{"text": \n', ", line 2: not a text but a binary file"),
        ("half.jsonl", '{"text": "a\\ud800"}\n', ", line 1: character 1 is half of a surrogate pair"),
        ("broken.json", '[{"text": "a"},\n {"text"]', ", line 2, column 9: broken JSON"),
        ("number.json", "3", ": must be an array of objects with field 'text'"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100)[:-12], ": cannot be read: "),
        ("broken.parquet", b"PAR1 and no more", ": not a readable .parquet file: "),
        ("fields.parquet", b"", ": no field 'text' in its columns; there is 'body': set text_field"),
    ]
    for name, content, *_ in table:
        write(tmp_path / name, content)
    parquet.write_table(Table.from_pylist([{"body": "x"}]), tmp_path / "fields.parquet")
    monkeypatch.setattr(module, "MOST_PROBLEMS", 30)
    problems = problems_of(tmp_path)
    starts = [f"documents is '{tmp_path}': {name}{end}" for name, _, *ends in table for end in ends]
    assert all(any(problem.startswith(start) for problem in problems) for start in starts)
    assert len(problems) == len(starts) == 22


def docx(body: str) -> bytes:
    """A Word document with this body."""
    names = {"w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main", "mc": "urn:mc"}
    spaces = " ".join(f'xmlns:{short}="{name}"' for short, name in names.items())
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as parts:
        parts.writestr("word/document.xml", f"<w:document {spaces}><w:body>{body}</w:body></w:document>")
    return file.getvalue()


def pdf(*pages: str) -> bytes:
    """A PDF file with a line of text on every page."""
    objects = ["<</Type/Catalog/Pages 2 0 R>>", "", "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    for text in pages:
        drawn = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
        objects.append(f"<</Length {len(drawn)}>>stream\n{drawn}\nendstream")
        page = "<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>"
        objects.append(f"{page}/Contents {len(objects)} 0 R>>")
    kids = " ".join(f"{number} 0 R" for number in range(5, len(objects) + 1, 2))
    objects[1] = f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>"
    file, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(file))
        file += f"{number} 0 obj{content}endobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = (
        f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer<</Size {size}/Root 1 0 R>>\nstartxref\n{len(file)}\n%%EOF"
    )
    return file + end.encode()


WORD = """<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r><w:t>Dear </w:t></w:r>
<w:ins><w:r><w:t>Ms Ö,</w:t></w:r></w:ins>
<w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p><w:tbl><w:tr><w:tc><w:p><w:r><w:t>cell</w:t></w:r></w:p>
</w:tc></w:tr></w:tbl><w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><mc:Fallback><w:t>twice</w:t></mc:Fallback></w:r></w:p>"""
PAGE = """<!DOCTYPE html><head><meta charset="utf-8"><title>Title</title><style>p {}</style>
<script>if (a < b) {}</script><body><h1>News &amp;
 more</h1><p>One <b>bold</b>word<br>two<ul><li>x<li>y</ul><pre>l1\nl2</pre><!-- no --><noscript>n</noscript>"""


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.csv", 'id,text\r\n1,"one, ""two"""\r\n\r\n2,"three\nlines"\r\n', ['one, "two"', "three\nlines"]),
        ("semicolon.csv", "\ufeffid;text\n1;a, b, c\n", ["a, b, c"]),
        ("long.csv", "text\n" + "x" * 200_000, ["x" * 200_000]),
        ("a.tsv", "text\tid\none, two\t1\n", ["one, two"]),
        ("a.csv.gz", gzip.compress(b"text\none\n", mtime=0), ["one"]),
        ("a.html", PAGE, ["News & more\nOne boldword\ntwo\nx\ny\nl1\nl2"]),
        ("sections.html", b"<p>One<![DATA[ x ]]> two<![ y>, three<![if word]>.</p>", ["One two, three."]),
        ("cut.html", b"<p>One <![DATA[ and no end", ["One <![DATA[ and no end"]),
        ("old.HTM", '<meta charset="windows-1251"><p>Привет'.encode("cp1251"), ["Привет"]),
        ("a.docx", docx(WORD), ["Dear Ms Ö,\ncell\na\tb"]),
        ("a.pdf", pdf("First page.", "", "Third page."), ["First page.\n\nThird page."]),
        ("wide.txt", "Grüße ☃".encode("utf-16"), ["Grüße ☃"]),
        ("wide.jsonl", '{"text": "ü"}\n{"text": "☃"}\n'.encode("utf-16"), ["ü", "☃"]),
        ("wide.csv", "text\n☃\n".encode("utf-16"), ["☃"]),
        ("wide.json", '["☃"]'.encode("utf-32"), ["☃"]),
    ],
)  # fmt: skip
def test_files_people_have(tmp_path: Path, name: str, content: str | bytes, texts: list[str]) -> None:
    documents = read_documents(str(write(tmp_path / name, content)))
    assert documents.texts == texts
    assert documents.notes == documents.skipped == []


def test_what_is_not_utf_8_is_read_as_latin_1_and_that_is_said(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "Grüße für 5 €".encode("cp1252"))
    write(tmp_path / "b.csv", "text\ncafé\n".encode("latin-1"))
    documents = read_documents(str(tmp_path))
    assert documents.texts == ["Grüße für 5 €", "café"]
    assert documents.notes[0].startswith(
        "documents: a.txt: invalid UTF-8 at byte 2 (0xfc), read as windows-1252 (Latin-1)"
    )
    assert len(documents.notes) == 2
    with pytest.raises(ValueError, match="b.csv: invalid UTF-8 at byte 8"):  # a table of questions must be right
        read_rows(tmp_path / "b.csv")


def test_unreadable_files_are_refused_or_skipped_and_counted(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": "good",
        "b.txt": b"\0",
        "c.png": b"\x89",
        "d.jsonl": '{"text": "x"}\n{"text"\n',
    }.items():
        write(tmp_path / name, content)
    assert [problem.split(": ")[1] for problem in problems_of(tmp_path)] == ["b.txt", "c.png", "d.jsonl, line 2"]
    documents = read_documents(str(tmp_path), skip_unreadable=True)
    assert documents.texts == ["good", "x"]
    assert [label for label, _ in documents.skipped] == ["b.txt", "c.png", "d.jsonl, line 2"]
    assert documents.skipped[1][1].startswith("unreadable: unknown extension '.png'")
    assert skipped_summary(documents.skipped) == "3 skipped (3 unreadable)"
    write(tmp_path / "e.jsonl", '{"body": "x"}\n')  # a wrong setting, not a broken file
    assert "set text_field" in problems_of(tmp_path, skip_unreadable=True)[0]
    (problem,) = problems_of(write(tmp_path / "scan.pdf", pdf("", "")))
    assert problem.endswith("there is no text in its 2 pages, only pictures perhaps: run text recognition on it")


def test_standard_input(monkeypatch) -> None:
    def piped(content: bytes) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        module._standard_input.cache_clear()
        first, second = (read_documents("-").texts for _ in range(2))  # a plan has read it before the run
        module._standard_input.cache_clear()
        assert first == second
        return first

    assert piped("One letter.\n\nStill the same.".encode("utf-16")) == ["One letter.\n\nStill the same."]
    assert piped(b'{"text": "a"}\n{"text": "b"}\n') == ["a", "b"]
    assert piped(b'[ {"text": "a"},\n {"text": "b"}]') == ["a", "b"]
    assert piped(b"[Music] not JSON") == ["[Music] not JSON"]
    with pytest.raises(InputError, match="there is no document in it: 1 skipped"):
        piped(b"")
    with pytest.raises(InputError, match="standard input, line 2: broken JSON"):
        piped(b'{"text": "a"}\n{"text"\n')
    assert problems_of("-", option="keep")[0].startswith("keep is '-': only documents can come from standard input")
    monkeypatch.setattr("sys.stdin", None)
    assert problems_of("-")[0].startswith("documents is '-': nothing is piped in")


def test_missing_and_empty_sources_and_many_problems(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "none") == [f"documents is '{tmp_path}/none': there is no such file or folder"]
    (tmp_path / "empty").mkdir()
    (problem,) = problems_of(tmp_path / "empty", option="general")
    assert problem.startswith(f"general is '{tmp_path}/empty': the folder is empty")
    for name, content, reason in (("a.jsonl", "\n\n", "it has no records"), ("a.txt", " ", "1 skipped (1 empty)")):
        file = write(tmp_path / name, content)
        assert problems_of(file)[0].endswith(f"there is no document in it: {reason}")
    assert read_documents("micro:general_heldout").texts == micro.documents("general_heldout")
    assert "micro:nonsense" in problems_of("micro:nonsense")[0]
    for name in ("a.csv", "a.json", "a.txt"):
        assert problems_of(write(tmp_path / "zero" / name, ""))[0].endswith("in it: 1 skipped (1 empty)")
    for number in range(30):
        write(tmp_path / "pictures" / f"{number:02}.png", b"")
    (problem,) = problems_of(tmp_path / "pictures")
    assert "no file in it can be read (30 .png), it must hold .txt, " in problem
    for number in range(30):
        write(tmp_path / "many" / f"{number:02}.docx", b"PK")
    problems = problems_of(tmp_path / "many")
    assert len(problems) == 21
    assert problems[-1].endswith("and 10 more problems like these")


def test_names_that_look_like_paths_are_never_asked_for_on_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_in_dataset", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for source in ("texts/mine", "./a/b", "../a", "a/b/c", "folder/", "plain", "owner/name.jsonl", "~/x"):
        assert problems_of(source) == [f"documents is {source!r}: there is no such file or folder"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


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
    (problem,) = problems_of("unteach-tests/not-there:news:train")
    assert problem.startswith("documents is 'unteach-tests/not-there:news:train': there is no such file or folder here")
    assert "the Hugging Face dataset cannot be read" in problem


@pytest.mark.usefixtures("offline")
def test_rows_of_a_streamed_dataset_are_read_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Rows:
        def shuffle(self, seed):  # type: ignore[no-untyped-def]
            return self

        def __iter__(self):  # type: ignore[no-untyped-def]
            return ({"body": "x" * 100, "number": read.append(number)} for number in range(50))

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Rows())
    assert len(read_documents("owner/name", text_field="body", max_bytes=1000)) == 10
    assert len(read) == 11
    (problem,) = problems_of("owner/name")
    assert problem.endswith("no field 'text' in row 1; there is 'body', 'number': set text_field")
    assert len(read) == 13


def test_large_sources_are_sampled_evenly_and_the_same_for_a_seed(tmp_path: Path) -> None:
    texts = [f"{number:04} " + "x" * 95 for number in range(2000)]
    file = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    sample, again, other = (read_documents(str(file), max_bytes=40_000, seed=seed) for seed in (3, 3, 4))
    assert sample == again != other
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
    assert aside == documents.set_aside(5, seed=1)[1] != documents.set_aside(5, seed=2)[1]
    assert documents.labels[0] == "document 1"


def words(count: int, seed: int) -> str:
    """Different random words for every seed."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=7)) for _ in range(count))


def test_truncate_keeps_the_beginning_as_the_tokenizer_gives_it() -> None:
    tokenizer = small_tokenizer()
    whole = tokenizer(TEXT)["input_ids"]
    tokens = tokenise(Documents("d", [TEXT, "The"]), tokenizer, mode="truncate", max_tokens=20)
    assert tokens.sequences == [whole[:20], tokenizer("The")["input_ids"]]
    count, left = 20 + len(tokens.sequences[1]), len(whole) - 20
    assert tokens.counts == {"documents": 2, "skipped": 0, "sequences": 2, "tokens": count, "cut": 1, "left_out": left}
    assert tokens.summary() == (f"2 documents, {count} tokens in 2 sequences; 1 documents cut, {left} tokens left out")


@pytest.mark.parametrize("begin", [True, False])
def test_chunks_hold_every_token_once_and_begin_like_a_text(begin: bool) -> None:
    tokenizer = small_tokenizer(begin=begin)
    bare = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    tokens = tokenise(Documents("d", [TEXT]), tokenizer, mode="chunk", max_tokens=16)
    before = [0] if begin else []
    assert special_ids(tokenizer) == (before, [])
    assert all(sequence[: len(before)] == before for sequence in tokens.sequences)
    joined = [token for sequence in tokens.sequences for token in sequence[len(before) :]]
    left_out = tokens.counts["left_out"]
    assert joined == bare[: len(bare) - left_out]
    assert left_out <= (0 if begin else 1)  # an end of one token can only be used after a begin-of-text id
    assert {len(sequence) for sequence in tokens.sequences[:-1]} == {16}


def test_documents_under_two_tokens_are_skipped_and_counted() -> None:
    tokenizer = small_tokenizer(begin=False)
    documents = Documents("d", ["a", TEXT, "b"], ["first", "second", "third"], [("zeroth", "empty")])
    tokens = tokenise(documents, tokenizer, mode="chunk", max_tokens=512)
    assert tokens.sequences == [tokenizer(TEXT)["input_ids"]]
    reason = "shorter than two tokens"
    assert tokens.skipped == [("zeroth", "empty"), ("first", reason), ("third", reason)]
    assert (tokens.counts["documents"], tokens.counts["skipped"]) == (1, 3)
    assert tokens.summary().endswith("; 3 skipped (1 empty, 2 shorter than two tokens)")
    with pytest.raises(InputError, match=r"'x': no document has two tokens or more: 1 skipped \(1 shorter than two"):
        tokenise(Documents("x", ["a"]), tokenizer, mode="truncate", max_tokens=8)


def test_long_inputs_are_encoded_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [TEXT[:length] for length in range(20, 60)]
    whole = list(encode_texts(small_tokenizer(), texts))
    monkeypatch.setattr("unteach.data.encoding.BLOCK", 100)
    assert list(encode_texts(small_tokenizer(), texts)) == whole == Documents("d", texts).encode(small_tokenizer())


def test_wrong_settings_name_what_is_allowed() -> None:
    documents, tokenizer, batches = Documents("d", [TEXT]), small_tokenizer(), ForgetBatches([[1, 2]], seed=0)
    for call, message in (
        (lambda: tokenise(documents, tokenizer, mode="cut", max_tokens=8), "mode is 'cut', must be one of truncate, "),
        (lambda: tokenise(documents, tokenizer, mode="chunk", max_tokens=1), "max_tokens is 1, must be at least 2"),
        (lambda: GeneralText(documents, tokenizer, tokens=1), "tokens is 1, must be at least 2"),
        (lambda: batches.batch(0, 0), "size is 0"),
        (lambda: batches.batch(-1, 2), "step is -1"),
        (lambda: ForgetBatches([], seed=0), "no sequence"),
        (lambda: documents.set_aside(1, 0), "count is 1, must be at least 0 and less than the 1 documents"),
        (lambda: Documents("name", ["a", "b"], ["only one"]), "labels are 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(("count", "size"), [(10, 4), (7, 7), (23, 5), (5, 1)])
def test_every_epoch_has_every_sequence_once(count: int, size: int) -> None:
    batches = ForgetBatches([[number, number] for number in range(count)], seed=0)
    row = [sequence[0] for step in range(4 * count) for sequence in batches.batch(step, size)]
    epochs = [row[start : start + count] for start in range(0, 4 * count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert batches.steps_per_epoch(size) == -(-count // size)
    seen = {number for step in range(batches.steps_per_epoch(size)) for number in batches.numbers(step, size)}
    assert seen == set(range(count))


def test_forget_batches_are_a_function_of_seed_and_step() -> None:
    sequences = [[number, 1] for number in range(50)]
    forwards = [ForgetBatches(sequences, seed=3).batch(step, 8) for step in range(40)]
    fresh = ForgetBatches(sequences, seed=3)
    backwards = [fresh.batch(step, 8) for step in reversed(range(40))]
    assert forwards == backwards[::-1]
    assert forwards != [ForgetBatches(sequences, seed=4).batch(step, 8) for step in range(40)]
    few = ForgetBatches(sequences[:3], seed=0)  # than the batch size: all are taken once
    assert all(sorted(few.batch(step, 40)) == sequences[:3] for step in range(5))


def test_no_global_random_state_is_touched() -> None:
    state = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    ForgetBatches([[1, 2]] * 9, seed=0).batch(3, 4)
    GeneralText([TEXT] * 9, small_tokenizer(), tokens=16, exclude=["x"]).batch(3, 4)
    Documents("d", ["a", "b"]).set_aside(1, 0)
    assert random.getstate() == state[0]
    assert (np.random.get_state()[1] == state[1]).all()
    assert torch.equal(torch.get_rng_state(), state[2])


def test_general_chunks_are_the_joined_documents_cut_without_padding() -> None:
    tokenizer = small_tokenizer()
    general = GeneralText(Documents("g", SENTENCES), tokenizer, tokens=16)
    joined: list[int] = []
    for sentence in SENTENCES:
        joined += ([1, 0] if joined else []) + tokenizer(sentence, add_special_tokens=False)["input_ids"]
    count = len(joined) // 15
    assert general.chunks.shape == (count, 16)
    assert general.chunks.dtype == np.int32
    assert (general.chunks[:, 0] == 0).all()
    assert general.chunks[:, 1:].ravel().tolist() == joined[: count * 15]
    left = len(joined) - 15 * count
    assert general.counts == {"documents": 3, "chunks": count, "tokens": 16 * count, "left_out": left}
    assert general.summary() == f"3 documents, {16 * count} tokens in {count} chunks"
    without = GeneralText(SENTENCES, small_tokenizer(begin=False), tokens=16)
    assert (without.chunks == 1).sum() == 2  # the end-of-text id between three documents


def test_general_batches_are_independent_draws_by_seed_and_step() -> None:
    texts = [words(20, seed) for seed in range(60)]
    general, again, other = (GeneralText(texts, small_tokenizer(), tokens=16, seed=seed) for seed in (5, 5, 6))
    batches = [general.batch(step, 8) for step in range(200)]
    assert again.batch(150, 8) == batches[150]
    assert all(len({tuple(chunk) for chunk in batch}) == 8 for batch in batches)
    drawn = Counter(tuple(chunk) for batch in batches for chunk in batch)
    assert len(general) == 609  # of which 1,600 draws show 1 - exp(-1600/609) = 93 %
    assert 0.9 * 609 < len(drawn) < 0.96 * 609
    assert batches[0] not in (batches[1], other.batch(0, 8))
    assert len(general.batch(0, 10**6)) == len(general)


def test_too_little_general_text_is_refused() -> None:
    with pytest.raises(InputError, match=r"general is 'g': .* tokens of text, must be at least the 511 of one chunk"):
        GeneralText(Documents("g", SENTENCES), small_tokenizer())
    text = words(100, 0)
    with pytest.raises(InputError, match=r"0 tokens of text \(1 passages \(100 words\) in 1 documents are shared"):
        GeneralText(Documents("g", [text]), small_tokenizer(), exclude=Documents("f", [text]))


def test_shared_passages_are_found_whatever_the_case_and_punctuation() -> None:
    article = words(40, 1).split()
    changed = "«" + ",\n".join(article[10:30]).upper() + "!»"
    for text, expected in (
        (f"{words(5, 2)} {changed} {words(5, 3)}", [(5, 25)]),
        (" ".join(article[10:22]), []),  # 12 words in a row are not enough
        (" ".join(article[10:23]), [(0, 13)]),
        (" ".join(reversed(article)), []),
        (words(200, 4), []),
        ("", []),
        (" ".join([*article[:13], "other", *article[14:30]]), [(0, 13), (14, 30)]),
    ):
        assert SharedPassages([" ".join(article)]).find(text) == expected
    accented = " ".join(f"cafe\u0301{number}" for number in range(13))
    assert SharedPassages([accented]).find(accented.replace("e\u0301", "é")) == [(0, 13)]
    short = SharedPassages(["Anna Berg lives at 12 Elm Street", "too short to find"])  # looked for whole
    assert short.find("They say Anna Berg lives at 12 Elm street, too short to find.") == [(2, 9)]
    chinese = "昨日下午市政府宣布新的图书馆将于明年春天开放"
    assert SharedPassages([chinese]).find(f"报道。{chinese}") == [(2, 24)]


def test_shared_passages_are_cut_out_with_what_stands_around_them() -> None:
    article, before, after = words(30, 1), words(MARGIN + 80, 2), words(MARGIN + 20, 3)
    general = Documents("g", [words(50, 4), f"{before} {article} {after}", article, words(60, 5)])
    report, cleaned = overlap(Documents("f", [article]), general)
    kept = " ".join(before.split()[:80])
    assert cleaned.texts == [general.texts[0], kept, general.texts[3]]
    assert cleaned.labels == ["document 1", "document 2", "document 4"]
    assert (report.documents, report.passages, report.words, report.dropped) == (2, 2, 60, 1)
    assert report.cut_words == (MARGIN + 30 + MARGIN + 20) + 30
    assert report.summary() == (
        f"2 passages (60 words) in 2 documents are shared with the forget documents: {report.cut_words} words cut out,"
        " 1 documents dropped"
    )
    report, cleaned = overlap(Documents("f", [words(30, 9)]), general)
    assert cleaned.texts == general.texts
    assert report.summary() == "no passage shared with the forget documents"


def test_general_chunks_hold_nothing_of_the_forget_documents() -> None:
    articles, tokenizer = Documents("f", [words(100, seed) for seed in range(5)]), small_tokenizer()
    texts = [words(400, 100 + seed) for seed in range(20)]
    mixed = Documents("g", [f"{text} {article}" for text, article in zip(texts, articles.texts * 4, strict=True)])
    general, (report, cleaned) = GeneralText(mixed, tokenizer, tokens=32, exclude=articles), overlap(articles, mixed)
    assert (general.chunks == GeneralText(cleaned, tokenizer, tokens=32).chunks).all()
    assert (general.counts["documents"], report.documents, report.words) == (20, 20, 2000)
    assert general.summary().endswith(report.summary())
    assert not {word for text in articles.texts for word in text.split()} & set(" ".join(cleaned.texts).split())


def test_pad_fills_up_on_the_right() -> None:
    input_ids, lengths = pad([[5, 6, 7], [8, 9]], pad_id=3)
    assert (input_ids.tolist(), lengths.tolist()) == ([[5, 6, 7], [8, 9, 3]], [3, 2])
    assert input_ids.dtype == lengths.dtype == torch.int64


# ---- conversations ---------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "Who baked?"}, {"role": "assistant", "content": "Ann Lee."}]


def test_conversations_are_read_in_every_kind_of_file_and_kept_apart_from_texts(tmp_path: Path) -> None:
    rows = [{"messages": TURNS, "id": 1}, {"text": "plain"}, {"text": "its text", "messages": TURNS}]
    lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    found = read_documents(str(lines))
    assert found.texts == ["user: Who baked?\nassistant: Ann Lee.", "plain", "its text"]
    assert found.conversations == {0: TURNS}
    parquet.write_table(Table.from_pylist([{"messages": TURNS}]), tmp_path / "b.parquet")
    assert read_documents(str(tmp_path / "b.parquet")).texts == found.texts[:1]


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "user", "content": None}], {"role": "user"}])
def test_what_is_no_conversation_is_named(tmp_path: Path, messages: object) -> None:
    (problem,) = problems_of(write(tmp_path / "a.jsonl", json.dumps({"messages": messages})))
    assert "line 1: field 'messages' must be a list of objects with role and content, both text" in problem


def test_conversations_take_the_form_of_the_model_with_its_special_tokens_once() -> None:
    tokenizer = chat_tokenizer()
    whole = Documents("source", ["plain", "user: Who baked?\nassistant: Ann Lee."], conversations={1: TURNS})
    found = whole.in_form_of(tokenizer)
    assert found.texts == ["plain", "[user] Who baked?</s>[assistant] Ann Lee.</s>"]
    templated = tokenizer(tokenizer.apply_chat_template(TURNS, tokenize=False), add_special_tokens=False)["input_ids"]
    (ids,) = tokenise(Documents("one", found.texts[1:]), tokenizer, mode="chunk", max_tokens=256).sequences
    assert list(ids) == templated
    assert templated.count(tokenizer.bos_token_id) == 1
    assert whole.in_form_of(small_tokenizer()).texts == whole.texts, "it has no template"


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    turns = [{"role": "tool", "content": "x"}]
    refused = Documents("source", ["tool: x"], ["file.jsonl, line 7"], conversations={0: turns})
    with pytest.raises(InputError, match=r"source, file\.jsonl, line 7: .*template refuses.*tools are not known"):
        refused.in_form_of(chat_tokenizer())
