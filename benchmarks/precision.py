"""How much rounding each precision brings into the divergence, its gradient and the forget gradient.

python benchmarks/precision.py [--models micro:target 135M 1.1B] [--distances 1e-4 1e-2] [--tiny] [--json FILE]
python benchmarks/precision.py --forms difference tangent "stretched 0.3" "both ways 0.3" ...
python benchmarks/precision.py --adapters 16 [--base-bits 16] ...
python benchmarks/precision.py --plot RESULTS.jsonl docs/images/precision.png

Student and teacher are nearly equal: the student is the teacher moved by ‖θ - θ'‖ = distance down the gradient of the
forget loss. The first step of a 7B run of the paper moves about 1e-4 (lr 5e-4, gradient norm 0.2), twenty steps with
momentum 0.95 some 1e-2. For each precision: the KL divergence, its error, and the error of its gradient
‖g - g*‖ / ‖g*‖ against the exact ones (float64, but for the norms and positions, which Llama computes in fp32; all in
fp32 for shapes of 1.1B and more), and the same for the forget loss.
With --adapters, student and teacher are adapters of that rank on one base of so many bits, and the distance is that of
the adapters' weights; as a fresh adapter cannot move in its first matrix, the second is drawn, too.
A named shape has random weights; micro:target is the embedded trained model on its own texts, and a folder's model
reads the same texts.

--forms, side by side: difference (the teacher's outputs from the student's); tangent (the derivative of the outputs
along θ - θ', taken in the middle of the way; "tangent end": at the student); "stretched L" (a teacher moved away to the
distance L on the same line, the difference of outputs divided by as much; "both ways L": student and teacher moved
about their middle). Where they are already farther apart than L, the last two are plain differences.
"""

import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import dataclasses
import gc
import json
import tempfile
import traceback

import torch

from measuring import SHAPES, machine, make_model, parser, random_sequences, record, table
from unteach.method.vocab_head import Head
from unteach.models import decoder_layers, trainable_parameters
from unteach.models.adapters import adapter_parameters, add_adapters, keep_base_in
from unteach.training.passes import (
    HeldText,
    Pull,
    Reading,
    computing,
    forget_term,
    held_term,
    hidden_states,
    read_change,
)
from unteach.training.step import loss_scale, unscale_gradients

LARGE = 5e8


def load(name, options):
    """A model on the device, forget sequences and general sequences."""
    rows, length = (2, 32) if options.tiny else (options.rows, options.length)
    if name == "micro:target" or os.path.isdir(name):
        from unteach.data import ForgetBatches, GeneralText, read_documents, tokenise
        from unteach.models import load_model

        model, tokenizer = load_model(name, device=options.device)
        documents = read_documents("micro:forget")
        tokens = tokenise(documents, tokenizer, mode="chunk", max_tokens=length)
        general = GeneralText(read_documents("micro:general"), tokenizer, tokens=length)
        general.chunks = general.chunks[:256]
        return model, ForgetBatches(tokens, 0).batch(0, rows), general.batch(0, rows)
    model = make_model(name, options.device)
    vocabulary = model.config.vocab_size
    return model, random_sequences(rows, length, vocabulary, 0), random_sequences(rows, length, vocabulary, 1)


