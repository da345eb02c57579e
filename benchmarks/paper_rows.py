"""A few steps of the paper's own rows, with the settings of configs/*.yaml, on random weights of Llama-2-7B's shape.

python benchmarks/paper_rows.py [--configs muse-news-mt-nlul-kl ...] [--steps 10] [--share 1] [--precision fp16]
                                [--micro-batch 4] [--checkpoint] [--tiny] [--json FILE]

Batch sizes, lengths, losses, divergences and optimizers are those of each file; precision and micro-batch are not: they
change speed and memory only. --checkpoint keeps only the blocks' inputs for the backward pass: slower, less memory.
IT's small model has TinyLlama's shape. Text and weights are random (and go from row to row), so only memory, time and
finite numbers mean something. For each row: seconds of a step (median), peak memory beside what `unteach plan` says of
a step (an evaluation takes what is free), and the hours that the largest number of steps would take.

With --share 0.2 a step reads a fifth of each batch, which is quicker and needs the same memory for activations; the
hours are those of the whole batch, counted as if all of a step's time grew with it (the optimizer's does not).
"""

import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import dataclasses
import gc
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from measuring import RandomText, machine, make_model, one_step, parser, random_sequences, record, synchronize, table
from unteach.config import ForgetConfig, Precision
from unteach.data import ForgetBatches
from unteach.method.optimizers import make_optimizer
from unteach.models import load_tokenizer, trainable_parameters
from unteach.planning.plan import EVALUATION, plan
from unteach.settings import from_yaml
from unteach.training.texts import OtherModels

FOLDER = Path(__file__).resolve().parent.parent / "configs"
TABLE_1 = [path.stem for path in sorted(FOLDER.glob("muse-*.yaml")) if not path.stem.endswith("-star")]


def shape_folder(folder, model):
    """A model folder that `unteach plan` can read: configuration, a tokenizer, and weights that are next to nothing."""
    model.config.save_pretrained(folder)
    load_tokenizer("micro:target").save_pretrained(folder)
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return str(folder)


def planned_bytes(config, model, small, options):
    with tempfile.TemporaryDirectory() as work:
        folders = {"model": shape_folder(Path(work) / "model", model)}
        if small is not None:
            folders["base"] = shape_folder(Path(work) / "small", small)
        moments = plan(dataclasses.replace(config, **folders, reference=None, device=options.device)).memory.moments
        return max(size for moment, size in moments.items() if moment != EVALUATION)


def run_row(name, model, small, options):
    config = from_yaml(ForgetConfig, FOLDER / f"{name}.yaml")
    precision = "fp32" if options.device == "cpu" else options.precision
    config = dataclasses.replace(
        config,
        micro_batch=options.micro_batch,
        precision=Precision(forget=precision, divergence=precision),
        checkpoint_activations=options.checkpoint,
    )
    if options.tiny:
        config = dataclasses.replace(config, batch=4, general_batch=4, max_tokens=32, general_tokens=16)
    config = dataclasses.replace(
        config,
        batch=max(1, round(options.share * config.batch)),
        general_batch=max(1, round(options.share * config.general_batch)),
    )
    method = config.method
    parameters = trainable_parameters(model, config.trainable)
    vocabulary = model.config.vocab_size
    forget = ForgetBatches(random_sequences(config.batch, config.max_tokens, vocabulary), 0)
    general = RandomText(config.general_batch, config.general_tokens, vocabulary)
    others = OtherModels(model, parameters, small, forget.sequences, config, [method])
    optimizer = make_optimizer(parameters.values(), method)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    durations = []
    for step in range(options.steps):
        started = time.perf_counter()
        row = one_step(model, optimizer, forget, general, method, config, step, others)
        synchronize(options.device)
        durations.append(time.perf_counter() - started)
    if not all(math.isfinite(row[key]) for key in ("forget_loss", "divergence", "grad_norm")):
        raise FloatingPointError(f"{name}: {row}")
    seconds = statistics.median(durations)
    print(f"{name}: {[round(d, 2) for d in durations]} s; last {row}", flush=True)
    return {
        "row": name,
        "forget + general": f"{config.batch} + {config.general_batch}",
        "precision": config.precision.divergence + (", checkpointed" if config.checkpoint_activations else ""),
        "s/step": seconds,
        "planned GiB": planned_bytes(config, model, small, options) / 2**30,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else 0.0,
        "divergence": row["divergence"],
        "gradient norm": row["grad_norm"],
        "max_steps": config.max_steps,
        "hours for max_steps": seconds / options.share * config.max_steps / 3600,
    }


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--configs", nargs="+", default=TABLE_1)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--share", type=float, default=1.0, help="of each batch")
    arguments.add_argument("--precision", default="fp16")
    arguments.add_argument("--micro-batch", type=int, default=4)
    arguments.add_argument("--checkpoint", action="store_true", help="keep only the blocks' inputs")
    options = arguments.parse_args()
    print(machine(options.device))
    model = make_model("tiny" if options.tiny else "7B", options.device)
    rows = []
    for name in options.configs:
        small = make_model("tiny" if options.tiny else "1.1B", options.device) if "-it-" in name else None
        try:
            rows.append(run_row(name, model, small, options))
        except torch.OutOfMemoryError as error:
            print(f"{name}: out of memory: {error}", flush=True)
        del small
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    table(rows, f"{options.steps} steps of the paper's rows")
    record(options, "paper_rows", rows, steps=options.steps, share=options.share)


if __name__ == "__main__":
    main()
