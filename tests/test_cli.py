"""Every command as somebody types it: what it writes, prints and refuses, and with which exit status."""

import contextlib
import dataclasses
import html
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import unteach
from tiny_models import SENTENCES, save_tiny
from unteach.cli import COMMANDS, main
from unteach.config import ForgetConfig
from unteach.data import read_documents
from unteach.data.documents import _standard_input
from unteach.errors import InputError
from unteach.report.load import load
from unteach.settings import help_text, parse

QUICK = (
    "--batch 4 --general-batch 4 --general-tokens 24 --max-steps 4 --evaluate-every 2 --probes 2 --alpha 0.5 --lr 0.02 "
    "--teacher-rate 4 --damping 0.1"
)
NEVER = "--stop.metric 'verbmem_f <= -1'"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model, documents and general text."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny(folder / "model", "llama")
    (folder / "documents").mkdir()
    for number, sentence in enumerate(SENTENCES * 2):
        (folder / f"documents/{number}.txt").write_text(f"{sentence} It was the {number}th time in {1900 + number}.")
    texts = [f"{first} {second}" for first in SENTENCES * 3 for second in SENTENCES]
    (folder / "general.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="module")
def whole(inputs):
    """A run from its beginning to its end: what it printed."""
    status, out, err = forget(inputs, inputs / "run", "--json")
    assert status == 3
    return json.loads(out), err


def call(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(shlex.split(" ".join(map(str, words))))
    return status, out.getvalue(), err.getvalue()


def forget(inputs, out, *words, model="model", documents="documents", general="general.jsonl"):
    given = ["forget", inputs / model, "--documents", inputs / documents, "--general", inputs / general, "--out", out]
    return call(*given, QUICK, *words, *(() if "--stop" in str(words) else (NEVER,)))


def refused(result, *expected):
    """Exit status 2, one line per problem, no traceback, nothing on stdout."""
    status, out, err = result
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    lines = err.splitlines()
    assert all(line.startswith("unteach: ") for line in lines), err
    for words in expected:
        assert any(words in line for line in lines), f"{words!r} is not in {err!r}"


def weights(folder):
    return (folder / "model/model.safetensors").read_bytes()


def test_forget_writes_a_run_folder_and_a_model_that_loads(inputs, whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (result, err), run = whole, inputs / "run"
    assert (result["steps"], result["stop"]["rule"]) == (4, "max_steps")
    alpha = yaml.safe_load((run / "config.yaml").read_text())["method"]["alpha"]
    assert float(err.split("pull harder: --alpha ")[1].split()[0]) == pytest.approx(3 * alpha, rel=0.05)
    for name in ("result.json", "report.html", "evaluations/step_000000.json", "model/README.md"):
        assert (run / name).exists(), name
    assert len((run / "metrics.jsonl").read_text().splitlines()) == result["steps"]
    looks = [json.loads(line) for line in (run / "evaluations/stop.jsonl").read_text().splitlines()]
    assert (looks[0]["step"], looks[-1]["step"]) == (0, result["steps"])
    assert all({"verbmem_f", "nll_general"} <= look.keys() for look in looks)
    model, source = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "model", inputs / "model"))
    AutoTokenizer.from_pretrained(run / "model")
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    assert {"verbmem_f", "nll_general"} <= result["before"].keys() & result["after"].keys()
    refused(forget(inputs, run), "exists and is not empty: name a new folder, or --resume")


def test_its_config_runs_again_also_without_what_draws_the_report(inputs, whole, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name, *a))
    status, out, _ = call("forget --config", inputs / "run/config.yaml", "--out", tmp_path / "again", "--json")
    assert status == 3
    again = json.loads(out)
    assert again["after"] == whole[0]["after"]
    assert again["report"] is None
    assert not (tmp_path / "again/report.html").exists()
    assert weights(tmp_path / "again") == weights(inputs / "run")


@pytest.mark.usefixtures("run_alone")
def test_a_run_that_ended_before_its_first_step_can_be_resumed(inputs, whole, tmp_path, monkeypatch):
    def end(*given, **others):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("unteach.job.run.unlearn", end)
        assert forget(inputs, tmp_path / "run")[0] == 130
    refused(call("finish", tmp_path / "run"), "it has made no step yet; go on with: unteach forget --resume")
    assert call("forget --resume", tmp_path / "run")[0] == 3
    assert weights(tmp_path / "run") == weights(inputs / "run")


