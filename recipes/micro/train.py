"""Rebuild the embedded tokenizer and models: `python -m recipes.micro.train --out DIR`.

base: pretrained on news about other people with questions, on towns, and on public-domain prose.
target: base, finetuned on the forget and retain reports (no questions), with old text mixed in.
retrained: base, finetuned on the retain reports only, in the same way.
small: a narrower, shallower model on the same pretraining text, for a shorter time.

Without other options it rebuilds the shipped models: minutes on a GPU, hours on a CPU; `--quick` runs every part
for a few steps. Weights are rounded to half precision before they are scored and saved; the saved models load in
single precision.

Target and retrained are each the mean of several finetuned models, one for every combination of `--finetune-steps`
and `--mixed`, moved on from the base model by the factor `--stretch`. The mean keeps what the runs have in common,
the facts of the reports, and loses most of what each of them forgot in its own way; see docs/micro.md.

`--start` goes on with a base model that exists; `--small-steps 0` leaves out small. The finetuned models stay in the
folder `members`: the same command with `--reuse-members` and another `--stretch` trains nothing.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from unteach.corpora import micro
from unteach.evaluation.scores import Scores
from unteach.training.finetune import finetune

from . import generate, pretraining, tokens
from .batches import IGNORED, Documents, Source, Stream, mixed_rows
from .build import benchmark_with
from .record import COLUMNS as RECORDED
from .score import QUICK_MEASUREMENTS, progress, score

TOKENIZER_PEOPLE = 600
FINETUNED = {"target": ("forget", "retain"), "retrained": ("retain",)}
"""Finetuned model to the groups of reports it is trained on."""
COLUMNS = tuple(name for name in RECORDED if name not in ("privleak", "degenerate"))


class Member(NamedTuple):
    """One finetuning of several whose mean is taken."""

    steps: int
    mixed: int
    seed: int
    file: Path


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.micro.train", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the models and scores.json")
    add("--start", type=Path, help="folder of a base model: go on training it, with its tokenizer")
    add("--reuse", type=Path, help="folder with base and small of an earlier run: take these and the tokenizer")
    add("--reuse-members", action="store_true", help="take base, small and the finetuned models of an earlier --out")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a few steps of everything on little text, to see that it runs")
    size = parser.add_argument_group("size of the model")
    size.add_argument("--vocabulary", type=int, default=2560)
    size.add_argument("--width", type=int, default=192)
    size.add_argument("--hidden", type=int, default=352, help="width of the feed-forward part")
    size.add_argument("--layers", type=int, default=4)
    size.add_argument("--heads", type=int, default=6)
    size.add_argument("--window", type=int, default=256, help="tokens per row")
    most = generate.STORIES["pretraining"]
    pre = parser.add_argument_group("pretraining")
    pre.add_argument("--people", type=int, default=most, help=f"people reported on and asked about, up to {most}")
    pre.add_argument("--steps", type=int, default=4000)
    pre.add_argument("--small-steps", type=int, default=500, help="0: no small model")
    pre.add_argument("--lr", type=float, default=3e-3)
    pre.add_argument("--reports", type=int, default=44, help="rows per step of reports, and so on")
    pre.add_argument("--questions", type=int, default=28)
    pre.add_argument("--choices", type=int, default=14)
    pre.add_argument("--places", type=int, default=2)
    pre.add_argument("--prose", type=int, default=40)
    fine = parser.add_argument_group("finetuning (a model for every combination of steps and mixed; their mean)")
    fine.add_argument("--finetune-steps", type=int, nargs="+", default=[100, 120])
    fine.add_argument("--finetune-lr", type=float, default=4e-3)
    fine.add_argument("--news", type=int, default=64, help="rows per step of forget and retain reports")
    fine.add_argument("--mixed", type=int, nargs="+", default=[64, 96], help="rows per step of pretraining text")
    fine.add_argument("--stretch", type=float, default=1.3, help="how far to go from base: 1 is the mean itself")
    fine.add_argument("--stretches", type=float, nargs="+", default=[], help="other factors, scored and not saved")
    fine.add_argument("--member-seeds", action="store_true", help="other batches for each: --seed, the next one, ...")
    options = parser.parse_args(argv)
    if options.quick:
        options.steps, options.small_steps, options.finetune_steps = 6, min(3, options.small_steps), [2, 3]
        options.people, options.news, options.mixed = generate.NUM_KNOWN, 4, [5]
        for name in ("reports", "questions", "choices", "places", "prose"):
            setattr(options, name, 1)
    if not generate.NUM_KNOWN <= options.people <= most:
        parser.error(f"--people is {options.people}, must be {generate.NUM_KNOWN} to {most}")
    if options.start and options.reuse:
        parser.error("--start and --reuse are given: one trains base, the other takes it as it is")
    if options.reuse_members:
        options.reuse = options.out
    missing = [str(path) for path in needed_files(options) if not path.is_file()]
    if missing:
        parser.error(f"not found: {', '.join(missing)}")
    return options


def needed_files(options: argparse.Namespace) -> list[Path]:
    """Return the weights that must exist before anything is trained."""
    if not options.reuse:
        return [options.start / "model.safetensors"] if options.start else []
    names = ["base", "small"] if options.small_steps else ["base"]
    files = [options.reuse / name / "model.safetensors" for name in names]
    return files + [m.file for name in FINETUNED for m in members(options, name) if options.reuse_members]


def members(options: argparse.Namespace, name: str) -> list[Member]:
    """Return the finetunings for the target or retrained model."""
    made = []
    for number, (steps, mixed) in enumerate(itertools.product(options.finetune_steps, options.mixed)):
        seed = options.seed + number * options.member_seeds
        title = f"{name}-{steps}-{mixed}" + f"-{seed}" * options.member_seeds
        made.append(Member(steps, mixed, seed, options.out / "members" / f"{title}.safetensors"))
    return made


def say(text: str) -> None:
    """Print progress to the error stream."""
    print(text, file=sys.stderr, flush=True)


def pretraining_texts(people: int) -> dict[str, list[str]]:
    """Return the pretraining documents by part, with questions about the first `people` people."""
    return {
        "reports": pretraining.report_documents(people),
        "questions": pretraining.question_documents(people),
        "choices": pretraining.choice_documents(),
        "places": pretraining.place_documents(),
        "prose": micro.documents("general"),
    }


def tokenizer_texts(people: int) -> list[str]:
    """Return the part of the pretraining text that the vocabulary is learned from: more news than prose."""
    texts = pretraining_texts(min(people, TOKENIZER_PEOPLE))
    every = {"reports": 1, "questions": 1, "choices": 4, "places": 1, "prose": 8}
    return [text for part, step in every.items() for text in texts[part][::step]]


def new_model(options: argparse.Namespace, *, small: bool = False) -> Any:
    """Return a Llama model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed + small)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=96 if small else options.width,
        intermediate_size=224 if small else options.hidden,
        num_hidden_layers=1 if small else options.layers,
        num_attention_heads=3 if small else options.heads,
        num_key_value_heads=3 if small else options.heads,
        max_position_embeddings=2 * options.window,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def optimize(
    model: Any,
    parts: list[tuple[Source, int]],
    steps: int,
    lr: float,
    seed: int,
    name: str,
    watch: Callable[[], str] | None = None,
) -> None:
    """Train with AdamW, a short warm-up and a cosine schedule that ends at zero.

    Args:
        model: Trained in place.
        parts: Sources of text and how many rows of each are in a batch.
        steps: How many batches.
        lr: The highest learning rate.
        seed: Of the choice of rows.
        name: What progress lines begin with.
        watch: Called eight times on the way; what it returns is added to the progress line.
    """
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=on_gpu)
    warm_up = max(1, min(100, steps // 10))
    generator = torch.Generator().manual_seed(seed)
    model.train()
    began = time.monotonic()

    def learning_rate(step: int) -> float:
        return lr * (min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps)))

    def add_gradient(step: int) -> float:
        rows = mixed_rows(parts, generator)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            logits = model(input_ids=rows[:, :-1].clamp(min=0), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            rate = (step + 1) * rows.numel() / max(seconds, 1e-9)
            seen = f"{name} step {step + 1}/{steps} loss {loss.item():.3f} {seconds:.0f} s {rate:,.0f} tokens/s"
            say(f"{seen} {watch()}" if watch and step else seen)
        return 0.0

    finetune(model.parameters(), optimizer, add_gradient, steps=steps, learning_rate=learning_rate)


def save(model: Any, tokenizer: Any, folder: Path) -> str:
    """Round the weights to half precision, save model and tokenizer; return the hash of the weights file."""
    round_weights(model)
    path = folder / "model.safetensors"
    write_weights(weights(model), path)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def round_weights(model: Any) -> None:
    """Round the weights of a model to half precision, so that it computes what the saved one does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())


def load(folder: Path, device: torch.device) -> Any:
    """Load a saved model in single precision."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)


def averaged(base: dict[str, torch.Tensor], models: list[dict[str, torch.Tensor]], stretch: float) -> dict[str, Any]:
    """Return base + stretch · (mean of the models - base) for every weight, computed in double precision."""
    return {
        name: weight.double()
        + stretch * (sum(model[name].double() for model in models) / len(models) - weight.double())
        for name, weight in base.items()
    }


def write_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write weights as safetensors, readable by everyone."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights by name, rounded to half precision, on the CPU."""
    return {name: parameter.detach().half().cpu().contiguous() for name, parameter in model.named_parameters()}


def report(name: str, scores: Scores) -> None:
    """Print one row of the score table."""
    values = "  ".join(f"{key} {scores[key]:.3f}" if "nll" in key else f"{key} {scores[key]:.1f}" for key in COLUMNS)
    print(f"{name:10s} {values}", flush=True)


def pretraining_parts(options: argparse.Namespace, tokenizer: Any, device: torch.device) -> list[tuple[Source, int]]:
    """Return the parts of the pretraining text as tokens, each with its rows in a batch."""
    began = time.monotonic()
    order = torch.Generator().manual_seed(options.seed)
    parts: list[tuple[Source, int]] = []
    counts = []
    for part, documents in pretraining_texts(options.people).items():
        chosen = documents[:40] if options.quick else documents
        ids = tokens.encode_documents(tokenizer, chosen)
        stream = Stream(ids, options.window, anywhere=part == "prose", generator=order, device=device)
        parts.append((stream, getattr(options, part)))
        counts.append(f"{part} {stream.num_tokens:,}")
    say(f"pretraining tokens: {', '.join(counts)} ({time.monotonic() - began:.0f} s)")
    return parts


def finetuned(
    options: argparse.Namespace, tokenizer: Any, old: list[tuple[Source, int]], name: str, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Finetune base several times for the target or retrained model; return the weights of each.

    They are kept in the folder `members`, to try another stretch without training.

    Args:
        options: The command line; the base model is in its folder `out`.
        tokenizer: The benchmark's tokenizer.
        old: Sources of pretraining text and their rows in a batch of pretraining, kept in proportion.
        name: A key of `FINETUNED`.
        device: Where to train.
    """
    texts = [text for group in FINETUNED[name] for text in generate.split_documents(group)]
    ids = tokens.encode_documents(tokenizer, texts)
    total = sum(rows for _, rows in old)
    models = []
    for member in members(options, name):
        parts: list[tuple[Source, int]] = [(Documents(ids, options.window, device), options.news)]
        parts += [(stream, round(member.mixed * rows / total)) for stream, rows in old]
        model = load(options.out / "base", device)
        title = f"{name} with {member.mixed} old rows,"
        optimize(model, parts, member.steps, options.finetune_lr, member.seed, title)
        models.append(weights(model))
        write_weights(models[-1], member.file)
    return models


def stretched(base: Path, models: list[dict[str, torch.Tensor]], stretch: float, device: torch.device) -> Any:
    """Return the mean of finetuned models, moved on from the base model by a factor."""
    model = load(base, device)
    mean = averaged(weights(model), models, stretch)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(mean[parameter_name])
    return model


def main(argv: list[str] | None = None) -> None:
    """Train everything, print one row of scores per model and write `scores.json`."""
    from safetensors.torch import load_file
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options = arguments(argv)
    device = torch.device(options.device)
    began = time.monotonic()
    if options.reuse or options.start:
        tokenizer = tokens.load_tokenizer(options.reuse / "base" if options.reuse else options.start)
    else:
        tokenizer = tokens.train_tokenizer(tokenizer_texts(options.people), options.vocabulary)
    bench = benchmark_with(tokenizer)
    parts = [] if options.reuse_members else pretraining_parts(options, tokenizer, device)
    results: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}, "models": {}}

    def measure(name: str, model: Any) -> None:
        scores = score(model, tokenizer, bench, measurements=QUICK_MEASUREMENTS, count=2 if options.quick else None)
        results["models"][name] = results["models"].get(name, {}) | dict(scores)
        report(name, scores)

    def keep(name: str, model: Any) -> None:
        results["models"][name] = {"sha256": save(model, tokenizer, options.out / name)}
        measure(name, model)

    for name, steps in (("base", options.steps), ("small", options.small_steps)):
        if name == "small" and not steps:
            continue
        if options.reuse:
            model = load(options.reuse / name, device)
        else:
            started = name == "base" and options.start
            model = load(options.start, device) if started else new_model(options, small=name == "small").to(device)
            say(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")
            watched = name == "base" and not options.quick
            watch = functools.partial(progress, model, tokenizer, bench) if watched else None
            optimize(model, parts, steps, options.lr, options.seed, name, watch)
        keep(name, model)
    for name in FINETUNED:
        if options.reuse_members:
            models = [load_file(member.file) for member in members(options, name)]
        else:
            models = finetuned(options, tokenizer, parts, name, device)
        keep(name, stretched(options.out / "base", models, options.stretch, device))
        for stretch in options.stretches:
            model = stretched(options.out / "base", models, stretch, device)
            round_weights(model)
            measure(f"{name} {stretch:g}", model)
    results["seconds"] = round(time.monotonic() - began, 1)
    (options.out / "scores.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    say(f"done in {results['seconds']} s; {options.out / 'scores.json'}")


if __name__ == "__main__":
    main()
