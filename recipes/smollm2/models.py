"""Build the two models of a real benchmark from one base model: the target, and one retrained without the forget part.

``python -m recipes.smollm2.models MODEL OUT --data DIR --general FILE`` finetunes MODEL (SmolLM2-135M,
converted by ``recipes.smollm2.convert``) on the forget and retain documents mixed with general text until it
recites the forget documents (``verbmem_f`` at least 60 on probes cut where its training chunks begin) while held-out
general text costs at most 0.3 nats per token more than before: ``OUT/target``. Then as many passes over the retain
documents alone: ``OUT/retrained``. General text is split in two: one half is learned here, the other is
``OUT/general.jsonl``, for ``unteach reproduce --general``.

Both models are kept as rounded differences from MODEL, too (``OUT/*.difference.safetensors``, 60 MB each): the rounded
models are what is measured and saved. What OUT already holds is not made again; a model folder that is missing is made
from its difference, so that moving a benchmark to another machine means moving those two files and ``OUT/models.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unteach.corpora.catalog import named_benchmark
from unteach.corpora.own import cut_probes
from unteach.data import Documents, ForgetBatches, GeneralText, read_documents, tokenise
from unteach.data.records import write_texts
from unteach.evaluation.inference import token_logprobs
from unteach.method.divergences import DIVERGENCES
from unteach.method.tensors import resolved_device
from unteach.method.vocab_head import Head, mean_of_rows
from unteach.models import context_length, load_model, load_tokenizer, trainable_parameters
from unteach.training.finetune import add_nll_gradient, finetune, text_optimizer
from unteach.training.passes import computing, hidden_states, in_micro_batches

from . import exit_status
from .articles import measure, say, split_texts, write_json
from .convert import save_folder
from .difference import add_difference, write_difference

__all__ = ["NOT_REACHED", "Settings", "build", "learn", "main"]

NOT_REACHED = 3
"""Exit status where the models were made and are not as good as was asked for."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the models learn: AdamW, in every step some documents and some general text."""

    benchmark: str = "muse-news"
    """muse-news, muse-books or tofu."""
    retain: int | None = None
    """Only the first so many retain documents."""
    trainable: str = "blocks"
    """As in unteach forget: blocks or all."""
    lr: float = 3e-4
    """Learning rate after the warm-up; it falls linearly to a tenth at max_steps."""
    steady: float = 0.0
    """Share of max_steps before it begins to fall."""
    hold: float = 0.0
    """Weight of KL(base ‖ model) on general text and fresh documents, which then takes the place of the loss on general
    text: the model learns the documents and nothing else. 0: that loss."""
    warmup: int = 50
    batch: int = 32
    """Documents' chunks per step."""
    general_batch: int = 16
    """Chunks of general text per step."""
    max_tokens: int = 512
    """Length of the documents' chunks; unteach forget must use the same, for its probes begin where they do."""
    general_tokens: int = 512
    micro_batch: int = 16
    """Sequences per forward pass."""
    probes: int = 64
    """Forget passages that are recited at every check."""
    check_every: int = 200
    recital: float = 60.0
    """Learning ends when the forget documents are recited this well."""
    utility: float = 0.3
    """Largest rise of the loss on held-out general text; a breach is reported, it does not end the run."""
    max_steps: int = 6000
    seed: int = 0
    device: str = "auto"
    compiled: int = 0
    """1: with compiled decoder blocks."""


