"""The paper's experiments as commands: tiny budgets, the real models and the real job. And the demo."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from unteach.cli import COMMANDS, main
from unteach.corpora import micro
from unteach.data import read_documents
from unteach.errors import InputError
from unteach.evaluation.formulas import Metric
from unteach.evaluation.scores import Scores
from unteach.evaluation.verdict import judge
from unteach.experiments import demo, reproduce
from unteach.experiments.paper import theorem
from unteach.experiments.reproduce import ReproduceOptions, number_of_jobs, run
from unteach.experiments.sources import build
from unteach.models.threads import usable_cores
from unteach.settings import parse

TINY = {
    "general": "micro:general_heldout", "max_steps": 2, "evaluate_every": 2, "batch": 2, "general_batch": 2,
    "general_tokens": 32, "probes": 2,
}  # fmt: skip


def options(tmp_path: Path, name: str, *, config=None, methods=None, **others) -> ReproduceOptions:
    settings = tmp_path / "settings.yaml"
    parts = {"losses": {"steps": 6, "escape_epochs": 1}, "recovery": {"steps": 2}, "deep": {"max_steps": 2}}
    chosen = {field: value for field, value in (TINY | (config or {})).items() if value is not None}
    parts |= {
        "config": chosen,
        "field": {"max_steps": 2},
        "relearning": {"steps": [0, 1], "batch": 2},
        "methods": methods or {},
    }
    settings.write_text(yaml.safe_dump(parts))
    fixed = {"seeds": "0", "out": tmp_path / "results", "device": "cpu", "limit": 2, "jobs": 1}
    return ReproduceOptions(name=name, settings=settings, **(fixed | others))


def cell(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / "results" / "micro" / f"{name}-seed-0.json").read_text())


def measured(text: str) -> list[str]:
    return [line.removeprefix("measuring ") for line in text.splitlines() if line.startswith("measuring")]


@pytest.mark.slow
def test_a_cell_is_measured_once_and_another_setting_is_noticed(tmp_path, capsys):
    first = run(options(tmp_path, "methods", only="adamw-ll-kl"))
    shown = capsys.readouterr()
    assert measured(shown.err) == ["adamw-ll-kl, seed 0"]
    assert all(f"| adamw-ll-kl | {state} |" in shown.err for state in ("missing", "  done"))
    assert "adamw-ll-kl" in shown.out
    assert first["missing"] == 0
    file, content = tmp_path / "results/micro/adamw-ll-kl-seed-0.json", cell(tmp_path, "adamw-ll-kl")
    assert (content["steps"], content["curve"]["step"], content["method"]["lr"]) == (2, [1, 2], 3e-4)
    assert {"verbmem_f", "knowmem_f", "knowmem_r", "privleak", "nll_general"} <= set(content["metrics"])
    assert {"value", "low", "high"} == set(content["metrics"]["verbmem_f"])
    assert content["examples"]["verbmem_f"][0]["output"]
    assert str(tmp_path) not in file.read_text()
    assert file.stat().st_size < 20_000
    again = run(options(tmp_path, "methods", only="adamw-ll-kl"))
    assert measured(capsys.readouterr().err) == []
    assert again["cells"] == first["cells"]
    run(options(tmp_path, "methods", config={"batch": 3}, only="adamw-ll-kl", list=True))
    assert "| adamw-ll-kl | other settings |" in capsys.readouterr().err
    assert json.loads(file.read_text()) == content


@pytest.mark.slow
def test_the_theorem_is_measured_once_and_listed_without_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(theorem, "TheoremSettings", functools.partial(theorem.TheoremSettings, num_steps=4, halvings=3))
    chosen = ReproduceOptions(name="theorem", out=tmp_path, seeds="1", device="cpu")
    assert run(dataclasses.replace(chosen, list=True))["missing"] == 1
    assert not list(tmp_path.rglob("*.json"))
    done = run(chosen)
    assert done["missing"] == 0
    names = [f"theorem-{part}-micro.svg" for part in ("no-momentum", "momentum", "lemma")]
    assert [Path(figure).name for figure in done["figures"]] == names
    assert "softmax regression" in Path(done["table"]).read_text(encoding="utf-8")
    capsys.readouterr()
    again = run(dataclasses.replace(chosen, images=tmp_path / "again"))
    assert measured(capsys.readouterr().err) == []
    assert Path(again["figures"][0]).read_bytes() == Path(done["figures"][0]).read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("methods --seeds 0,a", "seeds is '0,a'"),
        ("methods --seeds 0,0", "different whole numbers"),
        ("methods --benchmark muse", "benchmark is 'muse': it must be one of micro"),
        ("methods --benchmark tofu", "model is missing"),
        ("methods --limit 0", "limit is 0"),
        ("methods --jobs=-1", "jobs is -1"),
        ("methods --only mt-nlul-kk", "did you mean mt-nlul-kl?"),
        ("methods --settings nowhere.yaml", "settings 'nowhere.yaml' does not exist"),
        ("losses --device cup", "device is 'cup'"),
    ],
)
def test_wrong_input_is_refused_in_one_line(flags, message, tmp_path, capsys):
    assert main(["reproduce", *flags.split(), "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["losses", "recovery"])
@pytest.mark.parametrize("benchmark", ["muse-news", "muse-news-tuning", "tofu"])
def test_settings_of_the_real_model_can_be_read(benchmark, name, tmp_path, capsys):
    settings = Path(__file__).parents[2] / "results" / "smollm2" / f"{benchmark}.yaml"
    run(ReproduceOptions(name=name, settings=settings, out=tmp_path, device="cpu", list=True))
    assert "0 done" in capsys.readouterr().err


@pytest.mark.slow
def test_every_experiment_runs_on_the_embedded_benchmark(tmp_path, capsys):
    for name, only, count in (
        ("methods", "target,retrained,mt-nlul-qkl-star,adamw-it-kl,adamw-npo-kl", 5),
        ("losses", "loss-mt-nlul,loss-mt-npo-after-adamw", 2),
        ("recovery", "recovery-retrained,recovery-adamw-npo-kl", 2),
        ("sequential", "sequential-adamw-npo-kl,sequential-adamw-npo-kl-until-forgotten", 2),
        ("retain-or-general", "adamw-npo-kl,adamw-npo-kl-on-retain", 2),
        ("field", "field-target,field-retrained,field-rmu", 3),
        ("tradeoff", "", 1),
    ):
        result = run(options(tmp_path, name, config={"batch": 60} if name == "losses" else None, only=only))
        done = [cell for cell in result["cells"] if cell["state"] == "done"]
        assert len(done) >= count, name
        assert all(cell["metrics"] for cell in done)
        assert all(Path(figure).stat().st_size > 1000 for figure in result["figures"])
        drawn = {"losses": 2, "sequential": 2, "recovery": 4, "retain-or-general": 2, "field": 4, "tradeoff": 9}
        assert len(result["figures"]) == drawn.get(name, 0)
    assert measured(capsys.readouterr().err).count("adamw-npo-kl, seed 0") == 1  # methods' cell serves the others too
    recovered, unlearned = cell(tmp_path, "recovery-adamw-npo-kl"), cell(tmp_path, "adamw-npo-kl")
    assert recovered["before"]["metrics"] == unlearned["metrics"]  # the same steps give the same model
    assert recovered["metrics"] != unlearned["metrics"]
    for ending, rules in (("", {"max_steps"}), ("-until-forgotten", {"stop", "max_steps", "utility_floor"})):
        requests = cell(tmp_path, f"sequential-adamw-npo-kl{ending}")["requests"]
        assert [request["request"] for request in requests] == [0, 1, 2, 3, 4]
        assert requests[4]["metrics"]["nll_general"] != requests[0]["metrics"]["nll_general"]
        assert {request["stop"]["rule"] for request in requests[1:]} <= rules


@pytest.mark.slow
def test_cells_of_deep_forgetting_keep_the_way_and_what_was_asked(tmp_path):
    config = {"keep_batch": 2, "probes": 4}
    result = run(options(tmp_path, "deep", config=config, only="deep-half-kept,deep-alpha-2.5,deep-retrained"))
    assert result["missing"] == 0
    assert len(result["figures"]) == 2
    names = ("deep-half-kept", "deep-alpha-2.5", "deep", "deep-retrained")
    half, strong, usual, retrained = (cell(tmp_path, name) for name in names)
    assert {"knowmem_r_kept", "knowmem_r_others", "knowmem_pretraining", "privleak"} <= set(half["metrics"])
    assert "knowmem_pretraining" in retrained["metrics"]
    assert [look["step"] for look in half["stop_scores"]] == [0, 2]
    watched = {"verbmem_f", "knowmem_f", "knowmem_r", "auc_forget_holdout_min_40", "nll_general", "nll_retain"}
    assert all(watched <= look.keys() for look in half["stop_scores"])
    assert "auc_forget_holdout_min_40" in half["stop_reference"]
    assert strong["method"]["alpha"] == pytest.approx(2.5 * usual["method"]["alpha"])
    assert "stop_reference" not in usual
    again = run(options(tmp_path, "recovery", config=config, only="relearn-deep,relearn-retrained"))
    curve = cell(tmp_path, "relearn-deep")["relearning"]
    assert curve["step"] == [0, 1]
    assert len(curve["others"]) == len(curve["learned"]) == 2
    assert "## deep: " in (text := Path(again["table"]).read_text(encoding="utf-8"))
    assert "knowmem_f of the other people" in text


@pytest.mark.slow
def test_cells_side_by_side_are_those_of_one_process(tmp_path, capfd):
    chosen = options(tmp_path, "sequential", jobs=2, only="sequential-mt-nlul-qkl,sequential-adamw-npo-kl")
    result = run(chosen)
    assert [cell["state"] for cell in result["cells"]] == ["done"] * 2
    said = capfd.readouterr().err
    assert "2 done, 0 missing" in said
    for needed in ("target", "mt-nlul-qkl", "adamw-npo-kl"):  # both workers read the first: it is measured once
        assert said.count(f": measuring {needed}, seed 0") == 1, needed
    for name in ("mt-nlul-qkl", "adamw-npo-kl"):  # every request has the numbers that methods ran with
        whole, parts = (cell(tmp_path, f"{kind}{name}") for kind in ("", "sequential-"))
        assert [request["method"] for request in parts["requests"][1:]] == [whole["method"]] * 4, name
    (tmp_path / "alone").mkdir()
    alone = run(options(tmp_path / "alone", "methods", only="adamw-npo-kl"))
    beside = cell(tmp_path, "adamw-npo-kl")["metrics"]
    for name, value in alone["cells"][0]["metrics"].items():
        assert beside[name]["value"] == pytest.approx(value["value"], abs=0.05), name
    files = sorted((tmp_path / "results" / "micro").glob("*.json"))
    before = [file.stat().st_mtime_ns for file in files]
    run(chosen)  # the cells are known as those of this command
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.slow
def test_a_cell_that_fails_side_by_side_is_named_and_the_others_are_done(tmp_path, capfd):
    wrong = {"adamw-ll-kl": {"lr": 1e30}}
    chosen = options(tmp_path, "methods", only="adamw-ll-kl,adamw-npo-kl", jobs=2, methods=wrong)
    with pytest.raises(RuntimeError, match="adamw-ll-kl, seed 0 failed: .*nan.*; the others are done"):
        run(chosen)
    assert "adamw-ll-kl, seed 0 failed" in capfd.readouterr().err
    assert [file.name for file in chosen.out.rglob("*.json")] == ["adamw-npo-kl-seed-0.json"]


def workers_of(command: int) -> list[int]:
    """Its child processes that measure cells."""
    children = [int(n) for n in Path(f"/proc/{command}/task/{command}/children").read_text().split()]
    return [n for n in children if b"spawn_main" in Path(f"/proc/{n}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
@pytest.mark.parametrize("who", ["the command", "a worker"])
def test_ended_it_leaves_no_worker_behind(tmp_path, who):
    made = options(tmp_path, "methods", config={"max_steps": 10_000, "evaluate_every": 10_000})
    (temporary := tmp_path / "temporary").mkdir()
    flags = f"--settings {made.settings} --out {made.out} --seeds 0 --limit 2 --jobs 2 --device cpu"
    words = [sys.executable, "-m", "unteach", "reproduce", "methods", "--only", "mt-nlul-kl,mt-nlul-qkl"]
    given = {"text": True, "start_new_session": True, "env": os.environ | {"TMPDIR": str(temporary)}}
    with subprocess.Popen([*words, *flags.split()], stderr=subprocess.PIPE, **given) as command:
        started: set[str] = set()
        while len(started) < 2:
            line = command.stderr.readline()
            assert line, command.wait()
            started |= {line} if "stops at" in line else set()
        if who == "the command":
            command.send_signal(signal.SIGTERM)
            assert "stopped; the same command goes on with the missing cells" in command.stderr.read()
        else:
            os.kill(workers_of(command.pid)[0], signal.SIGKILL)
            assert "a worker was killed, most likely for lack of memory: take fewer --jobs" in command.stderr.read()
    assert command.returncode == (130 if who == "the command" else 1)
    assert not {".jsonl", ".safetensors"} & {path.suffix for path in temporary.rglob("*")}
    for _ in range(100):
        try:
            os.killpg(command.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a worker is still running")


def test_a_worker_that_reads_other_inputs_refuses(tmp_path, monkeypatch):
    folder = SimpleNamespace(get=str.upper)
    monkeypatch.setattr(reproduce, "_prepared", lambda *given: (SimpleNamespace(), folder, {"key": "a cell"}))
    reproduce._measure("a, seed 0", "key", ReproduceOptions(), 1, tmp_path)
    with pytest.raises(InputError, match="changed after the start, or can be read once only"):
        reproduce._measure("a, seed 0", "the key of the command", ReproduceOptions(), 1, tmp_path)


def test_the_base_has_a_former_name_and_cores_decide_the_number_of_jobs():
    given = parse(ReproduceOptions, ["deep", "--incompetent", "small", "--keep", "near"])
    assert (given.base, given.keep) == ("small", "near")

    def jobs(missing: int, **given) -> int:
        return number_of_jobs(ReproduceOptions(name="methods", **given), missing)

    assert jobs(1000, benchmark="micro", device="cpu") == min(8, usable_cores())
    if not torch.cuda.is_available():
        assert jobs(1000, benchmark="micro") == jobs(1000, benchmark="micro", device="cpu")
    assert jobs(1, benchmark="micro", device="cpu") == jobs(0, benchmark="micro", device="cpu") == 1
    assert jobs(1000, benchmark="muse-news") == 1
    assert jobs(1000, benchmark="muse-news", jobs=5) == 5


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def muse_folder(folder: Path) -> list[str]:
    """A folder with MUSE's layout and embedded texts; returns the forget texts."""
    texts = {part: micro.documents(part)[:8] for part in ("forget", "retain", "holdout")}
    pairs = [{"question": f"Who is person {n}?", "answer": f"number {n}"} for n in range(8)]
    write_rows(folder / "raw/forget.jsonl", [{"text": text} for text in texts["forget"]])
    write_rows(folder / "raw/retain1.jsonl", [{"text": text} for text in texts["retain"]])
    write_rows(folder / "verbmem/forget.jsonl", [{"prompt": text[:60], "gt": text[60:]} for text in texts["forget"]])
    for part in ("forget", "retain"):
        write_rows(folder / f"knowmem/{part}_qa.jsonl", pairs)
        write_rows(folder / f"knowmem/{part}_qa_icl.jsonl", pairs[:1])
    for part, group in texts.items():
        write_rows(folder / f"privleak/{part}.jsonl", [{"text": text} for text in group])
    return texts["forget"]


