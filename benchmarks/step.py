"""A whole mean-teacher step against the plain way to write it, side by side in one run.

python benchmarks/step.py [--shape 1.1B] [--ways plain fp16 fp16+compile] [--micro-batch 20] [--tiny] [--json FILE]
python benchmarks/step.py --shape micro --ways fp32 fp32+tangent bf16 bf16+tangent ...
python benchmarks/step.py --plot RESULTS.jsonl docs/images/speed.png

Random weights of the named shape, forget 40 × 1024 and general 40 × 512 tokens, NLUL and KL, `trainable: blocks`.
The plain way: fp32 weights with TF32 products, full logits, the teacher as a second module, clip_grad_norm_,
torch.optim.SGD and a Python loop for the teacher. The others run `train_step` as `unteach forget` does; +compile with
compiled blocks, +separate as those were before they added gradients of weights in place, +cudnn with cuDNN's attention
where it can be had, +tangent with that form of the divergence.
For each: seconds of a step (median), the share of the matmul ceiling measured in the same run (FLOPs counted as 6 per
weight and forget token, 8 per general token, head and attention added), peak memory (on a CPU: of tensors made in the
step), and where the time goes. A CPU's seconds are those of the process where it has one thread: others may be at work.
"""

import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import copy
import gc
import json
import statistics
import time
import traceback
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from measuring import (
    METHOD,
    RandomText,
    ceilings,
    flops,
    machine,
    make_model,
    one_step,
    parser,
    peak_bytes,
    random_sequences,
    record,
    table,
)
from unteach.config import ForgetConfig, Precision
from unteach.data import ForgetBatches
from unteach.method.optimizers import make_optimizer
from unteach.models import trainable_parameters
from unteach.models.precision import half_weights
from unteach.training import passes as passes_module
from unteach.training import step as step_module

ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Clock:
    """Durations of named parts of a step, without waiting for the device in between."""

    def __init__(self, device):
        self.device, self.marks, self.rows = device, [], []

    def mark(self, name):
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
        self.marks.append((name, event))

    def end_step(self):
        """Close a step: each part lasts from its mark to the next."""
        self.mark("")
        if self.device == "cuda":
            torch.cuda.synchronize()
        row = {}
        for (name, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            duration = start.elapsed_time(end) / 1e3 if self.device == "cuda" else end - start
            row[name] = row.get(name, 0.0) + duration
        self.marks = []
        self.rows.append(row)

    def medians(self, warmup):
        rows = self.rows[warmup:]
        return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in rows[-1]}


class Batches:
    def __init__(self, options, vocabulary):
        self.forget = ForgetBatches(random_sequences(options.batch, options.forget_tokens, vocabulary), 0)
        self.general = RandomText(options.batch, options.general_tokens, vocabulary)


def plain_way(model, parameters, batches, options, clock):
    """The step as it is usually written."""
    from torch.nn.functional import log_softmax

    torch.set_float32_matmul_precision("high")
    teacher = copy.deepcopy(model).requires_grad_(False)
    pairs = list(zip(parameters.values(), [dict(teacher.named_parameters())[name] for name in parameters], strict=True))
    optimizer = torch.optim.SGD(parameters.values(), lr=METHOD.lr, momentum=METHOD.momentum)
    device = options.device
    forget = torch.tensor(batches.forget.sequences, device=device)
    general = torch.tensor(batches.general.chunks, device=device)
    rows, general_rows = options.plain_micro_batch, 2 * options.plain_micro_batch

    def step():
        optimizer.zero_grad()
        clock.mark("forget")
        for part in forget.split(rows):
            logits = model(input_ids=part, use_cache=False).logits[:, :-1]
            log_p = log_softmax(logits.float(), -1).gather(-1, part[:, 1:, None])
            loss = -torch.log1p(-log_p.exp().clamp(max=1 - 1e-6)).mean()
            (METHOD.alpha * len(part) / len(forget) * loss).backward()
            del logits, log_p, loss
        clock.mark("general")
        for part in general.split(general_rows):
            with torch.no_grad():
                log_q = log_softmax(teacher(input_ids=part, use_cache=False).logits[:, :-1].float(), -1)
            log_p = log_softmax(model(input_ids=part, use_cache=False).logits[:, :-1].float(), -1)
            loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
            (len(part) / len(general) * loss).backward()
            del log_p, log_q, loss
        clock.mark("optimizer")
        with torch.no_grad():
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), METHOD.clip)
            factor = min(1.0, METHOD.clip / float(norm))
            for p, t in pairs:
                p.grad.add_(p - t, alpha=factor * METHOD.damping)
            optimizer.step()
            slide = factor * METHOD.lr * METHOD.teacher_rate
            for p, t in pairs:
                t.mul_(1 - slide).add_(p, alpha=slide)
        clock.end_step()

    return step


