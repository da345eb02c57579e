"""The vocabulary head in chunks against full logits: memory, time and equality, side by side in one run.

python benchmarks/vocab_head.py [--vocabularies 32000 128000] [--width 4096] [--tokens 8184] [--tiny] [--json FILE]

Full logits: hidden states times the head's weight, [B,T,V] at once, then `unteach.forget_loss` or
`unteach.divergence` and a backward pass to the hidden states. In chunks: `token_log_odds` and `mean_of_rows`.
Memory is the most that a forward and backward pass takes beyond its inputs: the allocator's peak on a GPU, counted
tensors on a CPU. Times are taken in TF32 and fp16 on a GPU, in fp32 else. "fused" is the chunked form with what is done
with a chunk's rows compiled.

Gradients are compared in fp32, as ‖g - g*‖ / ‖g*‖ over the first 128 rows. "full error" and "chunks error" are against
float64. Student and teacher are close, and the difference of their two products x Wᵀ and x' Wᵀ carries the rounding of
both: that is the error of the full form. The chunks add W (x - x') to the teacher's logits instead. "chunks - full" is
between the two when the full logits are made in that way too.

Without options it takes less than a minute on a CPU (narrow hidden states and fewer tokens) and on a GPU.
"""

import copy
import gc
import time

import torch

import unteach
from measuring import machine, parser, peak_bytes, record, seconds, table
from unteach.method.divergences import DIVERGENCES
from unteach.method.vocab_head import Head, fused_rows, mean_of_rows, token_log_odds
from unteach.models.precision import precision_of_pass


class Case:
    def __init__(self, options, vocabulary, term):
        device, tokens, width = options.device, options.tokens, options.width
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device)

        self.term = term
        self.hidden = normal(tokens, width).requires_grad_()
        self.teacher = self.hidden.detach() + 0.05 * normal(tokens, width)
        self.weight = normal(vocabulary, width) * width**-0.5
        self.labels = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
        self.mask = torch.ones(2, tokens // 2, dtype=torch.bool, device=device)

    def full(self, *, difference_first=False):
        """The term from all logits at once; the student's as the teacher's plus those of the difference, if wished."""
        shape = (*self.mask.shape, -1)
        if self.term == "nlul":
            logits = (self.hidden @ self.weight.T).view(shape).float()
            return unteach.forget_loss("nlul", logits, self.labels.view(self.mask.shape), self.mask)
        with torch.no_grad():
            teacher = (self.teacher @ self.weight.T).view(shape).float()
        if difference_first:
            logits = teacher + ((self.hidden - self.teacher) @ self.weight.T).view(shape).float()
        else:
            logits = (self.hidden @ self.weight.T).view(shape).float()
        return unteach.divergence("kl", logits, teacher, self.mask)

    def chunked(self):
        head = Head(weight=self.weight)
        if self.term == "nlul":
            log_odds = token_log_odds(self.hidden, self.labels, head)
            binary = torch.stack([log_odds, torch.zeros_like(log_odds)], -1).view(*self.mask.shape, 2)
            return unteach.forget_loss("nlul", binary, torch.zeros_like(self.mask, dtype=torch.int64), self.mask)
        return mean_of_rows(DIVERGENCES["kl"].rows, self.hidden, head, self.teacher, head)

    def run(self, way, precision, device):
        """Value and gradient of the full form, the chunked one, or the full one with the difference first."""
        self.hidden.grad = None
        with precision_of_pass(precision, torch.device(device)):
            value = self.chunked() if way == "chunks" else self.full(difference_first=way == "difference")
            value.backward()
        return value.detach(), self.hidden.grad

    def first(self, rows):
        """The same with the first rows alone."""
        some = copy.copy(self)
        some.hidden, some.teacher = self.hidden.detach()[:rows].requires_grad_(), self.teacher[:rows]
        some.labels, some.mask = self.labels[:rows], self.mask.new_ones(1, rows)
        return some

    def exact(self, rows):
        """Gradient [rows,D] of the first rows in float64."""
        some = self.first(rows)
        some.hidden = some.hidden.detach().double().requires_grad_()
        some.teacher, some.weight = some.teacher.double(), some.weight.double()
        some.chunked().backward()
        return some.hidden.grad * rows / len(self.hidden)  # the mean runs over all rows

    def fused(self, precision, device):
        with fused_rows():
            self.run("chunks", precision, device)


def distance(found, exact):
    return float((found.to(exact.dtype) - exact).norm() / exact.norm())


def measure(case, options, rows=128):
    """Errors, memory and times of a case; on a CPU all from one run of each form."""
    device, cuda = options.device, options.device == "cuda"
    exact = case.exact(rows)
    gradients, peaks, times = {}, {}, {}
    for way in ("full", "chunks"):

        def run(way=way):
            gradients[way] = case.run(way, "fp32", device)[1][:rows].clone()

        started = time.perf_counter()
        peaks[way] = peak_bytes(run, device)
        times[way] = 1e3 * (time.perf_counter() - started)
    some = case.first(rows)
    difference = some.run("difference", "fp32", device)[1] * rows / options.tokens
    result = {
        "full error": distance(gradients["full"], exact),
        "chunks error": distance(gradients["chunks"], exact),
        "chunks - full": distance(gradients["chunks"], difference),
        "full GiB": peaks["full"] / 2**30,
        "chunks GiB": peaks["chunks"] / 2**30,
        "memory ratio": peaks["chunks"] / peaks["full"],
    }
    gradients.clear()
    del difference, exact, some
    case.hidden.grad = None
    for precision in ("tf32", "fp16") if cuda else ("fp32",):

        def time_of(call, precision=precision):
            return 1e3 * seconds(lambda: call(precision), device, options.repeats)

        if cuda:
            times = {way: time_of(lambda p, way=way: case.run(way, p, device)) for way in times}
        result |= {f"{precision} full ms": times["full"], f"{precision} chunks ms": times["chunks"]}
        result |= {f"{precision} time ratio": times["chunks"] / times["full"]}
        if precision == "fp16":
            fused = time_of(lambda p: case.fused(p, device))
            result |= {f"{precision} fused ms": fused, f"{precision} fused ratio": fused / times["full"]}
    return result


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--vocabularies", nargs="+", type=int, default=[32000, 128000])
    arguments.add_argument("--width", type=int, help="default 4096 on a GPU, 64 on a CPU")
    arguments.add_argument("--tokens", type=int, help="default 8184 on a GPU, 766 on a CPU")
    arguments.add_argument("--repeats", type=int, default=5, help="on a GPU")
    options = arguments.parse_args()
    cuda = options.device == "cuda"
    options.width = options.width or (4096 if cuda else 64)
    options.tokens = options.tokens or (8184 if cuda else 766)
    if options.tiny:
        options.vocabularies, options.width, options.tokens = [4000], 64, 766
    device = options.device
    print(machine(device))
    rows = []
    for vocabulary in options.vocabularies:
        for term in ("nlul", "kl"):
            case = Case(options, vocabulary, term)
            rows.append({"term": term, "V": vocabulary, "N": options.tokens} | measure(case, options))
            table(rows[-1:])
            del case
            gc.collect()
    table(rows, f"Vocabulary head, forward and backward, width {options.width}, frozen head")
    record(options, "vocab_head", rows, width=options.width)


if __name__ == "__main__":
    main()
