"""Reading benchmarks from folders, in every file format, and the real data where it lies beside the checkout."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from unteach.corpora import Question
from unteach.corpora.catalog import (
    NAMES,
    add_multiple_choice,
    load_benchmark,
    load_mmlu,
    load_muse,
    load_tofu,
    muse_documents,
    tofu_pairs,
)
from unteach.data.records import read_rows, read_table

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real data sets are not at {SHARED}")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.name.endswith(".json.gz"):
        path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    else:
        path.write_text(lines if path.name.endswith(".jsonl") else json.dumps(rows), encoding="utf-8")


@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet"])
def test_every_file_format(tmp_path, extension):
    rows = [{"text": "één\u2028line separator", "number": 1}, {"text": "two", "number": 2}]
    write(tmp_path / f"table{extension}", rows)
    assert read_rows(tmp_path / f"table{extension}") == rows


def test_unusable_files(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "no list"}', encoding="utf-8")
    with pytest.raises(ValueError, match="a list of objects is needed"):
        read_rows(tmp_path / "a.json")
    (tmp_path / "b.jsonl").write_text('{"text": 1}\n{"text": \n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: not valid JSON"):
        read_rows(tmp_path / "b.jsonl")


def muse_folder(folder):
    write(folder / "verbmem" / "forget.jsonl", [{"prompt": "p", "gt": "g"}])
    write(folder / "knowmem" / "forget_qa.json", [{"question": "q", "answer": "a"}])
    write(folder / "knowmem" / "forget_qa_icl.parquet", [{"question": "e", "answer": "x"}])
    for part in ("forget", "holdout"):
        write(folder / "privleak" / f"{part}.jsonl.gz", [{"text": part}])
    write(folder / "raw" / "forget.jsonl", [{"text": "one"}, {"text": "two"}, {"text": "one"}])
    return folder


def test_muse_from_a_folder(tmp_path):
    benchmark = load_benchmark("muse-news", muse_folder(tmp_path))
    assert benchmark.name == "muse-news"
    assert (benchmark.verbatim_forget[0].prompt, benchmark.verbatim_forget[0].expected) == ("p", "g")
    assert benchmark.knowledge_forget == (Question("q", "a"),)
    assert benchmark.knowledge_forget_examples == (Question("e", "x"),)
    assert benchmark.knowledge_retain == ()
    assert benchmark.membership_forget == ("forget",)
    assert benchmark.membership_retain == ()
    assert benchmark.notes == ()
    assert benchmark.settings.verbatim_tokens == 128
    assert muse_documents("muse-news", tmp_path) == ["one", "two", "one"]
    assert muse_documents("muse-news", tmp_path, deduplicate=True) == ["one", "two"]
    with pytest.raises(ValueError, match="no table sust/forget_2"):
        muse_documents("muse-news", tmp_path, subset="sust", split="forget_2")


def test_muse_refusals_and_the_stand_in(tmp_path):
    with pytest.raises(ValueError, match="none of MUSE's tables"):
        load_muse("muse-news", tmp_path)
    with pytest.raises(ValueError, match="allowed are muse-news, muse-books"):
        load_muse("muse-films", tmp_path)
    write(muse_folder(tmp_path) / "raw" / "retain_standin.jsonl", [{"text": "x"}])
    assert "not MUSE-News scores" in load_muse("muse-news", tmp_path).notes[0]
    write(tmp_path / "verbmem" / "forget.jsonl", [{"prompt": "p"}])
    with pytest.raises(ValueError, match="row 1 has no gt"):
        load_muse("muse-news", tmp_path)


MMLU_ROW = {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "sums"}
WRITTEN = "Question: 2 + 2?\n\nChoices:\nA. 3\nB. 4\nC. 5\nD. 6\n\nCorrect answer:"


def test_mmlu_with_a_fixed_prompt(tmp_path):
    write(tmp_path / "validation.jsonl", [MMLU_ROW])
    with pytest.raises(ValueError, match=r"neither prompt\.txt nor a table `dev`"):
        load_mmlu(tmp_path)
    (tmp_path / "prompt.txt").write_text("Worked examples.\n", encoding="utf-8")
    [question] = load_benchmark("mmlu", tmp_path).multiple_choice
    assert question.prompt == "Worked examples.\n\n" + WRITTEN
    assert (question.answer, question.choices, question.question) == (1, 4, "2 + 2?")
    added = add_multiple_choice(load_muse("muse-news", muse_folder(tmp_path)), tmp_path)
    assert added.multiple_choice == (question,)
    with pytest.raises(ValueError, match="no table `validation`"):
        load_mmlu(tmp_path / "raw")


def test_mmlu_with_examples_of_the_subject(tmp_path):
    other = MMLU_ROW | {"subject": "other", "question": "1 + 1?"}
    write(tmp_path / "validation.jsonl", [MMLU_ROW])
    write(tmp_path / "dev.jsonl", [other] + [MMLU_ROW | {"answer": k % 4} for k in range(7)])
    [question] = load_mmlu(tmp_path)
    assert question.prompt.count("Question:") == 6  # five worked examples
    assert question.prompt == "".join(f"{WRITTEN} {'ABCD'[k % 4]}\n\n" for k in range(5)) + WRITTEN
    assert question.subject == "sums"


def test_tofu_from_a_folder(tmp_path):
    full = {"question": "q", "answer": "a", "paraphrased_answer": "p", "perturbed_answer": ["x", "y"]}
    short = {"question": "q", "answer": "a", "perturbed_answer": ["x"]}
    write(tmp_path / "forget01_perturbed.jsonl", [full])
    write(tmp_path / "retain_perturbed.jsonl", [full])
    write(tmp_path / "real_authors_perturbed.jsonl", [short])
    with pytest.raises(ValueError, match="no table `world_facts_perturbed`"):
        load_tofu("forget01", tmp_path)
    write(tmp_path / "world_facts_perturbed.jsonl", [short])
    tofu = load_benchmark("tofu-forget01", tmp_path).tofu
    assert tofu.forget[0].paraphrased_answer == "p"
    assert tofu.real_authors[0].paraphrased_answer == "a"
    assert tofu.retain[0].perturbed_answers == ("x", "y")
    write(tmp_path / "full.jsonl", [full])
    assert tofu_pairs("full", tmp_path) == (Question("q", "a"),)
    with pytest.raises(ValueError, match="allowed are forget01, forget05, forget10"):
        load_tofu("forget20", tmp_path)


def test_names(tmp_path):
    for wrong in ("muse", "tofu-forget20", "muse-films"):
        with pytest.raises(ValueError, match=f"allowed are {', '.join(NAMES)}"):
            load_benchmark(wrong)
    with pytest.raises(ValueError, match="there is no such folder"):
        load_benchmark("muse-news", tmp_path / "missing")


def test_hub_layout_through_the_datasets_library(tmp_path, monkeypatch):
    """`datasets` reads a local folder with the hub's layout just as it reads the hub."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    write(folder / "verbmem" / "forget.jsonl", [{"prompt": "p", "gt": "g"}])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: verbmem\n  data_files:\n"
        "  - split: forget\n    path: verbmem/forget.jsonl\n---\n",
        encoding="utf-8",
    )
    assert read_table(None, "verbmem/forget", ("prompt", "gt"), hub=(str(folder), "verbmem", "forget")) == [
        {"prompt": "p", "gt": "g"}
    ]


@needs_data
def test_real_data():
    news = load_benchmark("muse-news", SHARED / "muse-news")
    counts = [
        len(part)
        for part in (
            news.verbatim_forget,
            news.knowledge_forget,
            news.knowledge_forget_examples,
            news.knowledge_retain,
            news.knowledge_retain_examples,
            news.membership_forget,
            news.membership_retain,
            news.membership_holdout,
        )
    ]
    assert counts == [100, 100, 10, 100, 10, 100, 100, 100]
    assert "stand-in" in news.notes[0]
    questions = load_mmlu(SHARED / "mmlu")
    assert len(questions) == 1531
    assert all(question.prompt.count("Correct answer:") == 6 and question.choices == 4 for question in questions)
    tofu = load_tofu("forget10", SHARED / "tofu").tofu
    sets = (tofu.forget, tofu.retain, tofu.real_authors, tofu.world_facts)
    assert [len(part) for part in sets] == [400, 400, 100, 117]
    assert len(tofu_pairs("full", SHARED / "tofu")) == 4000
