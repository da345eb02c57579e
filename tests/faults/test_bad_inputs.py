"""Texts, models and folders that cannot be used: a line that says so, status 2, and nothing is left behind."""
# ruff: noqa: E501 - tables of cases

import gzip
import io
import json
import os
import shutil
import zipfile
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import make_inputs, run

from tiny_models import small_tokenizer
from unteach.cli import main
from unteach.config import Method
from unteach.corpora.own import question_problems
from unteach.data import read_documents
from unteach.errors import InputError, printable
from unteach.job.inputs import read_texts
from unteach.job.lock import free_problem
from unteach.models.load import check_folder, find_folder, load_model, weight_files

DEEP, DIGITS = "[" * 100_000, "9" * 5000


def docx(document, name="word/document.xml"):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr(name, document)
    return content.getvalue()


def lying_zip():
    """A zip whose entry says that it is larger than its bytes."""
    return docx("<w/>").replace(b"PK\x01\x02", b"PK\x01\x03")


GOOD = '{"text": "A text to forget."}\n'
RECORDS = {
    "nothing.txt": b"", "spaces.txt": b"  \n\t ", "nul.txt": b"a\0b", "utf16 without mark.txt": "text".encode("utf-16-le"),
    "half a utf16.txt": b"\xff\xfea", "half a utf32.txt": b"\xff\xfe\0\0a", "nothing.jsonl": b"", "blank lines.jsonl": b"\n\n\n",
    "a list.jsonl": b"[1]\n", "a number.jsonl": b"3\n", "null.jsonl": b"null\n", "no field.jsonl": b'{"body": "x"}\n',
    "a number as text.jsonl": b'{"text": 3}\n', "a list as text.jsonl": b'{"text": [1]}\n', "an object as text.jsonl": b'{"text": {}}\n',
    "broken.jsonl": b'{"text": "x"\n', "broken later.jsonl": GOOD.encode() + b"{\n", "deep.jsonl": DEEP.encode() + b"\n",
    "deep objects.jsonl": b'{"a":' * 50_000 + b"\n", "digits.jsonl": f'{{"text": {DIGITS}}}\n'.encode(), "not utf8.jsonl": b'{"text": "\xff"}\n',
    "nul.jsonl": b'{"text": "a\0"}\n', "surrogate.jsonl": b'{"text": "\\ud800"}\n', "escape codes.jsonl": b"\x1b[31m\n",
    "wrong turns.jsonl": b'{"messages": [{"role": 1}]}\n', "no turns.jsonl": b'{"messages": "x"}\n', "NaN.jsonl": b'{"text": NaN}\n',
    "a number.json": b"3", "a text.json": b'"x"', "broken.json": b'[{"text": ', "deep.json": DEEP.encode(), "digits.json": f"[{DIGITS}]".encode(),
    "numbers.json": b"[1, 2]", "no field.json": b'[{"body": 1}]', "nul.json": b"\0", "not utf8.json": b'["\xff"]', "empty list.json": b"[]",
    "nothing.csv": b"", "no column.csv": b"a,b\n1,2\n", "ragged.csv": b"text,b\n1\n", "a quote.csv": b'text\n"open\n', "nul.csv": b"text\n\0\n",
    "nothing.docx": b"", "no zip.docx": b"PK", "no document.docx": docx("x", "other.xml"), "broken.docx": docx("<a>"), "bomb.docx": docx(b" " * 70_000_000),
    "a type.docx": docx('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'), "lies.docx": lying_zip(), "deep.docx": docx("<a>" * 5000 + "</a>" * 5000),
    "nothing.pdf": b"", "no pdf.pdf": b"hello", "cut.pdf": b"%PDF-1.4\n1 0 obj\n", "nothing.parquet": b"", "no parquet.parquet": b"PAR1" * 9,
    "nothing.jsonl.gz": b"", "no gz.jsonl.gz": b"hello", "cut.jsonl.gz": gzip.compress(GOOD.encode() * 50)[:40], "a wrong sum.txt.gz": gzip.compress(b"text")[:-6] + b"xxxxxx",
    "a wrong block.txt.gz": gzip.compress(b"text")[:10] + b"\xff" * 20, "only zlib.txt.gz": zlib.compress(b"text"), "nothing.txt.gz": gzip.compress(b""),
    "bomb.txt.gz": gzip.compress(b"a" * 80_000_000, 1), "bomb.jsonl.gz": gzip.compress(b"a" * 80_000_000, 1), "bomb.json.gz": gzip.compress(b"[" * 80_000_000, 1),
    "bomb.csv.gz": gzip.compress(b"a," * 40_000_000, 1), "twice.txt.gz.gz": gzip.compress(gzip.compress(b"text")), "program.exe": b"MZ", "no extension": b"text",
    "\x1b[31mred.exe": b"", "\x1b]0;title\x07.jsonl": b"{", "a\nline.jsonl": b"{", "\u202egnp.exe": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_documents(name, tmp_path):
    (tmp_path / name).write_bytes(RECORDS[name])
    with pytest.raises(InputError) as refused:
        read_documents(str(tmp_path / name))
    for line in refused.value.problems:
        assert line == printable(line)
        assert len(line) < 2000


NO_FILES = {
    "a link to nothing": lambda path: path.symlink_to("/nowhere/text.txt"), "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo, "a link to a folder": lambda path: path.symlink_to(".."),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_FILES)
def test_what_lies_beside_documents_is_not_left_out_in_silence(case, tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/a.txt").write_text("A text to forget.")
    NO_FILES[case](tmp_path / "documents/b.txt")
    with pytest.raises(InputError, match=r"b\.txt: .* put the texts themselves there") as refused:
        read_documents(str(tmp_path / "documents"))
    assert len(refused.value.problems) == 1
    assert read_documents(str(tmp_path / "documents"), skip_unreadable=True).skipped[0][0] == "b.txt"


def test_a_packed_text_is_read(tmp_path):
    for name, content in (
        ("a.jsonl.gz", GOOD * 1000),
        ("b.json.gz", json.dumps([{"text": "x"}] * 9)),
        ("c.txt.gz", "text"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    assert len(read_documents(str(tmp_path))) == 1010


QUESTIONS = {
    "nothing.jsonl": b"", "one word.jsonl": b"hello\n", "no answer.jsonl": b'{"question": "a"}\n', "a list.jsonl": b"[1]\n", "deep.jsonl": DEEP.encode(),
    "digits.jsonl": f'{{"question": {DIGITS}}}'.encode(), "cut.jsonl.gz": gzip.compress(b'{"question": "a", "answer": "b"}' * 99)[:30],
    "no gz.jsonl.gz": b"hello", "bomb.jsonl.gz": gzip.compress(b" " * 80_000_000, 1), "a text.txt": b"hello", "no extension": b"x",
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions(name, tmp_path):
    (tmp_path / name).write_bytes(QUESTIONS[name])
    problems = InputError(question_problems("questions", tmp_path / name)).problems
    assert len(problems) == 1
    assert problems[0].startswith("questions is ")


@pytest.mark.parametrize("path", ["/nowhere", "/", "n" * 300, "/" + "a/" * 3000, __file__ + "/below"])
def test_questions_elsewhere(path):
    from pathlib import Path

    assert len(question_problems("questions", Path(path))) == 1


# Models.


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def model(inputs, tmp_path):
    """A model folder to be broken."""
    return shutil.copytree(inputs / "model", tmp_path / "model")


def edit(folder, name, **changes):
    content = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps(content))


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "intermediate_size",
    "num_key_value_heads",
)
IMPOSSIBLE = (0, -1, "two", 9_999_999, 2.5, True, [1], {})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", IMPOSSIBLE, ids=str)
def test_sizes_that_no_model_has(model, name, value):
    edit(model, "config.json", **{name: value})
    problems = check_folder(model)
    assert len(problems) == 1
    assert f"{name} of config.json is" in problems[0]


NO_MODELS = {
    "hidden_size": 33, "num_attention_heads": 3, "num_hidden_layers": None, "vocab_size": None, "head_dim": 7, "rms_norm_eps": "x",
    "rope_parameters": "x", "hidden_act": 3, "dtype": "zzz", "pad_token_id": 10**9, "eos_token_id": {}, "text_config": [], "use_cache": "x",
    "max_position_embeddings": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", NO_MODELS)
def test_configurations_that_transformers_refuses(inputs, model, tmp_path, name, capsys):
    edit(model, "config.json", **{name: NO_MODELS[name]})
    given = ["--documents", str(inputs / "documents"), "--general", str(inputs / "general.jsonl")]
    assert main(["forget", str(model), *given, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("unteach: model ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    if name != "max_position_embeddings":
        with pytest.raises(InputError, match=r"cannot be loaded|config\.json"):
            load_model(str(model))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", "null", '"x"', DEEP, '{"num_hidden_layers": ' + DIGITS + "}", "\0"], ids=range(9)
)
def test_configurations_that_are_none(model, content):
    (model / "config.json").write_text(content)
    with pytest.raises(InputError, match="config.json"):
        load_model(str(model))


def changed(**changes):
    def change(weights):
        for name, value in changes.items():
            full = next(key for key in weights if key.endswith(name.replace("__", ".")))
            weights[full] = value(weights[full])

    return change


def filled(number):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[-1] = number
        return tensor

    return change


WEIGHTS = {
    "NaN": (changed(down_proj__weight=filled(float("nan"))), "not finite"),
    "infinity": (changed(embed_tokens__weight=filled(float("inf"))), "not finite"),
    "minus infinity": (changed(norm__weight=filled(float("-inf"))), "not finite"),
    "zero embeddings": (changed(embed_tokens__weight=torch.zeros_like), "are zero"),
    "zero head": (changed(lm_head__weight=torch.zeros_like), "are zero"),
    "all zero": (lambda weights: weights.update({name: torch.zeros_like(value) for name, value in weights.items()}), "are zero"),
    "one missing": (lambda weights: weights.pop("model.norm.weight"), "lack 1 tensors"),
    "all missing": (lambda weights: (weights.clear(), weights.update(other=torch.ones(1))), "lack"),
    "another shape": (changed(q_proj__weight=lambda tensor: tensor[:3].clone()), "cannot be loaded"),
    "a number": (changed(q_proj__weight=lambda tensor: torch.tensor(1.0)), "cannot be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_no_model_has(model, case):
    change, expected = WEIGHTS[case]
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=expected) as refused:
        load_model(str(model))
    assert len(refused.value.problems) == 1


def test_weights_that_give_no_signal(inputs, model, tmp_path):
    """Found when the step sizes are measured: nothing is left behind."""
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros_like(weights["model.norm.weight"])
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="no usable signal"):
        run(inputs, tmp_path / "run", model=str(model), method=Method())
    assert not (tmp_path / "run").exists()


FILES = {
    "empty": b"", "noise": bytes(range(256)) * 4, "a long header": (2**60).to_bytes(8, "little") + b"{}", "a pickle": b"\x80\x04K\x01.", "a zip": docx("x"),
    "a deep header": (100_000).to_bytes(8, "little") + b"[" * 100_000, "a header that is a list": (2).to_bytes(8, "little") + b"[]",
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_weights_files_that_are_none(model, case):
    (model / "model.safetensors").write_bytes(FILES[case])
    with pytest.raises(InputError, match=r"model\.safetensors is not a whole safetensors file|lack"):
        load_model(str(model))


INDEXES = {
    "a list": [], "a number": 3, "null": None, "nothing": {}, "no map": {"metadata": {}}, "a map that is a list": {"weight_map": []}, "an empty map": {"weight_map": {}},
    "numbers": {"weight_map": {"a": 3}}, "lists": {"weight_map": {"a": ["x"]}}, "outside": {"weight_map": {"a": "../other.safetensors"}}, "far outside": {"weight_map": {"a": "/etc/passwd"}},
    "below": {"weight_map": {"a": "x/y.safetensors"}}, "for Windows": {"weight_map": {"a": "..\\x.safetensors"}}, "a pickle": {"weight_map": {"a": "pytorch_model.bin"}},
    "missing": {"weight_map": {"a": "nowhere.safetensors"}}, "a dot": {"weight_map": {"a": "."}}, "no name": {"weight_map": {"a": ""}}, "the folder above": {"weight_map": {"a": ".."}},
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_indexes_of_weights(model, case):
    (model / "model.safetensors").rename(model.parent / "other.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(INDEXES[case]))
    problems = check_folder(model)
    assert len(problems) == 1, problems
    assert "index" in problems[0] or "missing" in problems[0]


@pytest.mark.parametrize("text", ["", "{", DEEP, "\0"])
def test_indexes_that_are_no_json(model, text):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(text)
    assert len(check_folder(model)) == 1


NO_TOKENIZERS = ["", "{", "[]", "3", DEEP, "\0"]
TOKENIZERS = [(name, content) for name in ("tokenizer.json", "tokenizer_config.json") for content in NO_TOKENIZERS]


@pytest.mark.parametrize(("name", "content"), [*TOKENIZERS, ("tokenizer.json", "{}")], ids=range(13))
def test_tokenizers_that_are_none(model, name, content):
    (model / name).write_text(content)
    with pytest.raises(InputError, match="tokenizer"):
        load_model(str(model))


CODE = "open({marker!r}, 'w').close()\n"


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_no_code_of_a_model_folder_is_run(model, tmp_path, where):
    marker = tmp_path / "marker"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py", "setup.py"):
        (model / name).write_text(CODE.format(marker=str(marker)))
    maps = {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModelForCausalLM": "modeling_evil.Evil",
        "AutoTokenizer": ["tokenization_evil.Evil", None],
    }
    edit(model, where, auto_map=maps)
    load_model(str(model))  # as the family that it names, which is known
    edit(model, "config.json", auto_map=maps, model_type="evil")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(model))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickled_weights_are_not_read(model, name):
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(InputError, match="pickled"):
        load_model(str(model))


@pytest.mark.parametrize("option", ["reference", "base"])
def test_another_vocabulary(inputs, tmp_path, option):
    from small_run import settings

    other = shutil.copytree(inputs / "model", tmp_path / "other")
    small_tokenizer(vocabulary=290).save_pretrained(other)
    with pytest.raises(InputError, match=f"{option} is .*: its tokenizer is not that of"):
        read_texts(settings(inputs, tmp_path / "run", **{option: str(other)}))


# Paths.

LONG, ENDLESS = "n" * 300, "/" + "a/" * 3000
PATHS = {"a long name": LONG, "endless": ENDLESS, "below a file": __file__ + "/below", "NUL": "a\0b", "no such home": "~nobody-of-this-name/x",
         "not UTF-8": os.fsdecode(b"/tmp/\xff\xfe"), "escape codes": "/nowhere/\x1b[31m", "a line": "/nowhere/a\nb"}  # fmt: skip


@pytest.mark.parametrize("case", PATHS)
def test_models_elsewhere(case):
    with pytest.raises(InputError) as refused:
        find_folder(PATHS[case])
    assert refused.value.problems[0] == printable(refused.value.problems[0])


@pytest.mark.parametrize("case", PATHS)
@pytest.mark.parametrize("option", ["documents", "keep"])
def test_documents_elsewhere(case, option):
    with pytest.raises(InputError, match=f"^{option} is "):
        read_documents(PATHS[case], option=option)


@pytest.mark.parametrize("case", ["a long name", "endless", "below a file", "NUL", "not UTF-8"])
def test_run_folders_that_cannot_be_made(case, tmp_path):
    from pathlib import Path

    path = PATHS[case]
    assert free_problem(Path(path) if case != "not UTF-8" else tmp_path / os.fsdecode(b"\xff"))


def test_a_home_is_meant_by_its_sign(monkeypatch, tmp_path):
    from unteach.config import ForgetConfig

    monkeypatch.setenv("HOME", str(tmp_path))
    assert ForgetConfig(model="m", out="~/run").out == str(tmp_path / "run")


LATE = {
    "a rule of nothing": {"stop": "verbmem_x <= 1"},
    "too long texts": {"max_tokens": 10_000},
    "a tracker that is not installed": {"track": "wandb"},
    "no probes to be cut": {"documents": "short"},
    "a folder below a file": {"out": "file/run"},
}


@pytest.mark.parametrize("case", LATE)
def test_what_is_refused_leaves_nothing_behind(inputs, tmp_path, case, monkeypatch):
    import sys

    from unteach.config import Stop

    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    given = dict(LATE[case])
    if "stop" in given:
        given["stop"] = Stop(metric=given["stop"])
    if "documents" in given:
        given["documents"] = str(tmp_path / "short.txt")
    out = tmp_path / given.pop("out", "new/run")
    with pytest.raises(InputError):
        run(inputs, out, **given)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_says_it_in_a_line(inputs, tmp_path, capsys):
    bad = shutil.copytree(inputs / "model", tmp_path / "\x1b[31mred")
    edit(bad, "config.json", num_hidden_layers=10_000_000)
    words = ["forget", str(bad), "--documents", str(inputs / "documents"), "--out", str(tmp_path / "run")]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "num_hidden_layers of config.json is '10000000'" in err
    assert not (tmp_path / "run").exists()
    assert weight_files(bad) == ["model.safetensors"]
