import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tiny_models import SENTENCES, save_tiny
from unteach.cli import COMMANDS, main
from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.settings import help_text, parse

QUICK = (
    "--batch 4 --general-batch 4 --general-tokens 24 --max-steps 4 --evaluate-every 2 --probes 2 --alpha 0.5 --lr 0.02"
)

NEVER = "--stop.metric 'verbmem_f <= -1'"


@pytest.fixture
def inputs(tmp_path):
    save_tiny(tmp_path / "model", "llama")
    documents = tmp_path / "documents"
    documents.mkdir()
    for number, sentence in enumerate(SENTENCES * 2):
        (documents / f"{number}.txt").write_text(f"{sentence} It was the {number}th time in {1900 + number}.")
    general = tmp_path / "general.jsonl"
    general.write_text("".join(json.dumps({"text": f"{a} {b}"}) + "\n" for a in SENTENCES * 3 for b in SENTENCES))
    return tmp_path


def call(capsys, *words):
    status = main(shlex.split(" ".join(str(word) for word in words)))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def forget(capsys, inputs, *words, model="model", documents="documents", out="run"):
    given = ["forget", inputs / model, "--documents", inputs / documents, "--general", inputs / "general.jsonl"]
    rule = () if "--stop" in str(words) else (NEVER,)
    return call(capsys, *given, "--out", inputs / out, QUICK, "--teacher-rate 4 --damping 0.1", *words, *rule)


