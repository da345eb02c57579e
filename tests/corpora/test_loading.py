"""Benchmarks: the container, those of the catalog from folders in every file format, and the embedded one."""

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from unteach.corpora import Benchmark, MeasuringSettings, Probe, Question, Tofu, TofuQuestion, catalog, micro
from unteach.corpora.catalog import NAMES, add_multiple_choice, load_benchmark, load_mmlu, load_muse, load_tofu
from unteach.data.records import read_rows, read_table

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real data sets are not at {SHARED}")

TOFU = TofuQuestion("q", "a", "b", ("c",))
BENCHMARK = Benchmark(
    name="x",
    verbatim_forget=(Probe("a", "b"), Probe("c", "d")),
    knowledge_forget=(Question("q", "a"), Question("r", "b")),
    knowledge_forget_examples=(Question("s", "t"), Question("u", "v")),
    tofu=Tofu((TOFU, TOFU), (TOFU,), (TOFU,), (TOFU,)),
    notes=("careful",),
)


def test_hash_depends_on_data_and_settings_alone():
    same = dataclasses.replace(BENCHMARK, notes=("other words",))
    assert same.data_sha256 == BENCHMARK.data_sha256
    for change in (
        {"general_texts": ("more",)},
        {"settings": MeasuringSettings(knowledge_tokens=33)},
        {"verbatim_forget": BENCHMARK.verbatim_forget[::-1]},
    ):
        assert dataclasses.replace(BENCHMARK, **change).data_sha256 != BENCHMARK.data_sha256


def test_first_keeps_examples_and_says_so():
    small = BENCHMARK.first(1)
    assert (len(small.verbatim_forget), len(small.knowledge_forget), len(small.tofu.forget)) == (1, 1, 1)
    assert small.knowledge_forget_examples == BENCHMARK.knowledge_forget_examples
    assert small.notes == ("careful", "only the first 1 items of every kind were measured")
    assert Benchmark("nothing").first(3).verbatim_forget == ()
    with pytest.raises(ValueError, match="count is 0"):
        BENCHMARK.first(0)


def test_the_embedded_texts_never_change():
    """The shipped models were trained and are measured on exactly these; later parts have hashes of their own."""
    later = (*micro.MIXED, "alternates")
    texts = json.dumps({part: micro.documents(part) for part in micro.DOCUMENTS if part not in later})
    pretraining, unasked = micro.questions("pretraining"), micro.questions("unasked")
    assert (len(pretraining), len(unasked), len(micro.probes("retain"))) == (200, 360, 240)
    assert not set(unasked) & set(pretraining)
    assert hashlib.sha256(texts.encode()).hexdigest().startswith("137296dbf17b45a6")


@pytest.mark.parametrize(
    ("half", "expected"), [("all", "28f35fe2963f3a11"), ("stop", "a07045e844feb843"), ("measure", "67ebed21d0fb3a02")]
)
def test_the_embedded_benchmark_never_changes(half, expected):
    """Cells of results name these hashes."""
    benchmark = micro.load_benchmark(half)
    assert benchmark.data_sha256.startswith(expected)
    assert len(benchmark.verbatim_retain) == (240 if half == "all" else 0)
    assert benchmark.notes == ("micro is a benchmark of fictional texts with the schema of MUSE; it is not MUSE",)


def write(path, *rows):
    """A table in the format that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    content = (lines if ".jsonl" in path.name else json.dumps(rows)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet"])
def test_every_file_format(tmp_path, extension):
    rows = [{"text": "één\u2028line separator", "number": 1}, {"text": "two", "number": 2}]
    write(tmp_path / f"table{extension}", *rows)
    assert read_rows(tmp_path / f"table{extension}") == rows


def test_a_file_that_is_no_table_is_refused(tmp_path):  # broken ones: see test_own.py
    (tmp_path / "a.json").write_text('{"text": "no list"}', encoding="utf-8")
    with pytest.raises(ValueError, match="a list of objects is needed"):
        read_rows(tmp_path / "a.json")


def test_hub_layout_through_the_datasets_library(tmp_path, monkeypatch):
    """`datasets` reads a local folder with the hub's layout just as it reads the hub."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    row, files = {"prompt": "p", "gt": "g"}, "[{split: forget, path: verbmem/forget.jsonl}]"
    write(tmp_path / "set" / "verbmem" / "forget.jsonl", row)
    card = f"---\nconfigs:\n- config_name: verbmem\n  data_files: {files}\n---\n"
    (tmp_path / "set" / "README.md").write_text(card, encoding="utf-8")
    assert read_table(None, "verbmem/forget", ("prompt", "gt"), (str(tmp_path / "set"), "verbmem", "forget")) == [row]


def muse_folder(folder):
    write(folder / "verbmem" / "forget.jsonl", {"prompt": "p", "gt": "g"})
    write(folder / "knowmem" / "forget_qa.json", {"question": "q", "answer": "a"})
    write(folder / "knowmem" / "forget_qa_icl.parquet", {"question": "e", "answer": "x"})
    for part in ("forget", "holdout"):
        write(folder / "privleak" / f"{part}.jsonl.gz", {"text": part})
    write(folder / "raw" / "forget.jsonl", {"text": "one"}, {"text": "two"}, {"text": "one"})
    return folder