def tofu_folder(folder: Path) -> list[str]:
    """A folder with TOFU's tables; returns the forget answers."""
    rows = [
        {
            "question": f"Where was writer {n} born?",
            "answer": f"Writer {n} was born in the small town of Cardenford.",
            "paraphrased_answer": f"In Cardenford writer {n} was born.",
            "perturbed_answer": [f"Writer {n} was born in {place}." for place in ("Oxbury", "Millham")],
        }
        for n in range(8)
    ]
    perturbed = [f"{part}_perturbed" for part in ("forget10", "retain", "real_authors", "world_facts")]
    for table in ("forget10", "retain90", *perturbed):
        write_rows(folder / f"{table}.jsonl", rows)
    return [row["answer"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("benchmark", "make"), [("muse-news", muse_folder), ("tofu", tofu_folder)])
def test_other_benchmarks_run_with_models_and_tables_given(benchmark, make, tmp_path, capsys):
    texts = make(tmp_path / "data")
    instruct = tmp_path / "instruct.jsonl"
    write_rows(instruct, [{"instruction": f"Say {n}.", "input": "", "output": f"{n}"} for n in range(8)])
    given = {"benchmark": benchmark, "model": "micro:target", "reference": "micro:retrained", "base": "micro:base"}
    given |= {"data": tmp_path / "data", "keep": "micro:retain", "general": "micro:general_heldout", "limit": 8}
    given |= {"instruct": instruct, "config": {"max_tokens": 128, "probes": 8, "general": None}}
    for name, only in (
        ("methods", "target,adamw-it-kl"),
        ("recovery", "recovery-adamw-npo-kl"),
        ("sequential", "sequential-adamw-npo-kl"),
        ("deep", "deep-matched"),
    ):
        assert run(options(tmp_path, name, only=only, **given))["missing"] == 0
    files = sorted((tmp_path / "results" / benchmark).glob("*.json"))
    assert len(files) == 6  # those, and the cell of methods that tells sequential its steps
    for file in files:
        content = file.read_text()
        assert not any(text[:40] in content for text in texts)
        assert str(tmp_path) not in content
    metrics = json.loads(files[1].read_text())["metrics"]
    assert {"verbmem_f", "nll_general"} <= set(metrics)
    assert ("tofu_model_utility" if benchmark == "tofu" else "verbmem_f_tables") in metrics
    assert benchmark in capsys.readouterr().err


def test_the_end_of_an_answer_is_not_forgotten(tmp_path):
    """Models learn TOFU's answers with their end token; a model that forgot it would not end its answers any more."""
    answers = tofu_folder(tmp_path / "data")
    given = {"benchmark": "tofu", "model": "micro:target", "data": tmp_path / "data"}
    setup = build(options(tmp_path, "methods", **given), tmp_path, print)
    documents = read_documents(setup.config.documents).texts
    assert len(documents) == len(answers)
    assert all(text.endswith(answer) for text, answer in zip(documents, answers, strict=True))


@pytest.mark.slow
def test_target_and_retrained_models_are_built_from_a_base_model(tmp_path, capsys):
    from recipes.smollm2.models import main as build_models
    from unteach.models import find_folder

    muse_folder(tmp_path / "data")
    base, out = str(find_folder("micro:base")), tmp_path / "out"
    command = [base, str(out), "--data", str(tmp_path / "data")]
    flags = {"general": "micro:general_heldout", "max-tokens": 128, "general-tokens": 64, "batch": 8, "device": "cpu"}
    flags |= {"general-batch": 4, "lr": 2e-3, "warmup": 5, "check-every": 10, "max-steps": 60, "probes": 8}
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    build_models(command)
    content = json.loads((out / "models.json").read_text())
    target, retrained, history = content["target"], content["retrained"], content["target"]["history"]
    assert history[-1]["recital"] >= 60 > 30 > history[0]["recital"]
    assert target["reached"]["recital"]
    assert retrained["steps"] == round(target["steps"] / 2)
    assert retrained["history"][-1]["recital"] < 40
    assert {"target", "retrained"} <= {path.name for path in out.iterdir()}
    assert target["rounded"]["recital"] >= 60
    assert target["rounded"]["nll_general"] == pytest.approx(history[-1]["nll_general"], abs=0.02)
    weights, difference = out / "target" / "model.safetensors", out / "target.difference.safetensors"
    made = weights.read_bytes()
    assert difference.stat().st_size < Path(base, "model.safetensors").stat().st_size / 3  # that in half precision
    shutil.rmtree(out / "target")
    capsys.readouterr()
    build_models(command)
    assert "building" not in capsys.readouterr().out
    assert weights.read_bytes() == made  # restored from its difference


@pytest.fixture
def runs(monkeypatch):
    """Stands for the forget job; returns the configs that it got and the names of what was measured."""
    configs, measured = [], []

    def forget(config, *, shared):
        for name in ("stop before", "stop reference", "final step_000000", "final reference"):
            shared(name, lambda name=name: measured.append((Path(config.out).name, name)))
        configs.append(config)
        metrics = {name: Metric(1.0, None, None, 1, None, "percent") for name in demo.SHOWN}
        records = {"verbmem_f": [{"prompt": "p", "expected": "e", "output": "o", "score": 1.0}]}
        for file in ("step_000000", "reference", "step_000007"):
            Scores("micro", metrics, records).write(Path(config.out) / "evaluations" / f"{file}.json")
        return SimpleNamespace(steps=7, seconds=1.25, verdict=judge({}))

    monkeypatch.setattr("unteach.job.run_forget", forget)
    monkeypatch.setattr("unteach.report.write_report", lambda folders, path: path)
    return configs, measured


def test_the_rows_of_the_demo(runs, tmp_path):
    configs, measured = runs
    result = demo.run(demo.DemoOptions(out=tmp_path / "demo", seed=3, json=True))
    assert [row["name"] for row in result["rows"]] == ["target", "retrained", "mt-nlul-kl", "adamw-npo-kl", "deep"]
    metrics = {
        "verbmem_f",
        "verbmem_r",
        "knowmem_f",
        "knowmem_r",
        "privleak",
        "nll_general",
        "nll_retain",
        "degenerate",
    }
    assert all(set(row) == {"name", "seed", *metrics, "steps", "seconds"} for row in result["rows"])
    assert {row["seed"] for row in result["rows"]} == {3}
    assert [row["steps"] for row in result["rows"]] == [None, None, 7, 7, 7]
    assert result["report"] == str(tmp_path / "demo" / "report.html")
    assert json.dumps(result)
    deep = configs[-1].chosen()
    assert (deep.method.loss, deep.method.optimizer) == ("match", "adamw")
    assert (deep.keep, deep.base, deep.holdout) == ("micro:retain", "micro:base", "micro:holdout")
    assert all((config.keep, config.base) == (None, None) for config in configs[:-1])
    finals = [entry for entry in measured if entry[1].startswith("final")]
    assert [name for name, _ in finals] == ["mt-nlul-kl"] * 2  # the target and the retrained model are measured once
    assert ("deep", "stop before") in measured  # its rule looks at more than theirs
    with pytest.raises(InputError, match="exists and is not empty"):
        demo.run(demo.DemoOptions(out=tmp_path))


def test_all_methods_of_the_paper_can_be_shown(runs, tmp_path, capsys):
    demo.run(demo.DemoOptions(out=tmp_path / "demo", all=True))
    bases = {Path(config.out).name: config.base for config in runs[0]}
    assert [*bases][:2] == ["mt-nlul-kl", "adamw-npo-kl"]
    assert [*bases][-1] == "deep"
    assert len(bases) == 9
    assert {name: base for name, base in bases.items() if base} == {"adamw-it-kl": "micro:small", "deep": "micro:base"}
    printed = capsys.readouterr().out
    assert "A forget article begins: p" in printed
    assert printed.count("? known: not measured: give --questions") == 9


WITHOUT_NETWORK = """
import os, sys
def refuse(event, given):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(given[1], tuple)):
        os.write(2, f"a connection was wanted: {event} {given}".encode())
        os._exit(99)
sys.addaudithook(refuse)
from unteach.__main__ import start
start()
"""


@pytest.mark.slow
def test_the_demo_of_the_help_works_when_pasted(tmp_path):
    """Beside the other examples (test_cli.py), since it takes as long as all of them; every connection is refused."""
    (line,) = COMMANDS["demo"].examples
    command = [sys.executable, "-c", WITHOUT_NETWORK, *line.split()[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_that_is_kept_serves_other_cells(tmp_path, capsys):
    config, runs = {"keep_batch": 2, "probes": 4}, tmp_path / "runs"
    run(options(tmp_path, "deep", config=config, only="deep", runs=runs))
    (kept,) = runs.iterdir()
    first = cell(tmp_path, "deep")
    (tmp_path / "results" / "micro" / "deep-seed-0.json").unlink()
    capsys.readouterr()
    run(options(tmp_path, "deep", config=config, only="deep", runs=runs))
    assert "step 2" not in capsys.readouterr().err, "no step is taken again"
    again = cell(tmp_path, "deep")
    assert {key: again[key] for key in ("stop", "steps", "curve", "stop_scores")} == {
        key: first[key] for key in ("stop", "steps", "curve", "stop_scores")
    }
    (kept / "kept.json").unlink()  # as after a kill: the folder is not whole
    (tmp_path / "results" / "micro" / "deep-seed-0.json").unlink()
    run(options(tmp_path, "deep", config=config, only="deep", runs=runs))
    assert "step 2" in capsys.readouterr().err
    assert cell(tmp_path, "deep")["metrics"] == first["metrics"]
