"""The loop on two gloo ranks gives what it gives on one.

Run as a program (python test_sharded.py FOLDER [slow]), this module is the two ranks: it imports once, then forks.
"""

import copy
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

import unteach
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches, read_documents
from unteach.errors import Interrupted
from unteach.evaluation.generation import generate, next_tokens
from unteach.evaluation.inference import token_logprobs
from unteach.method.losses import LOSSES
from unteach.method.optimizers import make_optimizer
from unteach.models import decoder_layers, distributed, find_folder, trainable_parameters
from unteach.models.adapters import adapter_parameters, add_adapters, keep_base_in
from unteach.planning.plan import plan
from unteach.training.calibrate import measure
from unteach.training.checkpoint import Checkpoints
from unteach.training.loop import unlearn
from unteach.training.step import train_step
from unteach.training.stopping import Search
from unteach.training.texts import OtherModels, Texts, texts_of_step

VOCABULARY, STEPS, RANKS = 96, 2, 2
SHARED = {"loss": "nlul", "token_share": 0.25, "loops_every": 4, "alpha": 0.5}
METHODS = {
    "mean_teacher": Method(optimizer="mean_teacher", lr=0.05, teacher_rate=4.0, damping=0.1, momentum=0.9, **SHARED),
    "adamw": Method(optimizer="adamw", lr=1e-2, warmup=0, **SHARED),
}


PAPER = ("ll", "npo", "it", "it_forward", "nlul", "match")
NAMES = ("loss", "optimizer", "trainable", "tied", "dtype")
EVERY = [
    dict(zip(NAMES, values, strict=True))
    for values in itertools.product(PAPER, METHODS, ("blocks", "all"), (True, False), (torch.float64, torch.float32))
]
ALL = {"optimizer": "mean_teacher", "trainable": "all", "tied": True, "dtype": torch.float64}
FAST = [
    *(case for case in EVERY if case == case | {"dtype": torch.float64, "trainable": "all", "tied": True}),
    *(case for case in EVERY if case == case | {"loss": "nlul", "tied": False}),
    *(ALL | {"loss": "match", "optimizer": name, "anchor": 0.7} for name in METHODS),  # with keep text, too
    *(ALL | {"loss": name} for name in ("ce_u", "undial")),  # all logits, without a base and with the initial model
    # Of two ranks, the second has fewer micro-batches of forget text than the first, and no general text.
    ALL | {"loss": "npo", "general_batch": 1, "micro_batch": 1},
    *(ALL | {"loss": "dpo", "micro_batch": size} for size in (1, 3)),  # pairs, which ranks and micro-batches part
    # Weights gathered in half precision.
    ALL | {"loss": "nlul", "trainable": "blocks", "dtype": torch.float32, "half": torch.bfloat16},
    # Adapters, on weights that are divided, and on weights of four bits, which are whole on every rank.
    ALL | {"loss": "nlul", "trainable": "blocks", "bits_under_adapters": 32},
    ALL | {"loss": "nlul", "trainable": "blocks", "dtype": torch.float32, "bits_under_adapters": 4},
]
SLOW = [case for case in EVERY if case not in FAST]


GENERAL = ForgetBatches(torch.arange(12 * 9).mul(37).remainder(VOCABULARY).reshape(12, 9).tolist(), seed=2)


