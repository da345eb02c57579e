"""The loop on one of several gloo ranks, or on one: python sharded_worker.py FOLDER, started by test_sharded.py."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from unteach import distributed
from unteach.checkpoint import Checkpoints
from unteach.config import ForgetConfig, Method
from unteach.data import ForgetBatches
from unteach.losses import LOSSES
from unteach.models import trainable_parameters
from unteach.optimizers import make_optimizer
from unteach.unlearn import Interrupted, _BaseLogOdds, train_step, unlearn

VOCABULARY, STEPS = 96, 3
METHODS = {
    "mean_teacher": Method(alpha=0.5, lr=0.05, teacher_rate=4.0, damping=0.1, momentum=0.9),
    "adamw": Method(optimizer="adamw", alpha=0.5, lr=1e-2, warmup=0),
}
CASES = [
    dict(zip(("loss", "optimizer", "trainable", "tied", "dtype"), case, strict=True))
    for case in itertools.product(LOSSES, METHODS, ("blocks", "all"), (True, False), (torch.float32, torch.float64))
]


class General:
    """General text: a few chunks, drawn anew each step."""

    def batch(self, step, size):
        draws = torch.Generator().manual_seed(1000 + step)
        return torch.randint(VOCABULARY, (size, 9), generator=draws).tolist()


def small_llama(tied, dtype, seed=0, width=32):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def make(loss="nlul", optimizer="mean_teacher", trainable="blocks", tied=False, dtype=torch.float32, **settings):
    model = small_llama(tied, dtype)
    names = list(trainable_parameters(model, trainable))
    start = {name: value.detach().clone() for name, value in model.named_parameters() if name in names}
    distributed.shard(model)
    now = dict(model.named_parameters())
    method = dataclasses.replace(METHODS[optimizer], loss=loss)
    config = ForgetConfig(model="small", method=method, trainable=trainable, incompetent="small", **settings)
    draws = torch.Generator().manual_seed(7)
    lengths = [5, 12, 8, 3, 9, 7]
    forget = ForgetBatches([torch.randint(VOCABULARY, (n,), generator=draws).tolist() for n in lengths], seed=0)
    return model, {name: now[name] for name in names}, forget, config, start


def displacement(parameters, start):
    """θ_T - θ_0 of all trained weights, whole, in float64."""
    parts = [distributed.full_tensor(p.detach()).double() - start[n].double() for n, p in parameters.items()]
    return torch.cat([part.flatten() for part in parts])


def run_steps(case, batch=3, general_batch=3, micro_batch=None):
    """Rows of metrics, and the displacement, of a few steps."""
    model, parameters, forget, config, start = make(
        **case, batch=batch, general_batch=general_batch, micro_batch=micro_batch
    )
    optimizer = make_optimizer(parameters.values(), config.method)
    base = _BaseLogOdds(model, forget, [config.method], config) if config.method.loss == "npo" else None
    other = small_llama(False, case["dtype"], seed=5, width=16) if config.method.loss == "it" else None
    rows = []
    for step in range(STEPS):
        numbers = forget.numbers(step, config.batch)
        row = train_step(model, optimizer, forget, numbers, General(), config.method, config, step, base, other)
        rows.append([row[name] for name in ("forget_loss", "nll_forget", "divergence", "grad_norm", "clip_factor")])
    return {"rows": rows, "displacement": displacement(parameters, start)}


def all_cases():
    results = {str(case): run_steps(case) for case in CASES}
    uneven = {"loss": "npo", "optimizer": "mean_teacher", "trainable": "all", "tied": True, "dtype": torch.float64}
    results["one rank has no general text, and fewer micro-batches"] = run_steps(uneven, 3, 1, 1)
    return results


def run_loop(folder, optimizer, *, pause=None, resume=False):
    """The whole loop over six steps, perhaps paused and resumed; the displacement at its end, or None."""
    settings = {"batch": 3, "general_batch": 2, "max_steps": 6, "evaluate_every": 4, "checkpoint_every": 2}
    model, parameters, forget, config, start = make("npo", optimizer, "all", True, torch.float64, **settings)
    steps = []
    try:
        unlearn(
            model,
            parameters,
            forget,
            General(),
            config,
            evaluate=lambda step: {"nll_general": 1.0},
            rule=None,
            before={"nll_general": 1.0},
            checkpoints=Checkpoints(Path(folder), 2),
            log=lambda row: steps.append(row["step"]),
            paused=lambda: bool(steps) and steps[-1] == pause and distributed.rank() == distributed.ranks() - 1,
            resume=resume,
        )
    except Interrupted:
        return None
    return displacement(parameters, start)


def main(folder):
    torch.set_num_threads(1)
    distributed.join()
    results = {"cases": all_cases()}
    if distributed.is_first_rank():
        torch.save(results, folder / "results.pt")
    distributed.finish()
    os._exit(0)  # a gloo thread may outlive its group and abort an ordinary exit: "terminate called without…"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