class Bench:
    """One model at its teacher's place, ready to be moved."""

    def __init__(self, name, options):
        self.model, self.forget, self.general = load(name, options)
        self.loss = "ll" if name in SHAPES else "nlul"  # random weights know nothing to unlearn
        if options.adapters:
            add_adapters(self.model, decoder_layers(self.model), options.adapters)
            keep_base_in(self.model, options.base_bits, None)
            self.parameters = list(adapter_parameters(self.model).values())
            draws = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in self.parameters:
                    p += 1e-2 * torch.randn(p.shape, generator=draws).to(p) * (not bool(p.any()))
        else:
            self.parameters = list(trainable_parameters(self.model, "blocks").values())
        self.large = sum(p.numel() for p in self.parameters) > LARGE
        self.device = torch.device(options.device)
        self.teacher = self.kept(p.detach().clone() for p in self.parameters)
        parts = [(range(len(self.general)), 1.0)]
        self.held = HeldText(sequences=self.general, parts=parts, divergence="kl")

    def place(self, values, direction=None, distance=0.0):
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, values)
            if direction is not None:
                torch._foreach_add_(self.parameters, direction, alpha=-distance)

    def _gradients(self, scale):
        unscale_gradients(self.parameters, scale)
        found = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return found

    def forget_gradient(self, precision):
        """Forget loss and its gradient, the student at its place."""
        tokens = sum(map(len, self.forget))
        scale = loss_scale(tokens, precision, device=self.device)
        with computing(self.model, precision):
            pull = Pull(sequences=self.forget, parts=[(range(len(self.forget)), 1.0)], loss=self.loss)
            loss, _, _ = forget_term(self.model, pull, 0)
            (scale * loss).backward()
        return float(loss.detach()), self._gradients(scale)

    def hidden(self, precision, direction, distance):
        """Last hidden states of the general text, so far from the teacher."""
        self.place(self.teacher, direction, distance)
        with torch.no_grad(), computing(self.model, precision):
            return hidden_states(self.model, self.general)[0]

    def reading(self, precision, direction, distance, form):
        """What the student is compared with, in one of the ``FORMS``; it is left at its place."""
        kind, _, length = form.rpartition(" ") if form[-1].isdigit() else (form, "", "")
        if kind == "difference":
            reading = Reading([self.hidden(precision, direction, 0.0)], Head.of(self.model).detached())
            self.place(self.teacher, direction, distance)
            return reading
        head = Head.of(self.model).detached()
        if kind.startswith("tangent"):
            self.place(self.teacher, direction, distance)
            way = self.kept(p.detach() - t for p, t in zip(self.parameters, self.teacher, strict=True))
            back = {"tangent": 0.5, "tangent end": 0.0}[kind]
            return read_change(self.model, self.parameters, way, head, [self.held], precision, back=back)[0]
        stretch = max(1.0, float(length) / distance)
        ends = {"stretched": (1.0, 1.0 - stretch), "both ways": ((1 + stretch) / 2, (1 - stretch) / 2)}[kind]
        far, near = (self.hidden(precision, direction, end * distance).float() for end in ends)
        self.place(self.teacher, direction, distance)
        return Reading([(far - near) / stretch], head, is_change=True)

    def divergence(self, precision, direction, distance, form="difference"):
        """KL of the moved student from the teacher, and its gradient."""
        reading = self.reading(precision, direction, distance, form)
        scale = loss_scale(sum(map(len, self.general)), precision, device=self.device)
        with computing(self.model, precision):
            value, _ = held_term(self.model, dataclasses.replace(self.held, readings=[(1.0, reading)]), 0)
            (scale * value).backward()
        return float(value.detach()), self._gradients(scale)

    def kept(self, tensors):
        """The same tensors; of a large model in main memory, in mapped files, one after the other."""
        if not self.large or self.device.type != "cpu":
            return list(tensors)
        found = []
        for tensor in tensors:
            with tempfile.NamedTemporaryFile() as file:
                file.truncate(tensor.nbytes)
                mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
            found.append(mapped.view(tensor.shape).copy_(tensor))
        return found

    def to_double(self):
        self.model.double()
        self.teacher = [t.double() for t in self.teacher]

    def to_single(self):
        self.model.float()
        self.teacher = [t.float() for t in self.teacher]


def norm(tensors):
    return float(torch.stack(torch._foreach_norm(tensors)).double().norm())


def error(found, exact):
    """‖found - exact‖ / ‖exact‖, tensor by tensor to save memory."""
    squares = sum(float((f.to(e.dtype) - e).double().square().sum()) for f, e in zip(found, exact, strict=True))
    return squares**0.5 / max(norm(exact), 1e-300)


