"""The vocabulary head in chunks against full logits: memory, time and equality, side by side in one run.

python benchmarks/vocab_head.py [--vocabularies 32000 128000] [--width 4096] [--tokens 8184] [--tiny] [--json FILE]

Full logits: hidden states times the head's weight, [B,T,V] at once, then `unteach.forget_loss` or
`unteach.divergence` and a backward pass to the hidden states. In chunks: `token_log_odds` and `mean_divergence`.
Memory is the most that a forward and backward pass takes beyond its inputs: the allocator's peak on a GPU, counted
tensors on a CPU. Values and gradients are compared in fp32; times are taken in TF32 and fp16 on a GPU, in fp32 else.
"fused" is the chunked form with what is done with a chunk's rows compiled.
On a CPU: python benchmarks/vocab_head.py --tokens 2046 --width 256 --vocabularies 32000
"""

import gc

import torch

import unteach
from measuring import machine, parser, peak_bytes, record, seconds, table
from unteach.divergences import DIVERGENCES
from unteach.passes import precision_of_pass
from unteach.vocab_head import Head, fused_rows, mean_divergence, token_log_odds


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

    def full(self):
        shape = (*self.mask.shape, -1)
        logits = (self.hidden @ self.weight.T).view(shape).float()
        if self.term == "nlul":
            return unteach.forget_loss("nlul", logits, self.labels.view(self.mask.shape), self.mask)
        with torch.no_grad():
            teacher = (self.teacher @ self.weight.T).view(shape).float()
        return unteach.divergence("kl", logits, teacher, self.mask)

    def chunked(self):
        head = Head(weight=self.weight)
        if self.term == "nlul":
            log_odds = token_log_odds(self.hidden, self.labels, head)
            binary = torch.stack([log_odds, torch.zeros_like(log_odds)], -1).view(*self.mask.shape, 2)
            return unteach.forget_loss("nlul", binary, torch.zeros_like(self.mask, dtype=torch.int64), self.mask)
        return mean_divergence(DIVERGENCES["kl"].rows, self.hidden, head, self.teacher, head)

    def run(self, way, precision, device):
        """Value and gradient."""
        self.hidden.grad = None
        with precision_of_pass(precision, torch.device(device)):
            value = self.full() if way == "full" else self.chunked()
            value.backward()
        return value.detach(), self.hidden.grad

    def fused(self, precision, device):
        with fused_rows():
            self.run("chunks", precision, device)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--vocabularies", nargs="+", type=int, default=[32000, 128000])
    arguments.add_argument("--width", type=int, default=4096)
    arguments.add_argument("--tokens", type=int, default=8184)
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    if options.tiny:
        options.vocabularies, options.width, options.tokens, options.repeats = [4000], 64, 2046, 2
    device = options.device
    print(machine(device))
    rows = []
    for vocabulary in options.vocabularies:
        for term in ("nlul", "kl"):
            case = Case(options, vocabulary, term)
            value, gradient = case.run("full", "fp32", device)
            mine, my_gradient = case.run("chunks", "fp32", device)
            row = {
                "term": term,
                "V": vocabulary,
                "N": options.tokens,
                "value error": float((mine - value).abs() / value.abs()),
                "gradient error": float((my_gradient - gradient).norm() / gradient.norm()),
            }
            del value, gradient, mine, my_gradient
            case.hidden.grad = None

            def peak(way, case=case):
                return peak_bytes(lambda: case.run(way, "fp32", device), device)

            full, chunked = peak("full"), peak("chunks")
            row |= {"full GiB": full / 2**30, "chunks GiB": chunked / 2**30, "memory ratio": chunked / full}
            for precision in ("tf32", "fp16") if device == "cuda" else ("fp32",):

                def time_of(call, precision=precision, case=case):
                    return 1e3 * seconds(lambda: call(precision), device, options.repeats)

                full = time_of(lambda p, case=case: case.run("full", p, device))
                chunked = time_of(lambda p, case=case: case.run("chunks", p, device))
                row |= {f"{precision} full ms": full, f"{precision} chunks ms": chunked}
                row |= {f"{precision} time ratio": chunked / full}
                if precision == "fp16":
                    fused = time_of(lambda p, case=case: case.fused(p, device))
                    row |= {f"{precision} fused ms": fused, f"{precision} fused ratio": fused / full}
            rows.append(row)
            table([row])
            del case
            gc.collect()
    table(rows, f"Vocabulary head, forward and backward, width {options.width}, frozen head")
    record(options, "vocab_head", rows, width=options.width)


if __name__ == "__main__":
    main()