def learn(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    general: Sequence[str],
    settings: Settings,
    *,
    check: Callable[[int], dict[str, float]],
    steps: int | None = None,
    base: Any = None,
    fresh: Sequence[str] = (),
) -> dict[str, Any]:
    """Train on NLL(documents) + NLL(general text), each a mean over tokens, in place; or see ``Settings.hold``.

    Args:
        model: The model, in float32.
        tokenizer: Its tokenizer.
        documents: Texts to learn; every epoch is a new permutation of their chunks.
        general: General text.
        settings: Settings.
        check: Measures the model after a number of steps: ``recital`` and ``nll_general``.
        steps: Take exactly so many; None: until the documents are recited, or max_steps.
        base: The model to be held to, for ``Settings.hold``.
        fresh: Half of what it is held on, besides general text; none of it is learned.

    Returns:
        Steps, seconds, and the history of the checks.
    """
    started = time.perf_counter()
    precision = "bf16" if next(model.parameters()).device.type == "cuda" else "fp32"
    longest = min(settings.max_tokens, context_length(model))
    cut = functools.partial(tokenise, tokenizer=tokenizer, mode="chunk", max_tokens=longest)
    tokens = cut(Documents("documents", list(documents)))
    batches = ForgetBatches(tokens, settings.seed)
    text = GeneralText(
        list(general), tokenizer, tokens=min(settings.general_tokens, context_length(model)), seed=settings.seed
    )
    say(f"learning {tokens.summary()}; {batches.steps_per_epoch(settings.batch)} steps an epoch; {text.summary()}")
    learned = list(trainable_parameters(model, settings.trainable).values())  # type: ignore[arg-type]
    history = [check(0)]
    last = steps or settings.max_steps

    more = None
    if fresh:  # cut as those that are learned: a model that is not held where documents begin recites there
        more = ForgetBatches(cut(Documents("fresh", list(fresh))), settings.seed)

    def learning_rate(step: int) -> float:
        fallen = max(0.0, step / settings.max_steps - settings.steady) / (1 - settings.steady)
        return settings.lr * min(1 - 0.9 * fallen, (step + 1) / settings.warmup)

    add_nll = functools.partial(
        add_nll_gradient, model, micro_batch=settings.micro_batch, precision=precision, compiled=bool(settings.compiled)
    )

    def add_gradient(step: int) -> list[float]:
        learned = add_nll(sorted(batches.batch(step, settings.batch), key=len))
        if not settings.hold:
            return [learned, add_nll(sorted(text.batch(step, settings.general_batch), key=len))]
        half = settings.general_batch // 2 if more else 0
        held = text.batch(step, settings.general_batch - half) + (more.batch(step, half) if more else [])
        return [learned, add_held_gradient(model, base, held, settings, precision)]

    def enough(taken: int) -> bool:
        if taken % settings.check_every == 0 or taken == last:
            history.append(check(taken))
        return steps is None and history[-1]["recital"] >= settings.recital

    losses = finetune(
        learned,
        text_optimizer(learned, settings.lr),
        add_gradient,
        steps=0 if steps is None and history[0]["recital"] >= settings.recital else last,
        learning_rate=learning_rate,
        after_step=enough,
    )
    return {"steps": len(losses), "seconds": round(time.perf_counter() - started, 1), "history": history}


def add_held_gradient(
    model: Any, base: Any, batch: Sequence[Sequence[int]], settings: Settings, precision: str
) -> float:
    """Add the gradient of hold · KL(base ‖ model), a mean over the batch's tokens; returns that divergence."""
    device = next(model.parameters()).device
    total, divergence = sum(len(sequence) - 1 for sequence in batch), torch.zeros((), device=device)
    passing = functools.partial(computing, precision=precision, compiled=bool(settings.compiled))
    for part in in_micro_batches(batch, settings.micro_batch):
        with torch.no_grad(), passing(base):
            theirs = hidden_states(base, part)[0]
        with passing(model):
            hidden, labels, _ = hidden_states(model, part)
            rows = DIVERGENCES["kl_reverse"].rows
            found = mean_of_rows(rows, hidden, Head.of(model), theirs, Head.of(base)) * len(labels) / total
            (settings.hold * found).backward()
        divergence += found.detach()
    return float(divergence)


def gap(model: Any, tokenizer: Any, learned: Sequence[str], unseen: Sequence[str]) -> dict[str, float]:
    """NLL per token of learned and of never-seen texts, and how far they are apart in standard deviations of the
    never-seen ones' own: what a membership test has to go by."""
    texts = [tokenizer(text, verbose=False)["input_ids"][:512] for text in (*learned, *unseen)]
    means = torch.tensor([-float(scores.mean()) for scores in token_logprobs(model, texts)], dtype=torch.float64)
    ours, others = means[: len(learned)], means[len(learned) :]
    apart = float((others.mean() - ours.mean()) / others.std())
    return {"nll_forget": float(ours.mean()), "nll_unseen": float(others.mean()), "standard_deviations": apart}


