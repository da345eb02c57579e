"""Step time of MeanTeacher against torch.optim.SGD plus a separate teacher update, side by side in one run.

python benchmarks/optimizer.py [--parameters 60e6] [--tensors 120] [--repeats 15] [--device cpu]

The baselines do the same arithmetic the way it is usually written: damping added to the gradient, clip_grad_norm_, SGD
with momentum, then the teacher in a Python loop over the parameters. A plain copy is timed too, to say how far
from memory bandwidth the step is. The contenders take turns, so that what else the machine does falls on all of them.
"""

import argparse
import platform
import statistics
import time

import torch

import unteach

LR, MOMENTUM, TEACHER_RATE, DAMPING, CLIP = 5e-4, 0.95, 10.0, 5.0, 1.0


def make_parameters(total, tensors, device):
    """Tensors of unequal sizes, as in a transformer, that add up to ``total`` weights."""
    shares = torch.linspace(0.2, 1.8, tensors, dtype=torch.float64)
    sizes = (shares / shares.sum() * total).long().tolist()
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter((0.02 * torch.randn(size, generator=generator)).to(device)) for size in sizes]


def mean_teacher(parameters):
    optimizer = unteach.MeanTeacher(
        parameters, lr=LR, momentum=MOMENTUM, teacher_rate=TEACHER_RATE, damping=DAMPING, clip=CLIP
    )
    return optimizer.step


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=60e6)
    parser.add_argument("--tensors", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    def fresh():
        return make_parameters(options.parameters, options.tensors, options.device)

    def synchronize():
        if options.device != "cpu":
            torch.accelerator.synchronize()

    contenders = {}
    for name, build in {
        "SGD + teacher loop": lambda p: sgd_and_loop(p, foreach=False),
        "SGD foreach + teacher loop": lambda p: sgd_and_loop(p, foreach=True),
        "MeanTeacher": mean_teacher,
    }.items():
        parameters = fresh()
        contenders[name] = (parameters, build(parameters))
    source, target = (torch.empty(int(options.parameters), device=options.device) for _ in range(2))
    contenders["copy of the weights"] = ([], lambda: target.copy_(source))

    generator = torch.Generator(options.device).manual_seed(1)
    gradients = [1e-4 * torch.randn(p.shape, generator=generator, device=options.device) for p in fresh()]
    seconds = {name: [] for name in contenders}
    for _ in range(options.repeats + 2):
        for name, (parameters, step) in contenders.items():
            for p, gradient in zip(parameters, gradients, strict=False):
                p.grad = gradient.clone()
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            seconds[name].append(time.perf_counter() - start)

    medians = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    count = sum(p.numel() for p in contenders["MeanTeacher"][0])
    print(
        f"{count / 1e6:.1f}M parameters in {options.tensors} tensors, float32, {options.device}, "
        f"{torch.get_num_threads()} threads, median of {options.repeats}; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}"
    )
    print(f"{'':28}{'ms':>8}{'÷ MeanTeacher':>16}{'÷ copy':>9}")
    for name, median in medians.items():
        print(
            f"{name:28}{1e3 * median:8.1f}{median / medians['MeanTeacher']:16.2f}"
            f"{median / medians['copy of the weights']:9.1f}"
        )


if __name__ == "__main__":
    main()