def unteach_way(model, parameters, batches, options, clock, way):
    """``train_step``, with marks where its parts begin."""
    precision, *more = way.split("+")
    config = ForgetConfig(
        model="",
        batch=options.batch,
        general_batch=options.batch,
        micro_batch=options.micro_batch,
        method=METHOD,
        precision=Precision(forget=precision, divergence=precision),
        compile="compile" in more,
        divergence_form="tangent" if "tangent" in more else "difference",
    )
    optimizer = make_optimizer(parameters.values(), METHOD)
    passes = iter(())
    reads, computing = (step_module.read_as_teacher, step_module.read_change), step_module.computing
    step_of_optimizer = optimizer.step

    def marked_read(read):
        def marked(*arguments, **keywords):
            clock.mark("teacher")
            reading = read(*arguments, **keywords)
            clock.mark("rest")
            return reading

        return marked

    @contextmanager
    def marked(*arguments, **keywords):
        clock.mark(next(passes))
        with computing(*arguments, **keywords):
            yield
        clock.mark("rest")

    def marked_step():
        clock.mark("optimizer")
        step_of_optimizer()
        clock.mark("rest")

    optimizer.step = marked_step

    def separately(*arguments, **keywords):
        return half_weights(*arguments, **keywords | {"sums": False})

    def step():
        nonlocal passes
        passes = iter(("forget", "general"))
        with ExitStack() as stack:
            for name, read in zip(("read_as_teacher", "read_change"), reads, strict=True):
                stack.enter_context(patch.object(step_module, name, marked_read(read)))
            stack.enter_context(patch.object(step_module, "computing", marked))
            if "separate" in more:
                stack.enter_context(patch.object(passes_module, "half_weights", separately))
            if "cudnn" in more:
                stack.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
            clock.mark("rest")  # exchange of the weights, unscaling
            row = one_step(model, optimizer, batches.forget, batches.general, METHOD, config)
            clock.end_step()
        return row

    return step


def measure(way, options, ceiling):
    device = options.device
    model = make_model(options.shape, device)
    parameters = trainable_parameters(model, "blocks")
    batches = Batches(options, model.config.vocab_size)
    clock = Clock(device)
    if way == "plain":
        step = plain_way(model, parameters, batches, options, clock)
    else:
        step = unteach_way(model, parameters, batches, options, clock, way)
    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + options.repeats):
        last = step()
    parts = clock.medians(2)
    total = statistics.median(sum(row.values()) for row in clock.rows[2:])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes(step, device)
    work = flops(model.config, options.batch, options.forget_tokens, 3)
    work += flops(model.config, options.batch, options.general_tokens, 4)
    print(f"{way}: {[round(sum(row.values()), 3) for row in clock.rows]} s; last {last}", flush=True)
    row = {
        "way": way,
        "s/step": total,
        "TFLOP/s": work / total / 1e12,
        "% of ceiling": 100 * work / total / ceiling.matmul,
        "peak GiB": peak / 2**30,
        "reserved GiB": torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0,
        "first step s": first,
    }
    return row | {f"{name} s": parts.get(name, 0.0) for name in ("teacher", "forget", "general", "optimizer", "rest")}


