"""The loop on two gloo ranks: python sharded_worker.py FOLDER. Also imported, to do the same on one rank.

Imports once, then forks: each rank is a child. Run by test_sharded.py. By hand, on a machine with a GPU:
python tests/models/sharded_worker.py FOLDER cuda
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import sharded_optimizer
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches
from unteach.errors import Interrupted
from unteach.evaluation.generation import generate, next_tokens
from unteach.evaluation.inference import token_logprobs
from unteach.method.losses import LOSSES
from unteach.method.optimizers import make_optimizer
from unteach.models import distributed, trainable_parameters
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
COMBINATIONS = [
    dict(zip(("loss", "optimizer", "trainable", "tied"), values, strict=True))
    for values in itertools.product(LOSSES, METHODS, ("blocks", "all"), (True, False))
]
IN_FLOAT64 = [combination | {"dtype": torch.float64} for combination in COMBINATIONS]
IN_FLOAT32 = [combination | {"dtype": torch.float32} for combination in COMBINATIONS]
DEEP = [  # with keep text and an anchor, too
    {"loss": "match", "optimizer": optimizer, "trainable": "all", "tied": True, "dtype": torch.float64, "anchor": 0.7}
    for optimizer in METHODS
]


class General:
    """General text: a few chunks, drawn anew each step."""

    def batch(self, step, size):
        draws = torch.Generator().manual_seed(1000 + step)
        return torch.randint(VOCABULARY, (size, 9), generator=draws).tolist()


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


def make(
    loss="nlul",
    optimizer="mean_teacher",
    trainable="blocks",
    tied=False,
    dtype=torch.float32,
    device="cpu",
    half=None,
    anchor=0.0,
    **settings,
):
    model = small_llama(tied, dtype).to(device)
    names = list(trainable_parameters(model, trainable))
    start = {name: value.detach().clone() for name, value in model.named_parameters() if name in names}
    if dist.is_initialized():
        distributed.shard(model, device, half)
    now = dict(model.named_parameters())
    method = dataclasses.replace(METHODS[optimizer], loss=loss, anchor=anchor)
    config = ForgetConfig(model="small", method=method, trainable=trainable, base="small", **settings)
    draws = torch.Generator().manual_seed(7)
    lengths = [5, 12, 8, 3, 9, 7]
    forget = ForgetBatches([torch.randint(VOCABULARY, (n,), generator=draws).tolist() for n in lengths], seed=0)
    return model, {name: now[name] for name in names}, forget, config, start


def displacement(parameters, start):
    """θ_T - θ_0 of all trained weights, whole, in float64."""
    parts = [distributed.full_tensor(p.detach()).double() - start[n].double() for n, p in parameters.items()]
    return torch.cat([part.flatten() for part in parts]).cpu()


def run_steps(case, **settings):
    """Rows of metrics, and the displacement, of a few steps."""
    model, parameters, forget, config, start = make(
        **case, **({"batch": 3, "general_batch": 3, "keep_batch": 3} | settings)
    )
    optimizer = make_optimizer(parameters.values(), config.method)
    base = small_llama(False, case["dtype"], seed=5, width=16) if LOSSES[config.method.loss].base == "given" else None
    others = OtherModels(model, parameters, base, forget.sequences, config, [config.method])
    keep = ForgetBatches([sequence[::-1] for sequence in forget.sequences], seed=1, keep=True)
    texts = Texts(forget, General(), keep if config.method.anchor else None)
    rows = []
    for step in range(STEPS):
        read = texts_of_step(texts, config.method, config, step, others)
        row = train_step(model, optimizer, *read, config.method.alpha, config)
        rows.append([row[name] for name in ("forget_loss", "nll_forget", "divergence", "grad_norm", "clip_factor")])
    return {"rows": rows, "displacement": displacement(parameters, start)}


def uneven_case():
    """Of two ranks, the second has fewer micro-batches of forget text than the first, and no general text."""
    case = {"loss": "npo", "optimizer": "mean_teacher", "trainable": "all", "tied": True, "dtype": torch.float64}
    return run_steps(case, general_batch=1, micro_batch=1)


def run_cases(cases):
    return {str(case): run_steps(case) for case in cases}


def run_loop(folder, optimizer, *, pause=None, resume=False, device="cpu"):
    """The whole loop over four steps, perhaps paused or resumed: the displacement at its end, None where paused."""
    settings = {"batch": 3, "general_batch": 2, "max_steps": 4, "evaluate_every": 3, "checkpoint_every": 5}
    model, parameters, forget, config, start = make("npo", optimizer, "all", True, torch.float64, device, **settings)
    steps = []
    try:
        unlearn(
            model,
            parameters,
            Texts(forget, General()),
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
        model, parameters, forget, config, _ = make(tied=tied, trainable="all", dtype=torch.float64, batch=2)
        for kept in (True, False):
            distributed.KEEP_GATHERED = kept
            name = f"tied {tied}, kept {kept}"
            results[f"texts, {name}"] = generate(model, prompts, max_new_tokens=[5, 1, 8])
            results[f"log-probabilities, {name}"] = [torch.tensor(x) for x in token_logprobs(model, prompts[:1])]
            results[f"next tokens, {name}"] = next_tokens(model, prompts, [2, 5])
        measured = measure(model, list(parameters.values()), forget, General(), config)
        results[f"measured, tied {tied}"] = dataclasses.astuple(measured)
    return results


def work(folder):
    """All that one rank has to do."""
    for settings in ({"reshard_after_forward": True}, {}):  # without: the root's weights stay gathered
        sharded_optimizer.check(distributed.rank(), **settings)
    results = {
        "cases": run_cases([*IN_FLOAT64, *IN_FLOAT32, *DEEP]) | {"uneven": uneven_case()},
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


def main(folder):
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                store = f"file://{folder / 'store'}"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
                results = work(folder)
                if rank == 0:
                    torch.save(results, folder / "results.pt")
                distributed.finish()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)  # a gloo thread may outlive its group and abort an ordinary exit: "terminate called…"
        children.append(child)
    for _ in children:  # whichever ends first: where one fails, the other would wait for it
        child, status = os.wait()
        if status:
            for other in set(children) - {child}:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def check_on_a_gpu(folder):
    """One rank of NCCL, sharded as several would be, against the plain loop; prints what it finds."""

    def on_gpu(name):
        return {"device": "cuda", "precision": Precision(forget=name, divergence=name)}

    kinds = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    plain = {name: run_steps(COMBINATIONS[0] | {"dtype": torch.float32}, **on_gpu(name)) for name in kinds}
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    for name, half in kinds.items():
        for gathered_as in {None, half}:
            run = run_steps(COMBINATIONS[0] | {"dtype": torch.float32}, half=gathered_as, **on_gpu(name))
            gap = (run["displacement"] - plain[name]["displacement"]).norm() / plain[name]["displacement"].norm()
            print(f"{name}, gathered as {gathered_as}: displacement differs by {gap:.1e}", flush=True)
    loops = [run_loop(folder / "loop", "mean_teacher", device="cuda", pause=2)]
    loops += [run_loop(folder / "loop", "mean_teacher", device="cuda", resume=True)]
    loops += [run_loop(folder / "whole", "mean_teacher", device="cuda")]
    print(f"resumed against whole: {(loops[1] - loops[2]).norm() / loops[2].norm():.1e}", flush=True)
    distributed.finish()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[2:] == ["cuda"]:
        check_on_a_gpu(Path(sys.argv[1]))
    main(Path(sys.argv[1]))