def test_without_its_rule_met_a_run_says_so_everywhere(inputs, whole):
    (result, err), run = whole, inputs / "run"
    assert result["forgotten"] is json.loads((run / "result.json").read_text())["forgotten"] is False
    card = (run / "model/README.md").read_text()
    assert "unlearned: not enough by its own rule\n" in card
    page = html.unescape((run / "report.html").read_text())
    assert "not met: too many steps" in page
    fails = result["stop"]["reason"].partition("; not met: ")[2]
    assert re.fullmatch(r"verbmem_f [\d.]+ \(wanted: <= -1\)", fails)
    assert fails in page
    assert fails in card
    assert fails in err
    log = (run / "run.log").read_text().splitlines()
    assert log[: len(err.splitlines())] == err.splitlines()
    assert f"NOT forgotten: {result['stop']['reason']} (step 4)" in log
    spent = json.loads((run / "result.json").read_text())["seconds_of"]
    assert list(spent) == ["steps", "looks", "rest"]
    assert sum(spent.values()) == pytest.approx(result["seconds"])
    assert min(spent.values()) > 0
    line = next(line for line in log if line.startswith("seconds: "))
    assert f"looks of the stop rule {spent['looks']:.0f} ({spent['looks'] / result['seconds']:.0%})" in line
    rows, looks = (
        [json.loads(line) for line in (run / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "evaluations/stop.jsonl")
    )
    assert {look["step"]: look for look in looks[1:]} == {
        row["step"]: {name: row[name] for name in looks[1]} for row in rows if "verbmem_f" in row
    }
    assert all(look["distance"] == look["verbmem_f"] + 1 for look in looks[1:])


@pytest.mark.usefixtures("run_alone")
def test_a_rule_that_is_met_is_status_0(inputs, tmp_path):
    status, out, _ = forget(inputs, tmp_path / "run", "--json --stop.metric 'verbmem_f <= 100' --max-steps 1")
    assert (status, json.loads(out)["forgotten"]) == (0, True)
    assert "not enough" not in (tmp_path / "run/model/README.md").read_text()


@pytest.mark.usefixtures("run_alone")
def test_a_resume_may_raise_max_steps_and_nothing_else(inputs, whole, tmp_path):
    run = tmp_path / "a run"
    status, _, err = forget(inputs, shlex.quote(str(run)), "--max-steps 2")
    assert status == 3
    command = shlex.quote(str(run))
    assert f"go on with: unteach forget --resume {command} --max-steps 4; or" in err
    for words, problem in (
        ("--max-steps 1", "max_steps is 1: it was 2, and a resume may only raise it"),
        ("--max-steps many", "max_steps is 'many': it must be a whole number"),
        ("--max-steps", "max_steps is ''"),
        ("--max-steps 9 --seed 1", "a resumed run keeps its settings; only --max-steps can be given"),
    ):
        refused(call("forget --resume", command, words), problem)
    status, out, _ = call("forget --resume", command, "--max-steps=4 --json")
    assert (status, json.loads(out)["steps"]) == (3, 4)
    assert weights(run) == weights(inputs / "run"), "as if it had been so long from the beginning"
    assert yaml.safe_load((run / "config.yaml").read_text())["max_steps"] == 4
    status, out, _ = call("finish", command)
    assert (status, "has ended already: max_steps 4 reached" in out) == (3, True)


@pytest.mark.usefixtures("run_alone")
def test_interrupted_it_names_itself_and_can_be_finished(inputs, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr("unteach.job.run.catching_signals", lambda say: contextlib.nullcontext(lambda: True))
        status, _, err = forget(inputs, run)
    assert status == 130
    hint = f"stopped after step 1; go on with: unteach forget --resume {run}, or make a result of it as it is: unteach"
    assert err.splitlines()[-1] == f"unteach: {hint} finish {run}" == (run / "run.log").read_text().splitlines()[-1]
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("seed: 0", "seed: 1"))
    refused(call("finish", run), "seed was 0 and is 1")
    status, out, err = call("finish", run, "--json", "--accept-changes")
    assert status == 3, err
    assert "warning: accepted: seed was 0 and is 1" in err
    result = json.loads(out)
    assert (result["steps"], result["stop"]["rule"], result["forgotten"]) == (1, "finished", False)
    assert result["seconds_of"]["steps"] == json.loads((run / "metrics.jsonl").read_text())["seconds"]
    assert f"go on with: unteach forget --resume {run}; or" in err
    assert "not enough" in (run / "model/README.md").read_text()
    assert load([run]).runs[0].rule == "not met: ended by hand"
    refused(call("finish", tmp_path), "config.yaml")


@pytest.mark.slow
def test_interrupted_it_exits_130_and_resumes_to_the_same_model(inputs, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("unteach.job.run.catching_signals", lambda say: contextlib.nullcontext(lambda: True))
        status, _, err = forget(inputs, tmp_path / "run")
        assert status == 130
        assert "stopped after step 1" in err
    status, out, _ = call("forget --resume", tmp_path / "run")
    assert status == 3
    assert weights(tmp_path / "run") == weights(inputs / "run")
    result = json.loads((tmp_path / "run/result.json").read_text())
    recital, loss = (
        f"{result['before'][name]:.{decimals}f} -> {result['after'][name]:.{decimals}f}"
        for name, decimals in (("verbmem_f", 1), ("nll_general", 3))
    )
    assert re.search(rf"^  recital of forget documents +{recital} +verbmem_f ↓$", out, re.MULTILINE)
    assert re.search(rf"^  loss on general text +{loss} +nll_general ↓$", out, re.MULTILINE)
    assert "auc_forget_holdout_ppl" not in out  # in result.json


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_exits_130(inputs, tmp_path):
    run = tmp_path / "run"
    words = f"forget {inputs}/model --documents {inputs}/documents --general {inputs}/general.jsonl --out {run} "
    words += f"{QUICK} {NEVER} --max-steps 100000 --evaluate-every 100000"
    command = [sys.executable, "-u", "-m", "unteach", *shlex.split(words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopping after this step" in err
    assert out == ""
    assert list((run / "checkpoints").glob("step_*/state.json"))


def test_a_file_may_say_a_part_and_flags_the_rest(inputs, tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("max_steps: 5\nmethod: {loss: it}\n")
    given = f"{inputs / 'model'} --documents {inputs / 'documents'} --incompetent micro:small --config {file}"
    refused(call("plan", given), "base is 'micro:small': its tokenizer is not that of")
    refused(call("plan --config", file), f"{file}: model is missing")
    file.write_text("max_step: 5\n")
    refused(call("plan", given), f"{file}: ", "did you mean max_steps?")
    refused(call("plan --config", tmp_path / "no.yaml"), "does not exist")


def test_inputs_that_cannot_be_measured_are_refused(inputs, tmp_path):
    (tmp_path / "short").mkdir()
    (tmp_path / "short/a.txt").write_text("Too short.")
    out = tmp_path / "run"
    status, _, err = forget(inputs, out, documents=tmp_path / "short")
    assert status == 2
    assert "no verbatim probe can be cut" in err.splitlines()[-1]
    refused(forget(inputs, out, f"--questions {tmp_path / 'no.jsonl'}"), "questions is", "there is no such file")
    refused(forget(inputs, out, "--max-tokens 9999"), "max_tokens is 9999: the model reads")
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": " ".join(SENTENCES * 20)}) + "\n")
    refused(forget(inputs, out, general=tmp_path / "one.jsonl"), "it has 1 documents, and at least 4 are needed")
    refused(call("evaluate micro:target --benchmark micro --device nowhere"), "device is 'nowhere'")


@pytest.mark.usefixtures("run_alone")
def test_wrong_documents(inputs, tmp_path):
    refused(forget(inputs, tmp_path / "run", documents="nowhere"), "nowhere")
    (tmp_path / "empty").mkdir()
    refused(forget(inputs, tmp_path / "run", documents=tmp_path / "empty"), "empty")
    for file, content, named in (
        ("binary/a.txt", b"text\x00\x01\x02", "a.txt"),
        ("picture/a.png", b"\x89PNG", "a.png: unknown extension '.png', must be one of .txt, .md, .html"),
        ("broken.jsonl", b'{"text": "good"}\n{"text": "bad\n', "2"),
        ("field.jsonl", b'{"body": "good"}\n', "body"),
        ("short/a.txt", b"", "short"),
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)
        refused(forget(inputs, tmp_path / "run", documents=tmp_path / file.split("/")[0]), named)
    assert not (tmp_path / "run").exists(), "nothing is left behind by a run that was refused"


@pytest.mark.slow
def test_a_plan_counts_times_and_writes_nothing(inputs, tmp_path, monkeypatch):
    given = (
        f"{inputs}/model --documents {inputs}/documents --general {inputs}/general.jsonl --out {tmp_path}/run {QUICK}"
    )
    status, out, err = call("plan", given)
    assert (status, err) == (0, "")
    assert "forget:  6 documents, " in out
    assert re.search(
        r"^time: about \S+ \S+ for 4 steps, at most .* \(a step takes .*, measured here\)", out, re.MULTILINE
    )
    for flags, why in (("--ranks 2", "a step of 2 processes is not tried"), ("", "it does not fit here")):
        if not flags:
            monkeypatch.setattr("unteach.planning.plan.free_host_memory", lambda: 1000)
        status, out, err = call("plan", given, flags, "--json")
        assert status == (0 if flags else 2), err
        planned = json.loads(out)
        assert planned["counts"]["forget"]["documents"] == planned["counts"]["documents"]["documents"] == 6
        assert planned["time"] == {"not_measured": why}
    assert not (tmp_path / "run").exists()


def test_what_a_run_refuses_its_dry_run_refuses(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("unteach.job.trial.plan", lambda config, ranks: SimpleNamespace(ranks=1, fits=True))
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    for flags, words in (
        ("--documents nowhere/x", "documents is 'nowhere/x': there is no such file or folder"),
        ("--base micro:small", "base is 'micro:small': its tokenizer is not that of"),
        ("--track nothing", "track is 'nothing': it must be one of"),
        ("--max-tokens 9999", "max_tokens is 9999: the model reads"),
        (f"--out {tmp_path}/used", "which exists and is not empty"),
        ("--stop.metric 'verbmem_g <= 3'", "verbmem_g is not measured in this run"),
    ):
        refused(forget(inputs, tmp_path / "run", flags, "--dry-run"), words)


@pytest.mark.usefixtures("run_alone")
def test_documents_are_piped_in_and_broken_ones_skipped(inputs, tmp_path, monkeypatch):
    texts = [file.read_text() for file in sorted((inputs / "documents").iterdir())]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts) + '{"text": \n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    _standard_input.cache_clear()
    given = ["forget", inputs / "model", "--general", inputs / "general.jsonl", "--documents - --out", tmp_path / "run"]
    refused(call(*given, QUICK), "documents is '-': standard input, line 7: broken JSON")
    status, out, err = call(*given, QUICK, NEVER, "--skip-unreadable --max-steps 1 --json")
    assert status in (0, 3), err
    assert json.loads(out)["counts"]["unreadable"] == {"documents": 1}
    assert "documents: standard input, line 7: skipped, unreadable: broken JSON" in err
    assert "6 documents, " in err
    assert "1 skipped (1 unreadable)" in err
    kept = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["documents"]  # for a run that goes on
    assert read_documents(kept).texts == texts


def test_wrong_models(inputs, tmp_path):
    refused(forget(inputs, tmp_path / "run", model="no_model"), "no_model")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow/config.json").write_text((inputs / "model/config.json").read_text())
    refused(forget(inputs, tmp_path / "run", model=tmp_path / "hollow"), "hollow")
    pickle = tmp_path / "pickle"
    save_tiny(pickle, "llama")
    (pickle / "model.safetensors").rename(pickle / "pytorch_model.bin")
    refused(forget(inputs, tmp_path / "run", model=pickle), "safetensors")


def test_wrong_settings_are_all_reported(inputs, tmp_path):
    out, model = tmp_path / "run", inputs / "model"
    refused(
        forget(inputs, out, "--loss nlu --batch 0 --momentum 2 --documnets x --trainable heads"),
        "loss is 'nlu'",
        "unknown flag --documnets (did you mean documents?)",
        "trainable is 'heads': it must be one of blocks, all",
    )
    (tmp_path / "c.yaml").write_text("model: m\nmax_stps: 3\nmethod:\n  alpah: 1\nbatch: many\n")
    refused(
        call("forget --config", tmp_path / "c.yaml"),
        "unknown key max_stps (did you mean max_steps?)",
        "unknown key method.alpah (did you mean alpha?)",
        "batch is 'many'",
    )
    refused(call("forget", model), "out is missing")
    refused(call("forget", model, "--out", out), "documents is missing")
    refused(call("forget a b --out", out), "only one model")
    refused(call("forget --resume", tmp_path / "nothing"), "config.yaml")
    refused(call("forget --resume", tmp_path, "--seed 1"), "a resumed run keeps its settings")
    refused(call("forget --resume"), "--resume needs a value")
    refused(call("forget --max-steps"), "--max-steps needs a value")
    refused(call("unlearn x"), "unknown command 'unlearn'")
    status, _, err = forget(inputs, out, "--stop.metric 'verbmem_g <= 3'")
    assert status == 2
    assert "verbmem_g is not measured in this run; measured are verbmem_f, nll_general" in err
    assert not out.exists()
    refused(call("reproduce theorm"), "did you mean theorem?")


def test_help_lists_every_command_and_flag():
    status, out, _ = call("--help")
    assert status == 0
    assert all(name in out for name in COMMANDS)
    for name, command in COMMANDS.items():
        status, out, _ = call(name, "--help")
        assert status == 0
        assert "examples:" in out
        assert all(example in out for example in command.examples)
        assert all(f"  {flag}" in out for flag in command.other_flags)
    text = help_text(ForgetConfig, flatten=("method",))
    for field in dataclasses.fields(ForgetConfig):
        if field.name not in ("method", "phases", "precision", "stop"):
            assert f"--{field.name.replace('_', '-')}" in text
    assert "--stop.metric" in text
    assert "None: the embedded public-domain text." in text
    assert call("--version")[1].startswith("unteach ")


def test_the_help_of_forget_stands_in_groups():
    out = call("forget --help")[1]
    groups = dict(re.findall(r"^([a-z ]+):\n((?:  .*\n?)+)", out, re.MULTILINE))
    assert list(groups)[-4:] == ["what people set", "the method", "memory", "everything else"]
    flags = {heading: re.findall(r"^  (--[a-z.-]+)", lines, re.MULTILINE) for heading, lines in groups.items()}
    assert {"--documents", "--keep", "--max-steps", "--resume", "--dry-run"} <= set(flags["what people set"])
    assert {"--loss", "--alpha", "--stop.metric"} <= set(flags["the method"])
    assert {"--micro-batch", "--checkpoint-activations", "--precision.forget"} <= set(flags["memory"])
    assert {"--save-dtype", "--quiet", "--json"} <= set(flags["everything else"])
    shown = [flag for lines in flags.values() for flag in lines]
    assert len(shown) == len(set(shown))


def test_help_version_and_import_wait_for_no_library():
    """Each in a process of its own, which says what it has imported and how long it has computed."""
    code = """
import contextlib, io, sys, time
import unteach
from unteach.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    for words in (["--version"], ["--help"], ["forget", "--help"], ["plan", "--help"]):
        assert main(words) == 0
assert {"ForgetConfig", "MeanTeacher", "Method", "Stop", "evaluate", "forget"} <= set(dir(unteach))
heavy = {"torch", "transformers", "numpy", "matplotlib", "rich"} & sys.modules.keys()
print(sorted(heavy), time.process_time())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, seconds = done.stdout.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert float(seconds) < 1.5


def test_every_public_name_is_there():

    assert set(unteach.__all__) <= set(dir(unteach))
    assert all(getattr(unteach, name) is not None for name in dir(unteach))


def test_a_model_is_asked_for_where_it_is_needed(inputs):
    from unteach.job import run_forget

    config = unteach.ForgetConfig(max_steps=2, documents=str(inputs / "documents"), out=str(inputs / "none"))
    with pytest.raises(InputError, match="^model is missing: name a model folder, a Hugging Face id, or micro:target$"):
        run_forget(config)
    assert not (inputs / "none").exists()
    refused(call("forget --documents", inputs / "documents --out x"), "model is missing")


@pytest.mark.usefixtures("run_alone")
def test_quiet_and_verbose(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("unteach.job.run.noise_warning", lambda *given: "warning: this is coarse")
    status, out, err = forget(inputs, tmp_path / "quiet", "--quiet")
    assert (status in (0, 3), err) == (True, "warning: this is coarse\n")
    assert "all scores:" in out
    status, _, err = forget(inputs, tmp_path / "verbose", "--verbose")
    assert [line.split(": NLL")[0] for line in err.splitlines() if ": NLL" in line] == [
        f"step {n}" for n in range(1, 5)
    ]
    refused(call("forget m --quiet --verbose"), "--quiet and --verbose are both given")
    monkeypatch.setattr("unteach.job.command.run_forget", lambda *given, **others: 1 / 0)
    status, _, err = forget(inputs, tmp_path / "broken", "--verbose")
    assert status == 1
    assert "Traceback" in err
    assert "ZeroDivisionError" in forget(inputs, tmp_path / "broken", "--quiet")[2]


@pytest.mark.usefixtures("run_alone")
def test_a_run_says_its_threads_and_a_resumed_one_uses_the_same(inputs, tmp_path, monkeypatch):
    before, run = torch.get_num_threads(), tmp_path / "run"
    try:
        with monkeypatch.context() as patched:
            patched.setattr("unteach.job.run.catching_signals", lambda say: contextlib.nullcontext(lambda: True))
            status, _, err = forget(inputs, run, "--threads 1")
        assert (status, torch.get_num_threads()) == (130, 1)
        assert "threads: 1 (as the settings say)" in err
        assert yaml.safe_load((run / "config.yaml").read_text())["threads"] == 1
        torch.set_num_threads(2)
        assert "threads: 1 (as the settings say)" in call("forget --resume", run)[2]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    refused(call("forget m --threads 0"), "threads is 0: it must be from 1 to 4096")


COMPLETED = r"""
source /dev/stdin
for line in "unteach fo" "unteach forget --max-" "unteach forget --trainable " "unteach plan m --loss np" \
    "unteach forget "; do
    COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    [[ "$line" == *" " ]] && COMP_WORDS+=("") && COMP_CWORD=$((COMP_CWORD + 1))
    _unteach
    echo "${COMPREPLY[@]}"
done
complete -p unteach
"""


def test_bash_completes_commands_flags_and_values():
    if not (bash := shutil.which("bash")):
        pytest.skip("there is no bash here")
    script = call("completion bash")[1]
    done = subprocess.run([bash, "-c", COMPLETED], input=script, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "forget",
        "--max-tokens --max-steps",
        "blocks all",
        "npo",
        "",  # file names, by -o default
        "complete -o default -F _unteach unteach",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_every_flag(shell):
    script = call("completion", shell)[1]
    for name, command in COMMANDS.items():
        assert all(flag.removeprefix("--") in script for flag in (name, *command.other_flags))
    assert "checkpoint-activations" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)
    if program and shell == "fish":
        asked = f"{script}\ncomplete -C 'unteach fo'; complete -C 'unteach forget --optimizer '"
        found = subprocess.run([program, "--no-config"], input=asked, capture_output=True, text=True, check=True).stdout
        assert found.split() == ["forget", "adamw", "mean_teacher"]
    refused(call("completion tcsh"), "shell is 'tcsh': it must be one of bash, zsh, fish")


def test_a_quick_example_works_when_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS["evaluate"].examples:
        status, out, err = call(line.removeprefix("unteach "))
        assert status == 0, err
        assert out.strip()


@pytest.mark.slow
def test_every_example_works_when_pasted(tmp_path):
    """One after the other in one folder, as somebody reading the help would; the demo: test_reproduce.py."""
    lines = list(dict.fromkeys(line for command in COMMANDS.values() for line in command.examples))
    shown = subprocess.run([sys.executable, "-m", "unteach", "--help"], capture_output=True, text=True, check=True)
    assert {line.strip() for line in shown.stdout.splitlines() if line.startswith("  unteach ")} <= set(lines)
    (tmp_path / "letter.txt").write_text(read_documents("micro:forget").texts[0], encoding="utf-8")
    for line in lines:
        if line in COMMANDS["demo"].examples:
            continue
        command = [sys.executable, "-m", "unteach", *line.partition(" > ")[0].split()[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "report.html").stat().st_size > 10_000


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
    options = parse(Options, shlex.split("a b --count=3 --inner.rate 5e-4 --path x/y --quiet"))
    assert options == Options(names=("a", "b"), count=3, inner=Inner(rate=5e-4), path=Path("x/y"), quiet=True)
    assert parse(Options, ["--inner.rate", "null"], start={"count": 7}).count == 7
    assert parse(Options, ["--rate", "2"], flatten=["inner"]).inner.rate == 2.0
    with pytest.raises(InputError) as error:
        parse(Options, shlex.split("--cuont 3 --count x --inner.rate fast"))
    assert error.value.problems == [
        "unknown flag --cuont (did you mean count?)",
        "count is 'x': it must be a whole number",
        "inner.rate is 'fast': it must be a number",
    ]