def plot(results, image):
    """Where the time of a step goes, one panel a shape and one bar a way, from recorded results."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(results, encoding="utf-8") as file:
        found = [r for r in map(json.loads, file) if r["benchmark"] == "step"]
    names = ["teacher", "forget", "general", "optimizer", "rest"]
    labels = ["teacher reads", "forget text", "general text", "optimizer", "exchange, unscaling"]
    colours = ["#8da0cb", "#fc8d62", "#66c2a5", "#4d4d4d", "#b3b3b3"]
    heights = [len(r["rows"]) + 0.9 for r in found]
    figure, panels = plt.subplots(
        len(found), 1, figsize=(8.2, 0.62 * sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for panel, result in zip(panels[:, 0], found, strict=True):
        ways = [row["way"] for row in result["rows"]]
        left = [0.0] * len(ways)
        for name, label, colour in zip(names, labels, colours, strict=True):
            lengths = [row[f"{name} s"] for row in result["rows"]]
            panel.barh(ways, lengths, left=left, color=colour, label=label, height=0.62)
            left = [a + b for a, b in zip(left, lengths, strict=True)]
        for place, (end, row) in enumerate(zip(left, result["rows"], strict=True)):
            text = f"  {row['s/step']:.2f} s, {row['% of ceiling']:.0f} % of the matmul ceiling"
            panel.text(end, place, text, va="center", fontsize=9)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.45 * max(left))
        panel.set_title(f"{result['shape']} shape", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("seconds of a step: forget 40 × 1024 + general 40 × 512 tokens, one H200")
    handles, shown_labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, shown_labels, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(image, dpi=130)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default="1.1B")
    arguments.add_argument("--ways", nargs="+", default=["plain", "fp16", "fp16+compile"])
    arguments.add_argument("--micro-batch", type=int, default=20, help="forget sequences in a pass")
    arguments.add_argument("--plain-micro-batch", type=int, default=4)
    arguments.add_argument("--batch", type=int, default=40)
    arguments.add_argument("--forget-tokens", type=int, default=1024)
    arguments.add_argument("--general-tokens", type=int, default=512)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--plot", nargs=2, metavar=("RESULTS", "IMAGE"))
    options = arguments.parse_args()
    if options.plot:
        return plot(*options.plot)
    if options.tiny:
        options.shape, options.batch, options.micro_batch, options.plain_micro_batch = "tiny", 4, 2, 2
        options.forget_tokens, options.general_tokens, options.repeats = 32, 16, 2
        options.ways = ["plain", "fp32", "fp16"]
    print(machine(options.device))
    ceiling = ceilings(options.device)
    print(f"ceilings: fp16 matmul {ceiling.matmul / 1e12:.0f} TFLOP/s, copy {ceiling.copy / 1e12:.2f} TB/s", flush=True)
    rows = []
    for way in options.ways:
        torch.compiler.reset()  # else what several ways compile of one class adds up to the compiler's limit
        try:
            rows.append(measure(way, options, ceiling))
        except Exception:  # out of memory, a compiler that fails: the other ways are still worth measuring
            traceback.print_exc()
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if rows:
            table([rows[-1]])
    if not rows:
        raise SystemExit("no way ran")
    for row in rows:
        row["× plain"] = rows[0]["s/step"] / row["s/step"] if rows[0]["way"] == "plain" else float("nan")
    shape = f"{options.shape}, forget {options.batch}×{options.forget_tokens} + general {options.batch}×"
    table(rows, f"A step, {shape}{options.general_tokens} tokens, median of {options.repeats}")
    record(options, "step", rows, shape=options.shape, matmul=ceiling.matmul, copy=ceiling.copy)
    return None


if __name__ == "__main__":
    main()
