"""Settings that cannot be used, from files and flags: status 2, a line for each problem, and nothing is left behind."""
# ruff: noqa: E501 - tables of cases

import re

import pytest

from unteach.cli import main
from unteach.errors import InputError, printable
from unteach.settings import plain_yaml

DIGITS = "9" * 5000
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
FILES = {
    "empty": "", "a list": "- 1\n- 2\n", "a text": "hello", "a number": "3", "null": "null", "only a comment": "# nothing",
    "a tab": "a:\n\t- 1", "unclosed list": "batch: [1, 2", "unclosed text": 'model: "x', "unclosed brace": "stop: {metric: x",
    "a key twice": "model: x\nseed: 1\nseed: 2\n", "a key twice inside": "model: x\nmethod: {lr: 1, lr: 2}\n",
    "the same key twice": "model: x\nmodel: x\n", "twice in other words": "model: x\n'seed': 1\nseed: 1\n",
    "an alias": "model: &m x\nbase: *m\n", "an alias bomb": BOMB, "a merge": "a: &a {seed: 1}\n<<: *a\n", "a merge without a reference": "<<: {seed: 1}\nseed: 2\n",
    "an alias of itself": "model: &m [*m]\n", "an unknown alias": "model: *nowhere\n",
    "deep lists": "phases: " + "[" * 20_000, "deep maps": "{a: " * 5_000, "deep and closed": "[" * 3000 + "]" * 3000,
    "deep blocks": "\n".join(" " * n + "- " for n in range(1500)),
    "python code": "model: !!python/object/apply:os.system ['true']", "a python name": "model: !!python/name:os.system",
    "an unknown tag": "model: !here x", "a binary": "model: !!binary '%%%'", "a set": "model: !!set {a, b}",
    "a wrong date": "seed: 2024-99-99", "a date": "seed: 2024-01-01", "a time": "seed: 2024-01-01T00:00:00Z",
    "NUL": "model: a\0b", "a NUL escaped": 'model: "a\\0b"\nlr: x', "a bell": "model: \x07", "escape codes": "model: \x1b[31m",
    "two documents": "model: x\n---\nseed: 1\n", "an integer of 5,000 digits": f"seed: {DIGITS}",
    "a hexadecimal of 5,000 digits": f"seed: 0x{'f' * 5000}", "an octal of 5,000 digits": f"seed: 0o{'7' * 5000}",
    "a float of 5,000 digits": f"keep_weight: {DIGITS}.0e9999999x", "a key that is a list": "? [1, 2]\n: 3\n",
    "a key that is a number": "1: 2\n", "a key that is null": "null: 2\n", "a key that is a map": "? {a: 1}\n: 3\n",
    "an unknown key": "model: x\nmax_step: 3\n", "an unknown key inside": "model: x\nmethod: {rate: 3}\n",
    "a very long key": f"model: x\n{'k' * 900}: 3\n", "a very long value": f"model: x\nseed: {'v' * 1_000_000}\n",
    "a large file": "model: x\n" + "# " + "x" * 1_100_000, "stop is a list": "model: x\nstop: [1]\n",
    "method is a text": "model: x\nmethod: nlul\n", "phases is a map": "model: x\nphases: {loss: ll}\n",
    "a phase is a number": "model: x\nphases: [3]\n", "a phase without steps": "model: x\nphases: [{loss: ll}]\n",
    "betas are three": "model: x\nmethod: {betas: [0.1, 0.2, 0.3]}\n", "betas are words": "model: x\nmethod: {betas: [a, b]}\n",
    "betas are one": "model: x\nmethod: {betas: 0.9}\n", "betas above 1": "model: x\nmethod: {betas: [0.9, 1.5]}\n",
    "loss options are a list": "model: x\nmethod: {loss: npo, loss_options: [beta]}\n",
    "loss options are unknown": "model: x\nmethod: {loss: npo, loss_options: {gamma: 1}}\n",
    "loss options with number names": "model: x\nmethod: {loss: npo, loss_options: {1: 1}}\n",
    "a rule that is none": "model: x\nseed: -1\nstop: {metric: 'verbmem_f'}\n", "model is null": "model:\n",
    "model is a number": "model: 3\n", "model is a list": "model: [x]\n", "model is true": "model: true\n",
    "documents is a list": "model: x\ndocuments: [a, b]\n", "out is a number": "model: x\nout: 3\n",
    "precision is a text": "model: x\nprecision: fp16\n", "an unknown precision": "model: x\nprecision: {forget: fp8}\n",
    "an unknown divergence": "model: x\nmethod: {divergence: kll}\n", "an unknown optimizer": "model: x\nmethod: {optimizer: adam}\n",
    "trainable is something else": "model: x\ntrainable: some\n", "mode is something else": "model: x\ndocument_mode: cut\n",
    "true for a number": "model: x\nbatch: true\n", "a number for true": "model: x\ncompile: 1\n", "a word for true": "model: x\ncompile: maybe\n",
    "a fraction of a step": "model: x\nmax_steps: 2.5\n", "infinity of steps": "model: x\nmax_steps: .inf\n",
    "NaN of steps": "model: x\nmax_steps: .nan\n", "an octet stream": "\x85\x86", "a byte-order mark inside": "model: x\n\ufeffseed: a\n",
}  # fmt: skip
BYTES = {
    "Latin-1": "model: é".encode("latin-1"), "UTF-16": "model: x".encode("utf-16"), "zeros": b"\0" * 100,
    "noise": bytes(range(256)), "half a character": "model: é".encode()[:-1], "a zip": b"PK\x03\x04rest",
}  # fmt: skip


