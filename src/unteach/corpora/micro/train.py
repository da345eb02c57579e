"""Rebuild the embedded tokenizer and models: `python -m unteach.corpora.micro.train --out DIR`.

base: pretrained on news about other people with questions, on towns, and on public-domain prose.
target: base, finetuned on the forget and retain reports (no questions), with old text mixed in.
retrained: base, finetuned on the retain reports only, in the same way.
small: a narrower, shallower model on the same pretraining text, for a shorter time.

Minutes on a GPU, hours on a CPU; `--quick` runs every part for a few steps. Several values of `--people`,
`--questions` or `--steps` train one base model for each combination, in folders of their own. Weights are
rounded to half precision before they are scored and saved; the saved models load in single precision.
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
from typing import Any

import torch
from torch.nn import functional as F

from . import generate, load_general, pretraining, tokens
from .batches import IGNORED, Documents, Source, Stream, general_rows, mixed_rows
from .score import progress, score

TOKENIZER_PEOPLE = 600
COLUMNS = (
    "verbmem_f",
    "verbmem_r",
    "verbmem_holdout",
    "knowmem_f",
    "knowmem_r",
    "knowmem_unasked",
    "knowmem_pretraining",
    "choices",
    "nll_general",
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m unteach.corpora.micro.train", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        required=True,
        help="folder for the four models and scores.json",
    )
    add("--reuse", type=Path, help="folder with base and small of an earlier run: take these and the tokenizer")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    add("--compile", action="store_true", help="compile the model (pays for long runs only)")
    size = parser.add_argument_group("size of the model")
    size.add_argument("--vocabulary", type=int, default=2560)
    size.add_argument("--width", type=int, default=192)
    size.add_argument("--hidden", type=int, default=352, help="width of the feed-forward part")
    size.add_argument("--layers", type=int, default=4)
    size.add_argument("--heads", type=int, default=6)
    size.add_argument("--window", type=int, default=256, help="tokens per row")
    most = generate.STORIES["pretraining"]
    pre = parser.add_argument_group("pretraining (several values: a base model for every combination)")
    pre.add_argument("--people", type=int, nargs="+", default=[most], help=f"people asked about, up to {most}")
    pre.add_argument("--questions", type=int, nargs="+", default=[28], help="rows per step of questions")
    pre.add_argument("--steps", type=int, nargs="+", default=[4000])
    pre.add_argument("--lr", type=float, default=3e-3)
    pre.add_argument("--reports", type=int, default=44, help="rows per step of reports, and so on")
    pre.add_argument("--choices", type=int, default=14)
    pre.add_argument("--places", type=int, default=2)
    pre.add_argument("--prose", type=int, default=40)
    pre.add_argument("--small-steps", type=int, default=500)
    fine = parser.add_argument_group("finetuning (several values: every combination is trained and scored)")
    fine.add_argument("--finetune-steps", type=int, nargs="+", default=[400])
    fine.add_argument("--finetune-lr", type=float, nargs="+", default=[1e-3])
    fine.add_argument("--news", type=int, nargs="+", default=[64], help="rows of forget and retain reports")
    fine.add_argument("--mixed", type=int, nargs="+", default=[64], help="rows of pretraining text")
    options = parser.parse_args(argv)
    if options.quick:
        options.steps, options.small_steps, options.finetune_steps = [6], 3, [4]
        for name in ("reports", "choices", "places", "prose"):
            setattr(options, name, 1)
        options.questions, options.news, options.mixed = [1], [4], [5]
    for count in options.people:
        if not generate.NUM_KNOWN <= count <= most:
            parser.error(f"--people is {count}, must be {generate.NUM_KNOWN} to {most}")
    return options


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
        "prose": load_general("general"),
    }


def tokenizer_texts() -> list[str]:
    """Return the part of the pretraining text that the vocabulary is learned from: more news than prose."""
    texts = pretraining_texts(TOKENIZER_PEOPLE)
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
    options: argparse.Namespace,
    name: str,
    watch: Callable[[], str] | None = None,
) -> None:
    """Train with AdamW, a short warm-up and a cosine schedule that ends at zero.

    Args:
        model: Trained in place.
        parts: Sources of text and how many rows of each are in a batch.
        steps: How many batches.
        lr: The highest learning rate.
        options: For `seed` and `compile`.
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
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * s / steps))
    )
    generator = torch.Generator().manual_seed(options.seed)
    forward = torch.compile(model) if options.compile else model
    model.train()
    began = time.monotonic()
    for step in range(steps):
        rows = mixed_rows(parts, generator)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            logits = forward(input_ids=rows[:, :-1].clamp(min=0), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            rate = (step + 1) * rows.numel() / max(seconds, 1e-9)
            seen = f"{name} step {step + 1}/{steps} loss {loss.item():.3f} {seconds:.0f} s {rate:,.0f} tokens/s"
            say(f"{seen} {watch()}" if watch and step else seen)


def save(model: Any, tokenizer: Any, folder: Path) -> str:
    """Round the weights to half precision, save model and tokenizer; return the hash of the weights file.

    The model itself is rounded too, so that it computes what the saved one does.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    folder.mkdir(parents=True, exist_ok=True)
    from safetensors.torch import save_file

    weights = folder / "model.safetensors"
    tensors = {name: p.detach().half().cpu().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def load(folder: Path, device: torch.device) -> Any:
    """Load a saved model in single precision."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)


def report(name: str, scores: dict[str, Any]) -> None:
    """Print one row of the score table."""
    values = "  ".join(f"{key} {scores[key]:.3f}" if "nll" in key else f"{key} {scores[key]:.1f}" for key in COLUMNS)
    print(f"{name:28s} {values}", flush=True)


def token_streams(options: argparse.Namespace, tokenizer: Any, people: int, device: torch.device) -> dict[str, Stream]:
    """Return the pretraining text as tokens, by part."""
    began = time.monotonic()
    order = torch.Generator().manual_seed(options.seed)
    streams = {
        part: Stream(
            tokens.encode_documents(tokenizer, documents),
            options.window,
            anywhere=part == "prose",
            generator=order,
            device=device,
        )
        for part, documents in pretraining_texts(people).items()
    }
    counts = ", ".join(f"{part} {stream.num_tokens:,}" for part, stream in streams.items())
    say(f"{people} people, pretraining tokens: {counts} ({time.monotonic() - began:.0f} s)")
    return streams


def base_models(
    options: argparse.Namespace,
    tokenizer: Any,
    parts: list[tuple[Source, int]],
    steps: int,
    out: Path,
    device: torch.device,
) -> dict[str, str]:
    """Train or reuse the base and small models and save them under `out`; return the hashes of their weights."""
    hashes = {}
    for name, count in (("base", steps), ("small", options.small_steps)):
        if options.reuse:
            model = load(options.reuse / name, device)
        else:
            model = new_model(options, small=name == "small").to(device)
            say(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")
            watch = functools.partial(progress, model, tokenizer) if name == "base" and not options.quick else None
            optimize(model, parts, count, options.lr, options, name, watch)
        hashes[name] = save(model, tokenizer, out / name)
    return hashes


def finetuned(
    options: argparse.Namespace,
    tokenizer: Any,
    old: list[tuple[Source, int]],
    base: Path,
    groups: tuple[str, ...],
    setting: dict[str, Any],
    name: str,
    device: torch.device,
) -> Any:
    """Return the model of folder `base` finetuned on the reports of `groups`, with old text mixed in.

    Args:
        options: The command line.
        tokenizer: The benchmark's tokenizer.
        old: Sources of pretraining text and their rows in a batch of pretraining, kept in proportion.
        base: Folder of the model to begin with.
        groups: `forget`, `retain`.
        setting: finetune_steps, finetune_lr, news (rows of reports), mixed (rows of old text).
        name: What progress lines begin with.
        device: Where to train.
    """
    model = load(base, device)
    texts = [text for group in groups for text in generate.split_documents(group)]
    news = Documents(tokens.encode_documents(tokenizer, texts), options.window, device)
    total = sum(rows for _, rows in old)
    parts: list[tuple[Source, int]] = [(news, setting["news"])]
    parts += [(stream, round(setting["mixed"] * rows / total)) for stream, rows in old]
    optimize(model, parts, setting["finetune_steps"], setting["finetune_lr"], options, name)
    return model


def train_variant(
    options: argparse.Namespace,
    tokenizer: Any,
    base: dict[str, int],
    out: Path,
    measure: Callable[[Path, Any, str], None],
    device: torch.device,
) -> None:
    """Train and measure one base model, and the models finetuned from it.

    Args:
        options: The command line.
        tokenizer: The benchmark's tokenizer.
        base: people, questions (rows per step) and steps of pretraining.
        out: Folder of the variant.
        measure: Takes a model's folder, the model and the hash of its weights.
        device: Where to train.
    """
    streams = token_streams(options, tokenizer, base["people"], device)
    rows = {part: getattr(options, part) for part in streams} | {"questions": base["questions"]}
    parts: list[tuple[Source, int]] = [(stream, rows[part]) for part, stream in streams.items()]
    hashes = base_models(options, tokenizer, parts, base["steps"], out, device)
    for name, sha256 in hashes.items():
        measure(out / name, load(out / name, device), sha256)
    keys = ("finetune_steps", "finetune_lr", "news", "mixed")
    for setting, folder in variants(options, keys, out):
        for name, groups in (("target", ("forget", "retain")), ("retrained", ("retain",))):
            model = finetuned(options, tokenizer, parts, out / "base", groups, setting, name, device)
            measure(folder / name, model, save(model, tokenizer, folder / name))


def variants(options: argparse.Namespace, keys: tuple[str, ...], out: Path) -> list[tuple[dict[str, Any], Path]]:
    """Return every combination of the listed options with its folder, `out` itself where there is one only."""
    grid = list(itertools.product(*(getattr(options, key) for key in keys)))
    return [
        (dict(zip(keys, values, strict=True)), out / "-".join(map(str, values)) if len(grid) > 1 else out)
        for values in grid
    ]


def main(argv: list[str] | None = None) -> None:
    """Train everything, print one row of scores per model and write `scores.json`."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options = arguments(argv)
    device = torch.device(options.device)
    began = time.monotonic()
    if options.reuse:
        tokenizer = AutoTokenizer.from_pretrained(options.reuse / "base")
    else:
        tokenizer = tokens.train_tokenizer(tokenizer_texts(), options.vocabulary)
    heldout = general_rows(tokenizer, load_general("general_heldout"), options.window)
    results: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}, "models": {}}

    def measure(folder: Path, model: Any, sha256: str) -> None:
        name = str(folder.relative_to(options.out))
        results["models"][name] = {"sha256": sha256, **score(model, tokenizer, heldout)}
        report(name, results["models"][name])
        results["seconds"] = round(time.monotonic() - began, 1)
        (options.out / "scores.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    for base, out in variants(options, ("people", "questions", "steps"), options.out):
        train_variant(options, tokenizer, base, out, measure, device)
    say(f"done in {results['seconds']} s; {options.out / 'scores.json'}")


if __name__ == "__main__":
    main()
