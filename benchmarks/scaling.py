"""Achieved FLOP/s of a step over sequence length, batch and model size: the cost grows linearly where they are flat.

python benchmarks/scaling.py [--base 1.1B] [--shapes 135M 1.1B 3B 7B] [--precision fp16] [--tiny] [--json FILE]

`train_step` with `compile: true`, random weights; as many general chunks as forget sequences, half as long. Sequences
read at once hold about --tokens tokens (half of it for 7B, which fills the memory). FLOPs: 6 per weight and forget
token, 8 per general token, head and attention added. The smallest shape is not compiled, to save the time that takes:
flatness is asked of the others. "middle" is that of the slowest and the fastest above the smallest setting.
"""

import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import gc
import traceback

import torch

from measuring import (
    METHOD,
    RandomText,
    ceilings,
    flops,
    machine,
    make_model,
    one_step,
    parser,
    random_sequences,
    record,
    seconds,
    table,
)
from unteach.config import ForgetConfig, Precision
from unteach.data import ForgetBatches
from unteach.method.optimizers import make_optimizer
from unteach.models import trainable_parameters


def measure(model, batch, tokens, compiled, options, ceiling):
    """A row of the table for one setting."""
    general_tokens = tokens // 2
    weights = sum(p.numel() for p in model.parameters())
    together = options.tokens // 2 if weights > 5e9 else options.tokens
    forget = ForgetBatches(random_sequences(batch, tokens, model.config.vocab_size), 0)
    general = RandomText(batch, general_tokens, model.config.vocab_size)
    config = ForgetConfig(
        model="",
        batch=batch,
        general_batch=batch,
        micro_batch=max(1, together // tokens),
        method=METHOD,
        precision=Precision(forget=options.precision, divergence=options.precision),
        compile=compiled,
    )
    optimizer = make_optimizer(trainable_parameters(model, "blocks").values(), METHOD)

    def step():
        one_step(model, optimizer, forget, general, METHOD, config)

    duration = seconds(step, options.device, options.repeats, 1)
    optimizer.zero_grad()
    work = flops(model.config, batch, tokens, 3) + flops(model.config, batch, general_tokens, 4)
    return {
        "weights": weights,
        "batch": batch,
        "length": tokens,
        "compiled": "yes" if compiled else "no",
        "s/step": duration,
        "TFLOP/s": work / duration / 1e12,
        "% of ceiling": 100 * work / duration / ceiling.matmul,
    }


def show(rows, title, options):
    """The table, with each row's FLOP/s over the middle of all but the smallest setting."""
    if not rows:
        return
    rows.sort(key=lambda row: (row["weights"], row["length"], row["batch"]))
    later = sorted(row["TFLOP/s"] for row in rows[1:]) or [rows[0]["TFLOP/s"]]
    middle = (later[0] * later[-1]) ** 0.5
    for row in rows:
        row["÷ middle"] = row["TFLOP/s"] / middle
    table(rows, f"{title}: from {later[0] / middle:.2f} to {later[-1] / middle:.2f} of the middle above the smallest")
    record(options, "scaling", rows, over=title)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--base", default="1.1B")
    arguments.add_argument("--shapes", nargs="+", default=["135M", "1.1B", "3B", "7B"])
    arguments.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096])
    arguments.add_argument("--batches", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    arguments.add_argument("--tokens", type=int, default=8192)
    arguments.add_argument("--precision", default="fp16")
    arguments.add_argument("--eager", nargs="*", default=["135M"], help="shapes that are not compiled")
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    step_tokens = 16384
    if options.tiny:
        options.base, options.shapes, options.lengths, options.batches = "tiny", ["tiny"], [16, 32], [2, 4]
        options.tokens, options.repeats, options.precision, step_tokens = 64, 2, "fp32", 128
    if options.device != "cuda":
        options.eager = options.shapes
    print(machine(options.device), flush=True)
    ceiling = ceilings(options.device)
    over = {"sequence length": [], "batch": [], "model size": []}
    settings = [("sequence length", options.base, step_tokens // length, length) for length in options.lengths]
    length = min(1024, max(options.lengths))
    settings += [("batch", options.base, batch, length) for batch in options.batches]
    shapes = sorted(options.shapes, key=lambda shape: shape != options.base)  # the base model is there already
    settings += [("model size", shape, step_tokens // length, length) for shape in shapes]
    model, made = None, None
    for kind, shape, batch, tokens in settings:
        try:
            if made != shape:
                model = None
                gc.collect()
                torch._dynamo.reset()  # a shape does not count towards another's limit of compilations
                if options.device == "cuda":
                    torch.cuda.empty_cache()
                model, made = make_model(shape, options.device, max(options.lengths)), shape
            over[kind].append(measure(model, batch, tokens, shape not in options.eager, options, ceiling))
            table(over[kind][-1:])
        except Exception:  # out of memory among them; the other settings are still worth measuring
            traceback.print_exc()
        gc.collect()
    for kind, rows in over.items():
        show(rows, f"over {kind}", options)


if __name__ == "__main__":
    main()