def small_llama(tied, dtype, seed=0, width=32):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def check_optimizer(rank, **root_setting):
    """MeanTeacher alone under FSDP2, every weight trainable, tied embeddings, against one process."""
    model = small_llama(True, torch.float32)
    twin, alone = copy.deepcopy(model), copy.deepcopy(model)
    for layer in decoder_layers(model):
        fully_shard(layer)
    fully_shard(model, **root_setting)
    sharded = dict(model.named_parameters())  # taken now: while gathered, the module shows gathered parameters instead
    assert all(p.requires_grad and isinstance(p, DTensor) for p in sharded.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    settings = {"lr": 0.05, "momentum": 0.9, "teacher_rate": 4.0, "damping": 0.5, "clip": 0.3}
    optimizer = unteach.MeanTeacher(sharded.values(), **settings)
    reference = unteach.MeanTeacher(alone.parameters(), **settings)
    tokens = torch.randint(VOCABULARY, (RANKS, 12), generator=torch.Generator().manual_seed(7))
    mine = tokens[rank : rank + 1]

    def teacher():
        return {name: optimizer.state[p]["teacher"].full_tensor().clone() for name, p in sharded.items()}

    def student():
        return {name: p.full_tensor().detach().clone() for name, p in sharded.items()}

    def alike(logits, weights):
        twin.load_state_dict(weights, strict=False)  # without the second name of tied weights
        with torch.no_grad():
            return torch.equal(logits, twin(mine).logits)

    for _ in range(4):
        with optimizer.teacher_weights():
            inside = model(mine).logits
        assert alike(inside, teacher())
        with torch.no_grad():
            after = model(mine).logits
        assert alike(after, student())
        for own, part, trained in ((model, mine, optimizer), (alone, tokens, reference)):
            trained.zero_grad()
            own(part, labels=part).loss.backward()
            trained.step()
        assert abs(optimizer.last_grad_norm / reference.last_grad_norm - 1) < 1e-5, "the norm is over all ranks"
        assert optimizer.last_clip_factor < 1
    assert not torch.equal(inside, after), "teacher and student must differ for this test to say anything"
    for name, p in alone.named_parameters():
        torch.testing.assert_close(student()[name], p.detach(), rtol=1e-4, atol=1e-6)

    before = teacher()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(before[name], value) for name, value in teacher().items())
    assert all(isinstance(v, DTensor) for p in sharded.values() for v in optimizer.state[p].values())
    for p in sharded.values():
        p.grad.to_local().fill_(float("nan") if rank == 0 else 1.0)  # one rank's bad gradient stops both
    try:
        optimizer.step()
    except FloatingPointError:
        return
    raise AssertionError("a non-finite gradient on rank 0 must be refused on every rank")


def make(loss, optimizer, trainable, tied, dtype, anchor=0.0, half=None, bits_under_adapters=None, **settings):
    model = small_llama(tied, dtype)
    if bits_under_adapters:
        add_adapters(model, decoder_layers(model), rank=4)
        keep_base_in(model.to(dtype), bits_under_adapters, None)
    names = list(adapter_parameters(model) if bits_under_adapters else trainable_parameters(model, trainable))
    start = {name: value.detach().clone() for name, value in model.named_parameters() if name in names}
    if dist.is_initialized():
        distributed.shard(model, half=half)
    now = dict(model.named_parameters())
    pairs = {"token_share": 1.0, "loss_options": {"beta": 1.0}} if loss == "dpo" else {}
    method = dataclasses.replace(METHODS[optimizer], loss=loss, anchor=anchor, **pairs)
    settings["alternates"] = "given" if pairs else None
    settings["precision"] = Precision(**dict.fromkeys(("forget", "divergence"), "bf16" if half else "fp32"))
    config = ForgetConfig(model="small", method=method, trainable=trainable, base="small", **settings)
    draws = torch.Generator().manual_seed(7)
    sequences = [torch.randint(VOCABULARY, (n,), generator=draws).tolist() for n in (5, 12, 8, 3, 9, 7)]
    return model, {name: now[name] for name in names}, ForgetBatches(sequences, seed=0), config, start


def displacement(parameters, start):
    """θ_T - θ_0 of all trained weights, whole, in float64."""
    parts = [distributed.full_tensor(p.detach()).double() - start[n].double() for n, p in parameters.items()]
    return torch.cat([part.flatten() for part in parts]).cpu()


def run_steps(case):
    """Rows of metrics, and the displacement, of a few steps."""
    model, parameters, forget, config, start = make(**{"batch": 3, "general_batch": 3, "keep_batch": 3} | case)
    optimizer = make_optimizer(parameters.values(), config.method)
    base = small_llama(False, case["dtype"], seed=5, width=16) if LOSSES[config.method.loss].base == "given" else None
    alternates = [sequence[:2] + sequence[::-1] for sequence in forget.sequences]
    given = (base, forget.sequences, config, [config.method])
    others = OtherModels(model, parameters, *given, alternates=alternates)
    keep = ForgetBatches([sequence[::-1] for sequence in forget.sequences], seed=1, keep=True)
    texts = Texts(forget, GENERAL, keep if config.method.anchor else None, alternates)
    rows = []
    for step in range(STEPS):
        read = texts_of_step(texts, config.method, config, step, others)
        row = train_step(model, optimizer, *read, config.method.alpha, config)
        rows.append([row[name] for name in ("forget_loss", "nll_forget", "divergence", "grad_norm", "clip_factor")])
    return {"rows": torch.tensor(rows, dtype=torch.float64), "displacement": displacement(parameters, start)}