def refused(result, *expected):
    """Exit status 2, one line per problem, no traceback, nothing on stdout."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    lines = err.splitlines()
    assert all(line.startswith("unteach: ") for line in lines), err
    for words in expected:
        assert any(words in line for line in lines), f"{words!r} is not in {err!r}"
    return lines


# ---- one command end to end ----------------------------------------------------------------------------


def test_forget_writes_a_run_folder_and_a_model_that_loads(capsys, inputs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    status, out, err = forget(capsys, inputs, "--json")
    assert status == 0
    result = json.loads(out)
    run = inputs / "run"
    assert result["steps"] == 4
    assert result["stop"]["rule"] == "max_steps"
    alpha = yaml.safe_load((run / "config.yaml").read_text())["method"]["alpha"]
    assert float(err.split("pull harder: --alpha ")[1].split()[0]) == pytest.approx(3 * alpha, rel=0.05)
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "result.json",
        "report.html",
        "evaluations/step_000000.json",
        "model/README.md",
    ):
        assert (run / name).exists(), name
    assert len((run / "metrics.jsonl").read_text().splitlines()) == result["steps"]
    looks = [json.loads(line) for line in (run / "evaluations/stop.jsonl").read_text().splitlines()]
    assert (looks[0]["step"], looks[-1]["step"]) == (0, result["steps"])
    assert all({"verbmem_f", "nll_general"} <= look.keys() for look in looks)
    model, source = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "model", inputs / "model"))
    AutoTokenizer.from_pretrained(run / "model")
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    assert {"verbmem_f", "nll_general"} <= result["before"].keys() & result["after"].keys()

    # A finished or started run is never overwritten, and its config runs again as it is.
    refused(forget(capsys, inputs), "exists and is not empty: name a new folder, or --resume")
    status, out, _ = call(capsys, "forget --config", run / "config.yaml", "--out", inputs / "again", "--json")
    assert status == 0
    again = json.loads(out)
    assert again["after"] == result["after"]
    assert (inputs / "again/model/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()


def test_a_file_may_say_a_part_and_flags_the_rest(capsys, inputs):
    file = inputs / "some.yaml"
    file.write_text("max_steps: 5\nmethod: {loss: it}\n")
    whole = f"{inputs / 'model'} --documents {inputs / 'documents'} --incompetent micro:small --config {file}"
    status, _, err = call(capsys, "plan", whole, "--json")
    assert status == 0, err
    refused(call(capsys, "plan --config", file), f"{file}: model is missing")
    file.write_text("max_step: 5\n")
    refused(call(capsys, "plan", whole), f"{file}: ", "did you mean max_steps?")
    refused(call(capsys, "plan --config", inputs / "no.yaml"), "does not exist")


def test_without_what_draws_the_report_the_run_ends_well(capsys, inputs, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name, *a))
    status, out, _ = forget(capsys, inputs, "--json")
    assert status == 0
    assert json.loads(out)["report"] is None
    assert (inputs / "run/model/model.safetensors").exists()
    assert not (inputs / "run/report.html").exists()


def test_inputs_that_cannot_be_measured_are_refused(capsys, inputs):
    (inputs / "short").mkdir()
    (inputs / "short/a.txt").write_text("Too short.")
    status, _, err = forget(capsys, inputs, documents="short")
    assert status == 2
    assert "no verbatim probe can be cut" in err.splitlines()[-1]
    refused(forget(capsys, inputs, f"--questions {inputs / 'no.jsonl'}"), "questions is", "there is no such file")
    refused(forget(capsys, inputs, "--max-tokens 9999"), "max_tokens is 9999: the model reads")
    (inputs / "general.jsonl").write_text(json.dumps({"text": " ".join(SENTENCES * 20)}) + "\n")
    refused(forget(capsys, inputs), "it has 1 documents, and at least 4 are needed")
    refused(call(capsys, "evaluate micro:target --benchmark micro --device nowhere"), "device is 'nowhere'")


def test_a_run_that_ended_before_its_first_step_can_be_resumed(capsys, inputs, monkeypatch):
    def end(*given, **others):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("unteach.job.run.unlearn", end)
        assert forget(capsys, inputs)[0] == 130
    assert call(capsys, "forget --resume", inputs / "run")[0] == 0
    forget(capsys, inputs, out="whole")
    names = ("run", "whole")
    one, other = ((inputs / name / "model/model.safetensors").read_bytes() for name in names)
    assert one == other


@pytest.mark.slow
def test_interrupted_it_exits_130_and_resumes_to_the_same_model(capsys, inputs, monkeypatch):
    status, out, _ = forget(capsys, inputs, out="whole")
    assert status == 0
    result = json.loads((inputs / "whole/result.json").read_text())
    recital, loss = (
        f"{result['before'][name]:.{decimals}f} -> {result['after'][name]:.{decimals}f}"
        for name, decimals in (("verbmem_f", 1), ("nll_general", 3))
    )
    assert re.search(rf"^  recital of forget documents +{recital} +verbmem_f ↓$", out, re.MULTILINE)
    assert re.search(rf"^  loss on general text +{loss} +nll_general ↓$", out, re.MULTILINE)
    assert "auc_forget_holdout_ppl" not in out  # in result.json
    with monkeypatch.context() as patched:
        patched.setattr("unteach.job.run._catching_signals", _pause_after_one_step)
        status, _, err = forget(capsys, inputs)
        assert status == 130
        assert "stopped after step 1" in err
    assert call(capsys, "forget --resume", inputs / "run")[0] == 0
    whole, resumed = (inputs / out / "model/model.safetensors" for out in ("whole", "run"))
    assert whole.read_bytes() == resumed.read_bytes()


class _pause_after_one_step:  # noqa: N801
    def __enter__(self):
        return lambda: True

    def __exit__(self, *exception):
        return None


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_exits_130(inputs):
    words = f"forget {inputs}/model --documents {inputs}/documents --general {inputs}/general.jsonl --out {inputs}/run "
    words += f"{QUICK} {NEVER} --max-steps 100000 --evaluate-every 100000 --teacher-rate 4 --damping 0.1"
    command = [sys.executable, "-u", "-m", "unteach", *shlex.split(words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    metrics = inputs / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopping after this step" in err
    assert out == ""
    assert list((inputs / "run" / "checkpoints").glob("step_*.pt"))


# ---- wrong input ------------------------------------------------------------------------------------------


def test_wrong_documents(capsys, inputs):
    refused(forget(capsys, inputs, documents="nowhere"), "nowhere")
    (inputs / "empty").mkdir()
    refused(forget(capsys, inputs, documents="empty"), "empty")
    for file, content, named in (
        ("binary/a.txt", b"text\x00\x01\x02", "a.txt"),
        ("latin/a.txt", "caf\xe9 au lait".encode("latin-1"), "a.txt"),
        ("broken.jsonl", b'{"text": "good"}\n{"text": "bad\n', "2"),
        ("field.jsonl", b'{"body": "good"}\n', "body"),
        ("short/a.txt", b"", "short"),
    ):
        (inputs / file).parent.mkdir(exist_ok=True)
        (inputs / file).write_bytes(content)
        refused(forget(capsys, inputs, documents=file.split("/")[0]), named)
    assert not (inputs / "run").exists(), "nothing is left behind by a run that was refused"


def test_wrong_models(capsys, inputs):
    refused(forget(capsys, inputs, model="no_model"), "no_model")
    (inputs / "hollow").mkdir()
    (inputs / "hollow/config.json").write_text((inputs / "model/config.json").read_text())
    refused(forget(capsys, inputs, model="hollow"), "hollow")
    pickle = inputs / "pickle"
    save_tiny(pickle, "llama")
    (pickle / "model.safetensors").rename(pickle / "pytorch_model.bin")
    refused(forget(capsys, inputs, model="pickle"), "safetensors")


def test_wrong_settings_are_all_reported(capsys, inputs):
    lines = refused(
        forget(capsys, inputs, "--loss nlu --batch 0 --momentum 2 --documnets x --trainable heads"),
        "loss is 'nlu'",
        "unknown flag --documnets (did you mean documents?)",
        "trainable is 'heads': it must be one of blocks, all",
    )
    assert len(lines) >= 3
    (inputs / "c.yaml").write_text("model: m\nmax_stps: 3\nmethod:\n  alpah: 1\nbatch: many\n")
    refused(
        call(capsys, "forget --config", inputs / "c.yaml"),
        "unknown key max_stps (did you mean max_steps?)",
        "unknown key method.alpah (did you mean alpha?)",
        "batch is 'many'",
    )
    refused(call(capsys, "forget", inputs / "model"), "out is missing")
    refused(call(capsys, "forget", inputs / "model", "--out", inputs / "run"), "documents is missing")
    refused(call(capsys, "forget a b --out", inputs / "run"), "only one model")
    refused(call(capsys, "forget --resume", inputs / "nothing"), "config.yaml")
    refused(call(capsys, "forget --max-steps"), "--max-steps needs a value")
    refused(call(capsys, "unlearn x"), "unknown command 'unlearn'")
    status, _, err = forget(capsys, inputs, "--stop.metric 'verbmem_g <= 3'")
    assert status == 2
    assert "verbmem_g is not measured in this run; measured are verbmem_f, nll_general" in err
    assert not (inputs / "run").exists()
    refused(call(capsys, "reproduce theorm"), "did you mean theorem?")


# ---- help -----------------------------------------------------------------------------------------------------


def test_help_lists_every_command_and_flag(capsys):
    status, out, _ = call(capsys, "--help")
    assert status == 0
    assert all(name in out for name in COMMANDS)
    for name in COMMANDS:
        with pytest.raises(SystemExit) as exit_:
            main([name, "--help"])
        assert exit_.value.code == 0
        text = capsys.readouterr().out
        assert "examples:" in text
        assert all(example in text for example in COMMANDS[name].examples)
    text = help_text(ForgetConfig, usage="", description="", examples=[], flatten=("method",))
    for field in dataclasses.fields(ForgetConfig):
        if field.name not in ("method", "phases", "precision", "stop"):
            assert f"--{field.name.replace('_', '-')}" in text
    assert "--stop.metric" in text
    assert "None: the embedded public-domain text." in text
    assert call(capsys, "--version")[1].startswith("unteach ")


@pytest.mark.parametrize("example", ["plan", "evaluate"])
def test_the_quick_examples_work_when_pasted(capsys, tmp_path, monkeypatch, example):
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS[example].examples:
        status, out, err = call(capsys, line.removeprefix("unteach "))
        assert status == 0, err
        assert out.strip()


@pytest.mark.slow
def test_every_example_works_when_pasted(tmp_path):
    """One after the other in one folder, as somebody reading the help would; the demo: test_reproduce.py."""
    lines = list(dict.fromkeys(line for command in COMMANDS.values() for line in command.examples))
    shown = subprocess.run([sys.executable, "-m", "unteach", "--help"], capture_output=True, text=True, check=True)
    assert {line.strip() for line in shown.stdout.splitlines() if line.startswith("  unteach ")} <= set(lines)
    for line in lines:
        if line in COMMANDS["demo"].examples:
            continue
        command = [sys.executable, "-m", "unteach", *line.split()[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "report.html").stat().st_size > 10_000


# ---- flags ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float | None = None
    """How fast."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    names: tuple[str, ...] = ()
    """Names."""
    count: int = 1
    inner: Inner = dataclasses.field(default_factory=Inner)
    path: Path | None = None
    quiet: bool = False


def test_flags_are_read_into_the_dataclass():
    options = parse(Options, shlex.split("a b --count=3 --inner.rate 5e-4 --path x/y --quiet"), positional="names")
    assert options == Options(names=("a", "b"), count=3, inner=Inner(rate=5e-4), path=Path("x/y"), quiet=True)
    assert parse(Options, ["--inner.rate", "null"], positional="names", start={"count": 7}).count == 7
    assert parse(Options, ["--rate", "2"], positional="names", flatten=["inner"]).inner.rate == 2.0
    with pytest.raises(InputError) as error:
        parse(Options, shlex.split("--cuont 3 --count x --inner.rate fast"), positional="names")
    assert error.value.problems == [
        "unknown flag --cuont (did you mean count?)",
        "count is 'x': it must be a whole number",
        "inner.rate is 'fast': it must be a number",
    ]