def test_muse_from_a_folder(tmp_path):
    assert load_benchmark("muse-news", muse_folder(tmp_path)) == Benchmark(
        "muse-news",
        verbatim_forget=(Probe("p", "g"),),
        knowledge_forget=(Question("q", "a"),),
        knowledge_forget_examples=(Question("e", "x"),),
        membership_forget=("forget",),
        membership_holdout=("holdout",),
    )
    assert catalog.muse_documents("muse-news", tmp_path) == ["one", "two"]
    assert catalog.named_benchmark("muse-news").retain(tmp_path) == []
    with pytest.raises(ValueError, match="no table `raw/retain1` with text"):
        catalog.muse_documents("muse-news", tmp_path, "retain1")


def test_muse_refusals_and_the_stand_in(tmp_path):
    with pytest.raises(ValueError, match="none of MUSE's tables"):
        load_muse("muse-news", tmp_path)
    with pytest.raises(ValueError, match="allowed are muse-news, muse-books"):
        load_muse("muse-films", tmp_path)
    write(muse_folder(tmp_path) / "raw" / "retain_standin.jsonl", {"text": "x"})
    assert "not MUSE-News scores" in load_muse("muse-news", tmp_path).notes[0]
    assert catalog.named_benchmark("muse-news").retain(tmp_path) == ["x"]
    write(tmp_path / "verbmem" / "forget.jsonl", {"prompt": "p"})
    with pytest.raises(ValueError, match="row 1 has no gt"):
        load_muse("muse-news", tmp_path)


MMLU_ROW = {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "sums"}
WRITTEN = "Question: 2 + 2?\n\nChoices:\nA. 3\nB. 4\nC. 5\nD. 6\n\nCorrect answer:"


def test_mmlu_with_a_fixed_prompt(tmp_path):
    write(tmp_path / "validation.jsonl", MMLU_ROW)
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
    write(tmp_path / "validation.jsonl", MMLU_ROW)
    write(tmp_path / "dev.jsonl", other, *(MMLU_ROW | {"answer": k % 4} for k in range(7)))
    [question] = load_mmlu(tmp_path)
    assert question.prompt == "".join(f"{WRITTEN} {'ABCD'[k % 4]}\n\n" for k in range(5)) + WRITTEN
    assert question.subject == "sums"


def test_tofu_from_a_folder(tmp_path):
    full = {"question": "q", "answer": "a", "paraphrased_answer": "p", "perturbed_answer": ["x", "y"]}
    short = {"question": "q", "answer": "a", "perturbed_answer": ["x"]}
    for name, row in (("forget01", full), ("retain", full), ("real_authors", short)):
        write(tmp_path / f"{name}_perturbed.jsonl", row)
    with pytest.raises(ValueError, match="no table `world_facts_perturbed`"):
        load_tofu("forget01", tmp_path)
    write(tmp_path / "world_facts_perturbed.jsonl", short)
    long, brief = TofuQuestion("q", "a", "p", ("x", "y")), TofuQuestion("q", "a", "a", ("x",))
    assert load_benchmark("tofu-forget01", tmp_path).tofu == Tofu((long,), (long,), (brief,), (brief,))
    write(tmp_path / "full.jsonl", full)
    assert catalog.tofu_pairs("full", tmp_path) == (Question("q", "a"),)
    with pytest.raises(ValueError, match="allowed are forget01, forget05, forget10"):
        load_tofu("forget20", tmp_path)


def test_names(tmp_path):
    for wrong in ("muse", "tofu-forget20", "muse-films"):
        with pytest.raises(ValueError, match=f"allowed are {', '.join(NAMES)}"):
            load_benchmark(wrong)
    with pytest.raises(ValueError, match="there is no such folder"):
        load_benchmark("muse-news", tmp_path / "missing")


@needs_data
def test_real_data():
    news = load_benchmark("muse-news", SHARED / "muse-news")
    counts = {name: len(part) for name, part in vars(news).items() if isinstance(part, tuple) and part}
    knowledge = {f"knowledge_{group}": 100 for group in ("forget", "retain")}
    examples = {f"{name}_examples": 10 for name in knowledge}
    membership = {f"membership_{group}": 100 for group in ("forget", "retain", "holdout")}
    assert counts == {"verbatim_forget": 100, "notes": 1} | knowledge | examples | membership
    assert "stand-in" in news.notes[0]
    questions = load_mmlu(SHARED / "mmlu")
    assert len(questions) == 1531
    assert all(question.prompt.count("Correct answer:") == 6 and question.choices == 4 for question in questions)
    tofu = load_tofu("forget10", SHARED / "tofu").tofu
    assert [len(part) for part in vars(tofu).values()] == [400, 400, 100, 117]
    assert len(catalog.tofu_pairs("full", SHARED / "tofu")) == 4000