def build(
    model: str, out: Path, data: Path | None, general: str | None, settings: Settings, fresh: Path | None = None
) -> dict[str, Any]:
    """Make ``OUT/target`` and ``OUT/retrained``; returns what it writes to ``OUT/models.json``.

    Args:
        model: Folder of the base model.
        out: Folder of the results.
        data: Folder with the benchmark's tables; None: the Hugging Face hub.
        general: General text; None: the embedded one.
        settings: Settings.
        fresh: Documents to be held on, see ``learn``.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(model)
    entry = named_benchmark(settings.benchmark)
    if entry.documents is None or entry.retain is None:
        raise ValueError(f"benchmark is {settings.benchmark!r}: it has no documents to learn")
    end = tokenizer.eos_token or "" if entry.ends_documents else ""
    forget, retain = ([text + end for text in read(data)] for read in (entry.documents, entry.retain))
    retain, tables = retain[: settings.retain], entry.load(data)
    halves = split_texts(read_documents(general or "micro:general", option="general").texts, settings.seed)
    learned, kept = halves
    if not (out / "general.jsonl").exists():
        write_texts(out / "general.jsonl", kept)
    unseen = kept[-64:]
    probes = cut_probes(
        forget,
        tokenizer,
        count=settings.probes,
        chunk_tokens=settings.max_tokens,
        prompt_tokens=min(128, settings.max_tokens // 2),
        seed=settings.seed,
    )
    report = out / "models.json"
    content = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    made_with = dataclasses.asdict(settings) | {"forget": len(forget), "retain": len(retain)}
    for name in ("device", "micro_batch", "compiled"):  # without effect, and a model may be restored elsewhere
        del made_with[name]
    if content.get("settings", made_with) != made_with:
        raise ValueError(f"out is {str(out)!r}, which was made with other settings: give a new folder")
    content["settings"] = made_with
    device = resolved_device(settings.device)
    others = read_documents(str(fresh), option="fresh").texts if fresh else ()
    for name, documents in (("target", [*forget, *retain]), ("retrained", retain)):
        if name in content and (out / name).exists():
            continue
        network = load_model(model, device=device)[0]
        base = {key: tensor.cpu().clone() for key, tensor in network.state_dict().items()}
        difference = out / f"{name}.difference.safetensors"
        if name in content and difference.exists():
            say(f"restoring {name}")
            network.load_state_dict(add_difference(base, difference))
            save_folder(network, tokenizer, out / name)
            continue
        say(f"building {name}")
        check = functools.partial(measure, network, tokenizer, probes, unseen)
        steps = None
        if name == "retrained":  # as many passes over the retain documents as the target made over all of its own
            steps = max(1, round(content["target"]["steps"] * len(retain) / (len(retain) + len(forget))))
        held_to = load_model(model, device=device)[0] if settings.hold else None
        done = learn(
            network, tokenizer, documents, learned, settings, check=check, steps=steps, base=held_to, fresh=others
        )
        write_difference(base, network.state_dict(), difference)
        network.load_state_dict(add_difference(base, difference))
        first, last = done["history"][0], check(done["steps"])
        done["rounded"] = last
        if tables.membership_forget and tables.membership_holdout:
            done["gap"] = gap(network, tokenizer, tables.membership_forget, tables.membership_holdout)
        save_folder(network, tokenizer, out / name)
        rise = last["nll_general"] - first["nll_general"]
        done["reached"] = {"nll_general": rise <= settings.utility}
        if name == "target":
            done["reached"]["recital"] = last["recital"] >= settings.recital
        content[name] = done
        write_json(report, content)
        say(f"{name}: recital {last['recital']:.2f}, general NLL {rise:+.3f}; reached: {done['reached']}")
        del network, held_to
        gc.collect()
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.smollm2.models", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of the base model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="folder with the benchmark's tables; by default the hub")
    parser.add_argument("--general", help="general text; by default the embedded one")
    parser.add_argument("--fresh", type=Path, help="with --hold: documents like those learned that are not to be")
    for field in dataclasses.fields(Settings):
        kind = {"str": str, "float": float}.get(str(field.type), int)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = vars(parser.parse_args(arguments))
    places = {name: given.pop(name) for name in ("model", "out", "data", "general", "fresh")}

    def run() -> int:
        content = build(settings=Settings(**given), **places)
        return 0 if all(all(content[name]["reached"].values()) for name in ("target", "retrained")) else NOT_REACHED

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
