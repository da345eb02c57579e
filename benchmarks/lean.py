"""What keeping the mean teacher's state in 16 bits does to a run: its way against that of float32, and of float64.

python benchmarks/lean.py [--parts forms quadratic run] [--steps 200] [--tiny] [--json FILE]

forms: the way u from teacher to student in five forms of 16 bits, all else exact, on a quadratic of 16,384 weights,
curvatures over three powers of ten, some gradients a thousand times the others, against float64.
quadratic: the same problem with the optimizers themselves, gradients of four micro-batches.
run: micro:target (or --model, its tokenizer's own texts by --documents) with the program's method (without loops) and
measured numbers, no stop rule, few and short texts, in float32. The truth is float64 with a state in float64; float32
is how far rounding alone takes a run. On a GPU float64 is left out, and float32 is the truth.
The numbers are ‖way - right way‖ / ‖right way‖ of student and teacher from where they began.
"""

import dataclasses
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from measuring import machine, one_step, parser, record, table
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import EMBEDDED_GENERAL, ForgetBatches, GeneralText, read_documents, tokenise
from unteach.method.lean import LeanMeanTeacher
from unteach.method.mean_teacher import MeanTeacher
from unteach.method.optimizers import make_optimizer
from unteach.method.rounding import BLOCK, key_of, packed, random_bits, to_bfloat16, unpacked
from unteach.models import load_model, trainable_parameters
from unteach.training.calibrate import calibrated, measure
from unteach.training.texts import OtherModels

SETTINGS = {"momentum": 0.95, "damping": 0.1, "clip": 1.0}


def nearest_in_blocks(values, bits):
    scale = packed(values, bits)[1].repeat_interleave(BLOCK)[: len(values)]
    return (values / scale).half().float() * scale


def whole_numbers_in_blocks(values, bits):
    """int16 with a scale for each block, rounded at random: finer near a block's largest number, coarser below."""
    largest = values.view(-1, BLOCK).abs().amax(1).clamp(min=1e-30).repeat_interleave(BLOCK)
    share = (bits & 0xFFFF).float() / 2**16
    return (values / largest * 32766 + share).floor() * largest / 32766


FORMS = {
    "bfloat16, to nearest": lambda values, bits: values.bfloat16().float(),
    "bfloat16, at random": lambda values, bits: to_bfloat16(values, bits).float(),
    "float16 in blocks, to nearest": nearest_in_blocks,
    "float16 in blocks, at random": lambda values, bits: unpacked(*packed(values, bits)),
    "int16 in blocks, at random": whole_numbers_in_blocks,
}


class Quadratic:
    """Pulled by a constant and noise, held to the teacher by curvatures from 0.001 to 1; in any dtype."""

    def __init__(self, numbers, slide):
        draws = torch.Generator().manual_seed(0)
        self.curvature = torch.logspace(-3, 0, numbers, dtype=torch.float64)[torch.randperm(numbers, generator=draws)]
        heavy = torch.where(torch.rand(numbers, generator=draws) < 0.01, 1000.0, 1.0).double()
        self.pull = heavy * torch.randn(numbers, generator=draws, dtype=torch.float64) / 30 / numbers**0.5
        self.start = 0.02 * torch.randn(numbers, generator=draws, dtype=torch.float64)
        self.settings = SETTINGS | {"lr": 0.02, "teacher_rate": slide / 0.02}

    def gradient(self, student, teacher, step, part=0):
        draws = torch.Generator().manual_seed(10 * step + part)
        noise = torch.randn(len(self.start), generator=draws, dtype=torch.float64)
        pull = (self.pull * (1 + 0.3 * noise)).to(student.dtype)
        return pull + self.curvature.to(student.dtype) * (student - teacher)


def off(found, right, start):
    found, right, start = (torch.cat([t.detach().double().flatten() for t in side]) for side in (found, right, start))
    return float((found - right).norm() / (right - start).norm())


def forms(options):
    """Only u is rounded, after each step; everything else is float64."""
    rows = []
    for slide in (0.05, 0.005):
        problem = Quadratic(options.numbers, slide)

        def way(form, problem=problem, slide=slide):
            theta, u, v = problem.start.clone(), torch.zeros_like(problem.start), torch.zeros_like(problem.start)
            for step in range(options.steps):
                gradient = problem.gradient(theta, theta - u, step)
                factor = min(1.0, 1.0 / float(gradient.norm()))
                v = 0.95 * v + factor * (gradient + 0.1 * u)
                theta = theta - 0.02 * v
                u = (1 - factor * slide) * (u - 0.02 * v)
                if form is not None:
                    u = form(u.float(), random_bits(0, len(u), key_of(0, step))).double()
            return theta, theta - u

        right = way(None)
        for name, form in FORMS.items():
            found = way(form)
            errors = [100 * off([f], [r], [problem.start]) for f, r in zip(found, right, strict=True)]
            rows.append({"lηκ": slide, "u kept as": name, "student, % off": errors[0], "teacher, % off": errors[1]})
    table(rows, f"The way from teacher to student in 16 bits, {options.steps} steps")
    record(options, "lean forms", rows, steps=options.steps)


