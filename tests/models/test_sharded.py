"""The loop on two gloo ranks gives what it gives on one: see sharded_worker.py."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sharded_worker
import torch
from safetensors.torch import load_file

from unteach.config import ForgetConfig
from unteach.data.documents import read_documents
from unteach.models import distributed, find_folder
from unteach.planning.plan import plan
from unteach.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def two_ranks(folder):
    """What two ranks compute; they also leave checkpoints, and go on from those of one rank."""
    for optimizer in sharded_worker.METHODS:
        assert sharded_worker.run_loop(folder / f"for two, {optimizer}", optimizer, pause=2) is None
    return run_worker(folder)


def run_worker(folder, *arguments):
    worker = Path(__file__).with_name("sharded_worker.py")
    ended = subprocess.run([sys.executable, worker, folder, *arguments], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return torch.load(folder / "results.pt", weights_only=True)


def show(case):
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


def assert_same_run(one, two, dtype):
    tight = dtype == torch.float64
    rows, other_rows = (torch.tensor(run["rows"], dtype=torch.float64) for run in (one, two))
    torch.testing.assert_close(other_rows, rows, rtol=1e-9 if tight else 1e-5, atol=1e-12 if tight else 1e-9)
    size = one["displacement"].norm()
    gap = (two["displacement"] - one["displacement"]).norm()
    assert size > 1e-4
    assert gap <= (1e-9 if tight else 1e-3) * size
    assert size >= 100 * gap


@pytest.mark.parametrize(
    "case", [*sharded_worker.IN_FLOAT64, *sharded_worker.IN_FLOAT32, *sharded_worker.DEEP], ids=show
)
def test_two_ranks_give_the_run_of_one(two_ranks, case):
    assert_same_run(sharded_worker.run_steps(case), two_ranks["cases"][str(case)], case["dtype"])


def test_fsdp2_on_two_ranks_computes_exactly_with_the_teacher_and_then_with_the_student(two_ranks):
    """Every weight trainable, tied embeddings; also with the root setting that keeps stale gathered weights."""
    assert two_ranks["optimizer alone"] == "checked"  # the ranks assert it: see sharded_optimizer.py


def test_a_rank_may_have_less_to_read_or_nothing(two_ranks):
    assert_same_run(sharded_worker.uneven_case(), two_ranks["cases"]["uneven"], torch.float64)


@pytest.mark.parametrize("optimizer", sharded_worker.METHODS)
def test_a_run_goes_on_with_another_number_of_ranks(two_ranks, folder, tmp_path, optimizer):
    whole = sharded_worker.run_loop(tmp_path / "whole", optimizer)
    runs = {name: run for name, run in two_ranks["loops"].items() if name.endswith(optimizer)}
    written = sorted(path.name for path in (folder / f"for one, {optimizer}").iterdir())
    assert written == ["step_000000", "step_000002"], "two ranks write folders"
    runs["2 to 1"] = sharded_worker.run_loop(folder / f"for one, {optimizer}", optimizer, resume=True)
    assert len(runs) == 3
    for name, run in runs.items():
        assert (run - whole).norm() <= 1e-9 * whole.norm(), name
    assert whole.norm() > 1e-3


def test_evaluation_and_calibration_measure_the_same(two_ranks):
    for name, expected in sharded_worker.measurements().items():
        torch.testing.assert_close(
            two_ranks["measurements"][name], expected, rtol=1e-9, atol=1e-12, msg=name, equal_nan=True
        )


def test_a_folder_written_again_is_never_missing(tmp_path, two_ranks, folder):
    source = folder / "paused by two, adamw"
    shutil.copytree(source, tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    last = checkpoints.steps()[-1]
    path = checkpoints.path(last)
    path.rename(path.with_suffix(".old"))  # killed after the old one was set aside
    shutil.copytree(path.with_suffix(".old"), path.with_suffix(".part"))
    again = Checkpoints(tmp_path / "checkpoints", 2)
    assert again.steps()[-1] == last
    assert again.load(last)["position"]["step"] == last
    assert not list((tmp_path / "checkpoints").glob("*.part"))


# ---- the command -------------------------------------------------------------------------------------


def command(*arguments, ranks=1):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "unteach", "forget", *map(str, arguments)]


@pytest.fixture
def documents(tmp_path):
    texts = read_documents("micro:forget").texts[:5]
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    settings = {"max-steps": 4, "evaluate-every": 2, "checkpoint-every": 1, "probes": 3, "batch": 3, "general-batch": 3}
    settings |= {"documents": file, "general-tokens": 64, "max-tokens": 64, "save-dtype": "float32"}
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def saved(run):
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.slow
def test_torchrun_gives_the_model_of_one_process(tmp_path, documents):
    printed = []
    for ranks in (1, 2):
        words = command("micro:target", *documents, "--json", "--out", tmp_path / f"run{ranks}", ranks=ranks)
        ended = subprocess.run(words, capture_output=True, text=True, timeout=280)
        assert ended.returncode == 0, ended.stderr
        printed.append(json.loads(ended.stdout))  # once, though two processes ran
    start, one, two = (load_file(find_folder("micro:target") / "model.safetensors"), *map(saved, runs(tmp_path)))
    assert [name for name in one if torch.equal(one[name], start[name].float())] == [
        name for name in two if torch.equal(two[name], start[name].float())
    ]
    gap, size = (
        torch.cat([(a[name].double() - b[name].double()).flatten() for name in a]).norm()
        for a, b in ((one, two), (one, start))
    )
    assert gap <= 1e-3 * size
    assert size > 1e-4
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs(tmp_path)]
    assert [row["step"] for row in rows[1]] == [1, 2, 3, 4]
    for row, other in zip(*rows, strict=True):
        for name in ("forget_loss", "nll_forget", "grad_norm", "clip_factor", "lr"):
            assert other[name] == pytest.approx(row[name], rel=1e-4), name
    assert printed[1]["after"].keys() == printed[0]["after"].keys()
    for name, value in printed[0]["after"].items():
        assert printed[1]["after"][name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


def runs(folder):
    return folder / "run1", folder / "run2"


@pytest.mark.slow
def test_a_signal_to_torchrun_pauses_all_ranks_and_one_process_can_go_on(tmp_path, documents):
    run = tmp_path / "run"
    words = command("micro:target", *documents, "--max-steps", 400, "--evaluate-every", 400, "--out", run, ranks=2)
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    output = launcher.communicate(timeout=120)[0]
    assert "go on with: unteach forget --resume RUN" in output, output
    reached = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert Checkpoints(run / "checkpoints", 3).steps()[-1] == reached
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("max_steps: 400", f"max_steps: {reached + 2}"))
    ended = subprocess.run(command("--resume", run), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, reached + 3))


@pytest.mark.slow
def test_only_forget_runs_under_torchrun():
    words = [*command(ranks=2)[:-1], "plan", "micro:target", "--documents", "micro:forget"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert ended.stderr.count("unteach: plan runs on one process") == 1


def test_a_plan_for_several_ranks_is_that_of_each():
    alone, each = (plan(ForgetConfig(model="micro:target", device="cpu"), ranks=ranks) for ranks in (1, 2))
    halved = ("weights", "teacher", "momentum", "gradients", "teacher's outputs")
    assert [each.memory.parts[part] for part in halved] == [alone.memory.parts[part] // 2 for part in halved]
    gathered = "gathered weights and gradients"
    assert alone.memory.parts[gathered] == 0 < each.memory.parts[gathered] <= 2 * alone.memory.parts["weights"]
    assert each.memory.checkpoint == alone.memory.checkpoint
    assert "memory of each rank" in "".join(each.lines())


def test_parts_of_a_batch_on_one_rank_are_its_micro_batches():
    parts = distributed.parts_of_rank([1, 2, 3], lambda items: [items[:2], items[2:]])
    assert parts == [([1, 2], 1.0), ([3], 1.0)]