def measure(name, options):
    bench = Bench(name, options)
    precisions = ["fp32", "tf32", "fp16", "bf16"] if options.device == "cuda" else options.cpu_precisions
    exact_name = "fp32" if bench.large else "float64"
    rows = []

    def exact(compute):
        if bench.large:
            value, gradient = compute()
            return value, bench.kept(gradient)
        bench.to_double()
        value, gradient = compute()
        bench.to_single()
        return value, gradient

    _, exact_forget = exact(lambda: bench.forget_gradient("fp32"))
    size = norm(exact_forget)
    direction = bench.kept((g / size).float() for g in exact_forget)
    for precision in precisions * (not options.only_divergence):
        value, gradient = bench.forget_gradient(precision)
        rows.append({"pass": "forget", "distance": 0.0, "precision": precision, "exact": exact_name, "form": "-"})
        rows[-1] |= {
            "value": value,
            "value error": 0.0,
            "gradient norm": size,
            "gradient error": error(gradient, exact_forget),
        }
        del gradient
    del exact_forget
    for distance in options.distances:

        def compute(precision="fp32", form="difference", distance=distance):
            moved = [d.to(bench.parameters[0].dtype) for d in direction]
            return bench.divergence(precision, moved, distance, form)

        exact_value, exact_gradient = exact(compute)
        for precision in precisions:
            for form in options.forms:
                value, gradient = compute(precision, form)
                rows.append({"pass": "divergence", "distance": distance, "precision": precision, "exact": exact_name})
                rows[-1] |= {
                    "form": form,
                    "value": value,
                    "value error": abs(value - exact_value) / max(abs(exact_value), 1e-300),
                    "gradient norm": norm(exact_gradient),
                    "gradient error": error(gradient, exact_gradient),
                }
                print(json.dumps(rows[-1]), flush=True)
                del gradient
        del exact_gradient
    name = os.path.basename(name) if os.path.isdir(name) else name
    under = f", adapters of rank {options.adapters} on {options.base_bits} bits" if options.adapters else ""
    table(rows, f"{name}{under}: rounding of each precision")
    record(options, "precision", rows, model=f"{name}{under}")


def plot(results, image):
    """Gradient error of the divergence over the distance, one panel a model, from recorded results."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(results, encoding="utf-8") as file:
        found = [r for r in map(json.loads, file) if r["benchmark"] == "precision"]
    size = (3.9 * len(found), 3.7)
    figure, panels = plt.subplots(1, len(found), figsize=size, sharey=True, squeeze=False, layout="constrained")
    colours = {"fp32": "#4d4d4d", "tf32": "#1b9e77", "fp16": "#7570b3", "bf16": "#d95f02"}
    marks = {"fp32": "o", "tf32": "s", "fp16": "^", "bf16": "D"}
    for panel, result in zip(panels[0], found, strict=True):
        rows = [r for r in result["rows"] if r["pass"] == "divergence" and r.get("form", "difference") == "difference"]
        exact = rows[0]["exact"]
        for precision in dict.fromkeys(row["precision"] for row in rows if row["precision"] != exact):
            points = [(r["distance"], r["gradient error"]) for r in rows if r["precision"] == precision]
            panel.loglog(*zip(*points, strict=True), marks[precision] + "-", color=colours[precision], label=precision)
        panel.axhline(1, color="black", linewidth=0.9, linestyle=":")
        kind = "trained" if result["model"].startswith("micro") else "random weights"
        panel.set_title(f"{result['model']}, {kind}\n(against {exact})", fontsize=10)
        panel.set_xlabel("distance ‖θ - θ′‖ of student and teacher")
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("relative error of ∇D")
    panels[0][0].text(
        0.97, 1.25, "error = gradient", ha="right", fontsize=8, transform=panels[0][0].get_yaxis_transform()
    )
    panels[0][0].legend(frameon=False, loc="lower left")
    figure.savefig(image, dpi=130)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=["micro:target", "135M", "1.1B"])
    arguments.add_argument("--distances", nargs="+", type=float, default=[1e-4, 1e-3, 1e-2, 1e-1])
    arguments.add_argument("--cpu-precisions", nargs="+", default=["fp32", "fp16"])
    arguments.add_argument("--forms", nargs="+", default=["difference"])
    arguments.add_argument("--only-divergence", action="store_true", help="leave the forget loss out")
    arguments.add_argument("--rows", type=int, default=4, help="sequences of each kind")
    arguments.add_argument("--length", type=int, default=512, help="tokens of each")
    arguments.add_argument("--adapters", type=int, metavar="RANK")
    arguments.add_argument("--base-bits", type=int, default=16)
    arguments.add_argument("--plot", nargs=2, metavar=("RESULTS", "IMAGE"))
    options = arguments.parse_args()
    if options.plot:
        return plot(*options.plot)
    if options.tiny:
        options.models, options.distances = ["micro:target", "tiny"], [1e-3, 1e-1]
    print(machine(options.device), flush=True)
    for name in options.models:
        try:
            measure(name, options)
        except Exception:  # the other models are still worth measuring
            traceback.print_exc()
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    main()