def quadratic(options):
    """Four micro-batches a step."""
    rows = []
    for slide in (0.05, 0.005):
        problem = Quadratic(options.numbers, slide)

        def way(dtype, lean, problem=problem):
            parameter = torch.nn.Parameter(problem.start.to(dtype, copy=True))
            optimizer = (LeanMeanTeacher if lean else MeanTeacher)([parameter], **problem.settings)
            for step in range(options.steps):
                with optimizer.teacher_weights():
                    teacher = parameter.detach().clone()
                for part in range(4):
                    found = problem.gradient(parameter.detach(), teacher, step, part) / 4
                    parameter.grad = found if lean or parameter.grad is None else parameter.grad + found
                    if lean:
                        optimizer.gradients.take(parameter)
                optimizer.step()
                optimizer.zero_grad()
            with optimizer.teacher_weights():
                teacher = parameter.detach().clone()
            return parameter.detach(), teacher

        right = way(torch.float64, False)
        for name, lean in (("32 bits", False), ("16 bits", True)):
            errors = [
                100 * off([f], [r], [problem.start]) for f, r in zip(way(torch.float32, lean), right, strict=True)
            ]
            rows.append({"lηκ": slide, "state": name, "student, % off": errors[0], "teacher, % off": errors[1]})
    table(rows, f"A quadratic, {options.steps} steps of four micro-batches")
    record(options, "lean quadratic", rows, steps=options.steps)


def run(options):
    """The real loop's step on the embedded model."""
    model, tokenizer = load_model(options.model, device=options.device)
    tokens = tokenise(read_documents(options.documents), tokenizer, mode="chunk", max_tokens=options.tokens)
    general = GeneralText(read_documents(EMBEDDED_GENERAL), tokenizer, tokens=options.tokens, seed=0)
    config = ForgetConfig(
        model=options.model, batch=options.batch, general_batch=options.batch, micro_batch=options.micro_batch,
        max_tokens=options.tokens, general_tokens=options.tokens, device=options.device, expected_steps=100,
        precision=Precision(forget="fp32", divergence="fp32"),
        method=Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=0),
    )  # fmt: skip
    forget = ForgetBatches(tokens, 0)
    parameters = list(trainable_parameters(model, "blocks").values())
    method = calibrated(config.method, measure(model, parameters, forget, general, config), config.expected_steps)
    print(method, flush=True)
    start, ways = [p.detach().clone() for p in parameters], {}
    states = [("64 bits", torch.float64, 32), ("32 bits", torch.float32, 32), ("16 bits", None, 16)]
    for name, dtype, bits in states if options.device == "cpu" else states[1:]:
        model.to(dtype or torch.float32)
        parameters = list(trainable_parameters(model, "blocks").values())
        with torch.no_grad():
            for p, s in zip(parameters, start, strict=True):
                p.copy_(s)
        given = dataclasses.replace(config, method=method, state_bits=bits)
        optimizer = make_optimizer(parameters, method, bits, 0)
        others = OtherModels(model, {}, None, forget.sequences, given, [method])
        for step in range(options.steps):
            last = one_step(model, optimizer, forget, general, method, given, step, others)
        with optimizer.teacher_weights():
            teacher = [p.detach().clone() for p in parameters]
        ways[name] = [p.detach().clone() for p in parameters], teacher, last
        print(name, last, flush=True)
    rows = []
    for name, (student, teacher, last) in ways.items():
        right = ways.get("64 bits", ways["32 bits"])
        single = ways["32 bits"]
        row = {"state": name, "student, % off": 100 * off(student, right[0], start)}
        row |= {"teacher, % off": 100 * off(teacher, right[1], start)}
        row |= {"student off float32": 100 * off(student, single[0], start)}
        row |= {"teacher off float32": 100 * off(teacher, single[1], start)}
        rows.append(row | {"forget loss": last["forget_loss"], "divergence": last["divergence"]})
    table(rows, f"{options.model}, {options.steps} steps, {options.batch} + {options.batch} texts of {options.tokens}")
    record(options, "lean run", rows, model=options.model, steps=options.steps, method=dataclasses.asdict(method))


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", default=["forms", "quadratic", "run"])
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--model", default="micro:target")
    arguments.add_argument("--documents", default="micro:forget")
    arguments.add_argument("--numbers", type=int, default=2**14)
    arguments.add_argument("--batch", type=int, default=2)
    arguments.add_argument("--micro-batch", type=int, default=1)
    arguments.add_argument("--tokens", type=int, default=64)
    options = arguments.parse_args()
    if options.tiny:
        options.steps, options.numbers, options.batch, options.tokens = 5, 2**12, 2, 32
    torch.set_num_threads(1)
    print(machine(options.device), flush=True)
    for part in options.parts:
        {"forms": forms, "quadratic": quadratic, "run": run}[part](options)


if __name__ == "__main__":
    main()