def run_loop(folder, optimizer, *, pause=None, resume=False):
    """The whole loop over four steps, perhaps paused or resumed: the displacement at its end, None where paused."""
    settings = {"batch": 3, "general_batch": 2, "max_steps": 4, "evaluate_every": 3, "checkpoint_every": 5}
    model, parameters, forget, config, start = make("npo", optimizer, "all", True, torch.float64, **settings)
    steps = []
    try:
        unlearn(
            model,
            parameters,
            Texts(forget, GENERAL),
            config,
            search=Search(None, {"nll_general": 1.0}, every=3, last=4, utility_floor=0.5),
            evaluate=lambda step: {"nll_general": 1.0},
            checkpoints=Checkpoints(Path(folder), 2),
            log=lambda row: steps.append(row["step"]),
            paused=lambda: steps[-1] == pause and distributed.rank() == distributed.ranks() - 1,
            resume=resume,
        )
    except Interrupted:
        return None
    return displacement(parameters, start)


def measurements():
    """What an evaluation and the calibration measure, with weights kept gathered and not."""
    draws = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCABULARY, (n,), generator=draws).tolist() for n in (4, 9, 6)]
    results = {}
    for tied in (True, False):
        model, parameters, forget, config, _ = make("nlul", "mean_teacher", "all", tied, torch.float64, batch=2)
        for share in (0.3, 2.0):
            distributed.FREE_SHARE = share
            name = f"tied {tied}, share {share}"
            results[f"texts, {name}"] = generate(model, prompts, max_new_tokens=[5, 1, 8])
            results[f"log-probabilities, {name}"] = [torch.tensor(x) for x in token_logprobs(model, prompts[:1])]
            results[f"next tokens, {name}"] = next_tokens(model, prompts, [2, 5])
        measured = measure(model, list(parameters.values()), forget, GENERAL, config)
        results[f"measured, tied {tied}"] = dataclasses.astuple(measured)
    return results


def work(folder):
    """All that one of two ranks has to do."""
    for settings in ({"reshard_after_forward": True}, {}):  # without: the root's weights stay gathered
        check_optimizer(distributed.rank(), **settings)
    results = {
        "cases": {str(case): run_steps(case) for case in FAST},
        "measurements": measurements(),
        "loops": {},
        "optimizer alone": "checked",
    }
    for optimizer in METHODS:
        paused = folder / f"paused by two, {optimizer}"
        assert run_loop(paused, optimizer, pause=2) is None
        if distributed.is_first_rank():
            shutil.copytree(paused, folder / f"for one, {optimizer}")
        results["loops"][f"2 to 2, {optimizer}"] = run_loop(paused, optimizer, resume=True)
        results["loops"][f"1 to 2, {optimizer}"] = run_loop(folder / f"for two, {optimizer}", optimizer, resume=True)
    return results


def run_rank(rank, folder, only):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    results = {"cases": {str(case): run_steps(case) for case in SLOW}} if only else work(folder)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    distributed.finish()
    os._exit(0)  # a gloo thread may outlive its group and abort an ordinary exit: "terminate called…"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks compute; they also leave checkpoints in a folder, and go on from those of one rank."""
    folder = tmp_path_factory.mktemp("sharded")
    for optimizer in METHODS:
        assert run_loop(folder / f"for two, {optimizer}", optimizer, pause=2) is None
    return run_worker(folder) | {"folder": folder}


def run_worker(folder, *arguments):
    words = [sys.executable, __file__, folder, *arguments]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return torch.load(folder / "results.pt", weights_only=True)


def assert_same_run(two, case):
    """The two ranks' metrics are those of one, and so is the displacement, to a share of itself."""
    one, exact = run_steps(case), case["dtype"] == torch.float64
    in_rows, in_weights = (0.1, 0.2) if "half" in case else (1e-9, 1e-9) if exact else (1e-5, 1e-3)
    torch.testing.assert_close(two["rows"], one["rows"], rtol=in_rows, atol=1e-3 * in_rows)
    size = one["displacement"].norm()
    assert size > 1e-4
    assert (two["displacement"] - one["displacement"]).norm() <= in_weights * size