def refused(words, capsys):
    """Status 2, nothing printed, and lines that a terminal can show, of bounded length; the lines."""
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err[-2000:]
    lines = err.splitlines()
    assert lines
    for line in lines:
        assert line.startswith("unteach: "), line[:200]
        assert len(line) < 2000
        assert line == printable(line)
    assert "Traceback" not in err
    return lines


@pytest.mark.parametrize("case", [*FILES, *BYTES])
def test_files_of_settings(case, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_bytes(BYTES[case] if case in BYTES else FILES[case].encode())
    refused(["forget", "--config", file, "--out", tmp_path / "run", "--documents", "x", "--seed=-1"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


HIDING = ("a key twice", "a key twice inside", "an alias bomb", "an alias", "a merge", "a merge without a reference")


@pytest.mark.parametrize("case", HIDING)
def test_what_two_values_would_hide_is_named(case):
    with pytest.raises(Exception, match="twice|refers to another value|of another map"):
        plain_yaml(FILES[case])


NUMBERS = {
    "whole": ("batch", "general-batch", "keep-batch", "micro-batch", "max-tokens", "general-tokens", "expected-steps",
              "max-steps", "evaluate-every", "probes", "checkpoint-every", "keep-checkpoints", "threads"),
    "any": ("alpha", "lr", "clip", "teacher-rate", "damping", "token-share", "momentum", "weight-decay",
            "stop.utility-floor", "anchor"),
}  # fmt: skip
WRONG = {
    "whole": ("0", "-1", "2.5", "nan", "inf", "-inf", "1e400", "abc", "", "[1]", "{a: 1}", "true", "1,000", DIGITS,
              f"0x{'f' * 4000}", "９９x", "\x1b[2J", "2024-01-01", "*a", "&a 1x", "!!int x"),
    "any": ("-1", "nan", "-inf", "abc", "", "[1]", "{a: 1}", "true", "1,000", "\x1b[2J", "2024-01-01", "*a", "1e", "0x"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for names in NUMBERS.values() for name in names])
def test_numbers_that_are_none(name, capsys, tmp_path):
    """A flag with each of the values that cannot be its own; every one is refused by the name of the setting."""
    kind = "whole" if name in NUMBERS["whole"] else "any"
    field = name.replace("-", "_")
    for value in WRONG[kind]:
        lines = refused(
            ["forget", "/nowhere/x", "--documents", "y", "--out", tmp_path / "run", f"--{name}={value}"], capsys
        )
        assert any(re.search(rf"\b{field}\b|--{name}", line) for line in lines), (value, lines)
    assert list(tmp_path.iterdir()) == []


SWITCHES = ("compile", "checkpoint-activations", "skip-unreadable")


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["maybe", "2", "", "tru", "None", "yess", "-1", "[true]", "\x1b"])
def test_switches_that_are_neither(name, value, capsys):
    lines = refused(["forget", "/nowhere/x", "--documents", "y", f"--{name}={value}"], capsys)
    assert f"unteach: --{name} is {printable(repr(value))}: it must be true or false" in lines


@pytest.mark.parametrize(
    ("word", "expected"),
    [("", True), *((f"={word}", True) for word in ("true", "yes", "on", "1", "TRUE", "Yes")),
     *((f"={word}", False) for word in ("false", "no", "off", "0", "False", "NO"))],
)  # fmt: skip
def test_switches_that_are_said_in_words(word, expected):
    from unteach.config import ForgetConfig
    from unteach.settings import parse

    assert parse(ForgetConfig, ["m", f"--checkpoint-activations{word}"]).checkpoint_activations is expected


@pytest.mark.parametrize("flag", ["--json=no", "--quiet=false", "--verbose=0", "--dry-run=no", "--accept-changes=x"])
def test_flags_that_take_no_value(flag, capsys):
    assert "takes no value" in refused(["forget", "/nowhere/x", "--documents", "y", flag], capsys)[0]


COMMANDS = {
    "no such command": ["forgett"], "a number": ["3"], "escape codes": ["\x1b[31mforget"], "a flag": ["--model", "x"],
    "a flag that is none": ["forget", "/nowhere/x", "--nowhere"], "two models": ["forget", "/nowhere/x", "y", "--documents", "z"],
    "no model": ["forget"], "no documents": ["forget", "nowhere/at/all"], "no value": ["forget", "/nowhere/x", "--seed"],
    "resume and model": ["forget", "--resume", "x", "y"], "resume nothing": ["forget", "--resume"],
    "resume no folder": ["forget", "--resume", "/nowhere/run"], "resume a file": ["forget", "--resume", __file__],
    "resume with a limit of 5,000 digits": ["forget", "--resume", "x", "--max-steps", DIGITS],
    "resume with escape codes": ["forget", "--resume", "\x1b[31m"], "resume a long name": ["forget", "--resume", "n" * 300],
    "accept changes of nothing": ["forget", "/nowhere/x", "--accept-changes"], "finish nothing": ["finish"],
    "finish no folder": ["finish", "/nowhere/run"], "finish a file": ["finish", __file__], "quiet and loud": ["plan", "/nowhere/x", "--quiet", "--verbose"],
    "finish a long name": ["finish", "n" * 300], "ranks of nothing": ["plan", "/nowhere/x", "--documents", "y", "--ranks", "0"],
    "ranks of 5,000 digits": ["plan", "/nowhere/x", "--documents", "y", "--ranks", "x" + DIGITS], "a shell that is none": ["completion", "tcsh"],
    "a config without an end": ["forget", "--config", "/dev/zero"], "a config in no home": ["forget", "--config", "~nobody-of-this-name/c.yaml"],
    "resume in no home": ["forget", "--resume", "~nobody-of-this-name/run"], "finish in no home": ["finish", "~nobody-of-this-name/run"],
    "out in no home": ["plan", "micro:small", "--documents", "micro:forget", "--out", "~nobody-of-this-name/run"],
    "out a long name": ["plan", "micro:small", "--documents", "micro:forget", "--out", "n" * 300],
    "a key in no home": ["forget", "/nowhere/x", "--documents", "y", "--out", "/nowhere/run", "--sign", "~nobody-of-this-name/key"],
    "a key with a long name": ["forget", "/nowhere/x", "--documents", "y", "--out", "/nowhere/run", "--sign", "n" * 300],
    "scores in no home": ["evaluate", "micro:small", "--out", "~nobody-of-this-name/s.json"],
    **{f"{name} a long name": [name, "n" * 300] for name in ("evaluate", "report", "receipt", "verify", "ledger", "purge", "audit")},
    "report to a long name": ["report", "/nowhere/run", "--out", "n" * 300], "prove a long name": ["prove", "n" * 300, "--document", "x"],
    "a config that is a folder": ["forget", "--config", "/"], "a config that is not there": ["forget", "--config", "/nowhere"],
    "a config with a long name": ["forget", "--config", "n" * 300], "a config of escape codes": ["forget", "--config", "\x1b"],
    "a megabyte": ["forget", "/nowhere/x" * 1_000_000], "a megabyte of flag": ["forget", "--" + "x" * 1_000_000],
    "a device that is none": ["plan", "micro:small", "--documents", "micro:forget", "--device", "tpu:x"],
    "a tracker that is none": ["forget", "/nowhere/x", "--documents", "y", "--out", "/tmp/never", "--track", "paper", "--seed=-1"],
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_commands(case, capsys):
    refused(COMMANDS[case], capsys)


def test_a_message_is_a_line_of_bounded_length():
    error = InputError(["a" * 10_000, "b\nc\r\n\x1b[31md\ud800\u202e"])
    assert len(error.problems[0]) < 2000
    assert error.problems[1] == "b c \\x1b[31md\\ud800\\u202e"
