"""A step with little memory beside the step of all weights: seconds, memory, and what ``unteach plan`` says of it.

python benchmarks/adapters.py [--shape 7B] [--rank 16] [--ways full lean@3 lora16 lora4+again] [--compile] [--tiny]

Random weights of the named shape, forget 40 × 1024 and general 40 × 512 tokens, NLUL and KL. A way is ``full`` (all
weights of the blocks, float32), ``lean`` (all, their state in 16 bits) or ``loraBITS``: adapters on a base of 32, 16, 8
or 4 bits; ``+again`` computes activations again in the backward pass, ``@N`` has micro-batches of N instead of
--micro-batch. For each: trained weights, seconds of the first step and of a later one (median), the most that the
allocator had given out in a step, and the plan's count of tensors, without and with its allowance.
"""

import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import dataclasses
import gc
import shutil
import statistics
import tempfile
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file

from measuring import METHOD, RandomText, machine, make_model, one_step, parser, random_sequences, record, table
from unteach.config import ForgetConfig, Precision
from unteach.data import ForgetBatches
from unteach.method.optimizers import make_optimizer
from unteach.models import decoder_layers, trainable_parameters
from unteach.models.adapters import adapter_parameters, add_adapters, keep_base_in
from unteach.models.load import find_folder
from unteach.planning.plan import ALLOWANCE, plan
from unteach.planning.rehearsal import LiveBytes

STANDING = ("weights", "adapters", "weights in few bits", "teacher", "momentum")
WAYS = ["full", "lean", "lean+again", "lora32", "lora16", "lora8", "lora4", "lora4+again"]
LIMITS = {"lean": 78, "lora16": 40, "lora4+again": 22}
"""GiB that a step of 7B should not pass."""


def settings(way, options):
    kind, _, micro_batch = way.partition("@")
    name, _, again = kind.partition("+")
    bits = int(name.removeprefix("lora")) if name.startswith("lora") else None
    precision = options.precision or ("fp16" if options.device == "cuda" else "fp32")
    config = ForgetConfig(
        model="",
        batch=options.batch,
        general_batch=options.batch,
        micro_batch=int(micro_batch or options.micro_batch),
        max_tokens=options.forget_tokens,
        general_tokens=options.general_tokens,
        method=METHOD,
        precision=Precision(forget=precision, divergence=precision),
        compile=options.compile,
        checkpoint_activations=bool(again),
        state_bits=16 if name == "lean" else 32,
        device=options.device,
    )
    lora = {"adapter": "lora", "rank": options.rank, "base_bits": bits, "save": "adapter"}
    return dataclasses.replace(config, **lora) if bits else config


def planned(config, model):
    """The plan's GiB of a step: tensors alone, and with the allowance."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        shutil.copy(find_folder("micro:target") / "tokenizer.json", folder)
        save_file({"nothing": torch.zeros(1)}, Path(folder) / "model.safetensors")
        memory = plan(dataclasses.replace(config, model=folder, out=str(Path(folder) / "run"))).memory
    step = max(size for moment, size in memory.moments.items() if "read" in moment or "step" in moment)
    fixed, share = ALLOWANCE[config.device]
    standing = sum(memory.parts.get(part, 0) for part in STANDING)
    return (standing + (step - standing - fixed) / (1 + share)) / 2**30, step / 2**30


def measure(way, options):
    config, device = settings(way, options), options.device
    model = make_model(options.shape, device)
    tensors, with_allowance = ("–", "–") if options.unplanned else planned(config, model)
    parameters = trainable_parameters(model, "blocks")
    if config.adapter:
        add_adapters(model, decoder_layers(model), config.rank)
        keep_base_in(model, config.base_bits, None)
        parameters = adapter_parameters(model)
    gc.collect()
    optimizer = make_optimizer(parameters.values(), METHOD, config.state_bits)
    vocabulary = model.config.vocab_size
    forget = ForgetBatches(random_sequences(options.batch, options.forget_tokens, vocabulary), 0)
    general = RandomText(options.batch, options.general_tokens, vocabulary)
    durations = []

    def step():
        started = time.perf_counter()
        row = one_step(model, optimizer, forget, general, METHOD, config)
        durations.append(time.perf_counter() - started)  # the step has waited for its numbers
        return row

    first = step()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(options.repeats):
            last = step()
        peak = torch.cuda.max_memory_allocated()
    else:
        states = [value for state in optimizer.state.values() for value in state.values()]
        known = [*model.parameters(), *model.buffers(), *states]
        with LiveBytes(known) as live:
            step()
        peak = live.peak + sum({t.untyped_storage()._cdata: t.nbytes for t in known}.values())
        for _ in range(options.repeats):
            last = step()
    print(f"{way}: first {first}\n  last {last}", flush=True)
    return {
        "way": way,
        "trained": sum(p.numel() for p in parameters.values()),
        "first step s": durations[0],
        "s/step": statistics.median(durations[-options.repeats :]),
        "peak GiB": peak / 2**30,
        "planned GiB": tensors,
        "with allowance": with_allowance,
        "limit": LIMITS.get(way.partition("@")[0], "–") if options.shape == "7B" else "–",
    }


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default="7B")
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--ways", nargs="+", default=WAYS)
    arguments.add_argument("--batch", type=int, default=40)
    arguments.add_argument("--micro-batch", type=int, default=2)
    arguments.add_argument("--forget-tokens", type=int, default=1024)
    arguments.add_argument("--general-tokens", type=int, default=512)
    arguments.add_argument("--precision", help="of all passes; by default fp16 on a GPU, fp32 on a CPU")
    arguments.add_argument("--compile", action="store_true")
    arguments.add_argument("--unplanned", action="store_true", help="leave out what the plan says, to save time")
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    if options.tiny:
        options.shape, options.batch, options.forget_tokens, options.general_tokens = "tiny", 8, 64, 32
        options.rank = min(options.rank, 4)
    print(machine(options.device), flush=True)
    rows = []
    for way in options.ways:
        try:
            rows.append(measure(way, options))
        except Exception:  # the others are still worth measuring
            traceback.print_exc()
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if rows:
        table(rows, f"{options.shape}, rank {options.rank}, micro-batches of {options.micro_batch}")
        record(options, "adapters", rows, shape=options.shape, rank=options.rank, micro_batch=options.micro_batch)


if __name__ == "__main__":
    main()