@pytest.mark.parametrize("case", FAST, ids=lambda case: "-".join(map(str, case.values())))
def test_two_ranks_give_the_run_of_one(two_ranks, case):
    assert_same_run(two_ranks["cases"][str(case)], case)


@pytest.mark.slow
def test_two_ranks_give_every_run_of_one(tmp_path):
    found = run_worker(tmp_path, "slow")["cases"]
    for case in SLOW:
        assert_same_run(found[str(case)], case)


def test_fsdp2_on_two_ranks_computes_exactly_with_the_teacher_and_then_with_the_student(two_ranks):
    """Every weight trainable, tied embeddings; also with the root setting that keeps stale gathered weights."""
    assert two_ranks["optimizer alone"] == "checked"  # the ranks assert it: see check_optimizer


@pytest.mark.parametrize("optimizer", METHODS)
def test_a_run_goes_on_with_another_number_of_ranks(two_ranks, tmp_path, optimizer):
    folder = two_ranks["folder"]
    whole = run_loop(tmp_path / "whole", optimizer)
    runs = {name: run for name, run in two_ranks["loops"].items() if name.endswith(optimizer)}
    written = sorted(path.name for path in (folder / f"for one, {optimizer}").iterdir())
    assert written == ["step_000000", "step_000002"], "two ranks write folders"
    runs["2 to 1"] = run_loop(folder / f"for one, {optimizer}", optimizer, resume=True)
    assert len(runs) == 3
    for name, run in runs.items():
        assert (run - whole).norm() <= 1e-9 * whole.norm(), name
    assert whole.norm() > 1e-3


def test_evaluation_and_calibration_measure_the_same(two_ranks):
    for name, expected in measurements().items():
        torch.testing.assert_close(
            two_ranks["measurements"][name], expected, rtol=1e-9, atol=1e-12, msg=name, equal_nan=True
        )


def test_a_folder_written_again_is_never_missing(tmp_path, two_ranks):
    source = two_ranks["folder"] / "paused by two, adamw"
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


@pytest.mark.slow
def test_torchrun_gives_the_model_of_one_process(tmp_path, documents):
    printed, rows, weights = [], [], [load_file(find_folder("micro:target") / "model.safetensors")]
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        words = command("micro:target", *documents, "--json", "--out", run, ranks=ranks)
        ended = subprocess.run(words, capture_output=True, text=True, timeout=900)
        assert ended.returncode == (3 if ranks == 1 else 1), ended.stderr  # torchrun has one status for all failures
        printed.append(json.loads(ended.stdout))  # once, though two processes ran
        rows.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
        weights.append(load_file(run / "model" / "model.safetensors"))
    start, one, two = ({name: value.double() for name, value in each.items()} for each in weights)
    kept, others = ({name for name in start if torch.equal(run[name], start[name])} for run in (one, two))
    assert kept == others
    gap, size = (torch.cat([(run[name] - one[name]).flatten() for name in one]).norm() for run in (two, start))
    assert gap <= 1e-3 * size
    assert size > 1e-4
    assert [row["step"] for row in rows[1]] == [1, 2, 3, 4]
    for row, other in zip(*rows, strict=True):
        for name in ("forget_loss", "nll_forget", "grad_norm", "clip_factor", "lr"):
            assert other[name] == pytest.approx(row[name], rel=1e-4), name
    assert printed[1]["after"] == pytest.approx(printed[0]["after"], rel=1e-4, abs=1e-4)


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
    assert f"go on with: unteach forget --resume {run}" in output, output
    reached = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert Checkpoints(run / "checkpoints", 3).steps()[-1] == reached
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("max_steps: 400", f"max_steps: {reached + 2}"))
    ended = subprocess.run(command("--resume", run, "--accept-changes"), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 3, ended.stderr
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


if __name__ == "__main__":
    arguments = Path(sys.argv[1]), sys.argv[2:]
    torch.multiprocessing.start_processes(run_rank, arguments, nprocs=RANKS, start_method="fork")
