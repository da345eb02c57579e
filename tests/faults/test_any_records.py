"""Files of documents and questions made up by hypothesis: they are read, or refused in lines that say why."""

import csv
import gzip
import io
import json
import zipfile

import pytest
from generated import VALUES, check_problems, tried
from hypothesis import given
from hypothesis import strategies as st

from unteach.corpora.own import question_problems, read_questions
from unteach.data import read_documents
from unteach.errors import InputError

FIELDS = st.sampled_from(["text", "text", "question", "answer", "messages", "prompt", "", "k" * 600, "\x1b[2J", "é"])
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["A text to forget.", " ", "a\0b", "\ud800", "\x1b]0;t\x07", "x" * 3000, "\u2028", "\x85", "a\r\nb"]
    ),
)
TURNS = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), TEXTS, min_size=1), max_size=2)
RIGHT = st.one_of(
    st.fixed_dictionaries({"text": TEXTS, "question": TEXTS, "answer": TEXTS}),
    st.fixed_dictionaries({"messages": TURNS}),
)
RECORDS = st.one_of(RIGHT, st.dictionaries(FIELDS, st.one_of(TEXTS, TURNS, VALUES), max_size=3), VALUES)
ENCODINGS = st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252"])


def in_json(record):
    """A record as JSON text: with escapes for what is no text, or a date, or a number that cannot be shown."""
    try:
        return json.dumps(record, default=str, skipkeys=True)
    except ValueError:
        return "9" * 5000


def table(rows):
    content = io.StringIO()
    csv.writer(content, lineterminator="\n").writerows([[text.replace("\0", "") for text in row] for row in rows])
    return content.getvalue()


def archive(parts):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, text in parts.items():
            file.writestr(name, text.encode("utf-8", "replace"))
    return content.getvalue()


LINES = st.lists(RECORDS.map(in_json), max_size=4).map("\n".join)
ROWS = st.lists(st.lists(TEXTS, min_size=2, max_size=3), max_size=3)
TAGS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<p>", "</p>", "<script>", "<!--", "&#x110000;", "&amp", "<!DOCTYPE", "<meta charset=x>", "<![CDATA["]
        ),
        TEXTS,
    )
)
CONTENTS = {
    ".jsonl": LINES,
    ".json": st.one_of(LINES, st.lists(RECORDS, max_size=3).map(in_json)),
    ".csv": ROWS.map(lambda rows: table([["text", "question", "answer"], *rows])),
    ".tsv": st.one_of(ROWS.map(table), TEXTS),
    ".txt": TEXTS,
    ".html": TAGS.map("".join),
    ".docx": TAGS.map("".join),
    ".pdf": TEXTS.map(lambda text: f"%PDF-1.4\n{text}\ntrailer <</Root 1 0 R>>\n%%EOF"),
    ".parquet": TEXTS,
}


@st.composite
def files(draw, extensions=tuple(CONTENTS)):
    """The name of a file and its bytes: sound ones, some cut or changed, some packed, some noise."""
    extension = draw(st.sampled_from(extensions))
    content = draw(CONTENTS[extension]).encode(draw(ENCODINGS), "replace")
    if extension == ".docx":
        content = archive({draw(st.sampled_from(["word/document.xml", "x"])): content.decode("latin-1")})
    packed = draw(st.booleans()) and extension != ".parquet"
    harm = draw(st.sampled_from(["none", "none", "none", "cut", "changed", "noise"]))
    if packed:
        content = gzip.compress(content, mtime=0)
    if harm == "cut":
        content = content[: draw(st.integers(0, len(content)))]
    elif harm == "changed" and content:
        place = draw(st.integers(0, len(content) - 1))
        content = content[:place] + draw(st.binary(max_size=3)) + content[place + 1 :]
    elif harm == "noise":
        content = draw(st.binary(max_size=40))
    return f"made_up{extension}{'.gz' if packed else ''}", content


def check_documents(name, content, folder):
    (folder / name).write_bytes(content)
    try:
        documents = read_documents(str(folder / name))
    except InputError as error:
        check_problems(error.problems)
    else:
        assert documents.texts
        assert all(text.strip() and text.encode() for text in documents.texts)
        check_problems([*documents.labels, *map(str, documents.notes)])
    finally:
        (folder / name).unlink()


def check_questions(name, content, folder):
    (folder / name).write_bytes(content)
    if problems := question_problems("questions", folder / name):
        assert len(problems) == 1
        check_problems(InputError(problems).problems)
    else:
        questions = read_questions(folder / name)
        assert questions
        assert all(part.encode() for question in questions for part in (question.question, question.answer))
    (folder / name).unlink()


KINDS = {
    "documents": (files(), check_documents),
    "records": (files((".jsonl", ".json", ".csv")), check_documents),
    "questions": (files((".jsonl", ".json", ".csv", ".tsv", ".parquet")), check_questions),
}


def check_all(kind, examples, folder):
    strategy, check = KINDS[kind]

    @tried(examples)
    @given(strategy)
    def check_one(made_up):
        check(*made_up, folder)

    check_one()


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_or_refused_in_lines(kind, tmp_path):
    check_all(kind, 60, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_files_are_read_or_refused_in_lines(kind, tmp_path):
    check_all(kind, 600, tmp_path)
