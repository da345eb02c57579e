"""Step time of MeanTeacher against torch.optim.SGD plus a separate teacher update, side by side in one run.

python benchmarks/optimizer.py [--parameters 60e6] [--tensors 120] [--repeats 15] [--device cpu] [--tiny] [--json FILE]

The baselines do the same arithmetic the way it is usually written: damping added to the gradient, clip_grad_norm_, SGD
with momentum, then the teacher in a Python loop over the parameters. A plain copy is timed too, to say how far
from memory bandwidth the step is: its necessary traffic is 32 bytes a weight (g for the norm; then g, θ, θ', v read and
θ, θ', v written), a copy's is 8. The contenders take turns, so that what else the machine does falls on all of them.
On a GPU the exchange with the teacher's weights (16 bytes a weight) is timed too.
"""

import statistics
import time

import torch

import unteach
from measuring import machine, parser, record, synchronize, table

TRAFFIC = {"MeanTeacher": 32, "teacher_weights(), in and out": 32, "copy of the weights": 8}
"""Necessary bytes a weight."""

LR, MOMENTUM, TEACHER_RATE, DAMPING, CLIP = 5e-4, 0.95, 10.0, 5.0, 1.0


def make_parameters(total, tensors, device):
    """Tensors of unequal sizes, as in a transformer, that add up to ``total`` weights."""
    shares = torch.linspace(0.2, 1.8, tensors, dtype=torch.float64)
    sizes = ((shares / shares.sum() * total / 128).long() * 128).tolist()
    generator = torch.Generator(device).manual_seed(0)
    return [torch.nn.Parameter(0.02 * torch.randn(size, generator=generator, device=device)) for size in sizes]


def mean_teacher(parameters):
    optimizer = unteach.MeanTeacher(
        parameters, lr=LR, momentum=MOMENTUM, teacher_rate=TEACHER_RATE, damping=DAMPING, clip=CLIP
    )
    return optimizer.step


def exchange(parameters):
    optimizer = unteach.MeanTeacher(parameters)

    def both_ways():
        with optimizer.teacher_weights():
            pass

    return both_ways


def sgd_and_loop(parameters, foreach):
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, foreach=foreach)
    teacher = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def step():
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=foreach)
        factor = min(1.0, CLIP / float(norm))
        for p, t in zip(parameters, teacher, strict=True):
            p.grad.add_(p - t, alpha=factor * DAMPING)
        optimizer.step()
        share = factor * LR * TEACHER_RATE
        for p, t in zip(parameters, teacher, strict=True):
            t.mul_(1 - share).add_(p, alpha=share)

    return step


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--parameters", type=float, default=60e6)
    arguments.add_argument("--tensors", type=int, default=120)
    arguments.add_argument("--repeats", type=int, default=15)
    options = arguments.parse_args()
    if options.tiny:
        options.parameters, options.tensors, options.repeats = 1e6, 20, 3
    contenders = {
        "SGD + teacher loop": lambda p: sgd_and_loop(p, foreach=False),
        "SGD foreach + teacher loop": lambda p: sgd_and_loop(p, foreach=True),
        "MeanTeacher": mean_teacher,
        "teacher_weights(), in and out": exchange,
        "copy of the weights": lambda p: copy_of(options),
    }
    sizes = make_parameters(options.parameters, options.tensors, options.device)
    generator = torch.Generator(options.device).manual_seed(1)
    gradients = [1e-4 * torch.randn(p.shape, generator=generator, device=options.device) for p in sizes]
    count = sum(p.numel() for p in sizes)
    del sizes
    medians = take_turns(contenders, gradients, options)
    rows = []
    for name, median in medians.items():
        traffic = TRAFFIC.get(name, TRAFFIC["MeanTeacher"])
        rows.append({"": name, "ms": 1e3 * median, "÷ MeanTeacher": median / medians["MeanTeacher"]})
        rows[-1]["÷ copy"] = median / medians["copy of the weights"]
        rows[-1]["GB/s of necessary traffic"] = traffic * count / median / 1e9
        rows[-1]["% of copy bandwidth"] = 100 * traffic / 8 * medians["copy of the weights"] / median
    print(machine(options.device))
    table(rows, f"{count / 1e6:.1f}M parameters in {options.tensors} tensors, float32, median of {options.repeats}")
    record(options, "optimizer", rows, parameters=count, tensors=options.tensors)


def copy_of(options):
    source, target = (torch.empty(int(options.parameters), device=options.device) for _ in range(2))
    return lambda: target.copy_(source)


def take_turns(contenders, gradients, options):
    """Median seconds of each contender's step; on a GPU one after the other, for the sake of memory."""
    groups = [[name] for name in contenders] if options.device == "cuda" else [list(contenders)]
    medians = {}
    for group in groups:
        made = {}
        for name in group:
            parameters = make_parameters(options.parameters, options.tensors, options.device)
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient.clone()
            made[name] = (parameters, contenders[name](parameters))
        seconds = {name: [] for name in group}
        for _ in range(options.repeats + 2):
            for name, (parameters, step) in made.items():
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad.copy_(gradient)
                synchronize(options.device)
                start = time.perf_counter()
                step()
                synchronize(options.device)
                seconds[name].append(time.perf_counter() - start)
        medians |= {name: statistics.median(values[2:]) for name, values in seconds.items()}
        del made, parameters, step
    return medians


if __name__ == "__main__":
    main()
