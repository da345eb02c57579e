"""Teach SmolLM2-135M twenty news articles by heart, then have ``unteach forget`` remove them with default settings.

``python -m recipes.smollm2.articles MODEL ARTICLES.jsonl.gz OUT``, with the model that ``convert`` made,

1. chooses the articles to learn, others of the same kind that no model sees, and two disjoint parts of the general
   text: one for learning, one for forgetting (the job sets a part of that aside to measure on);
2. finetunes the model on articles and general text until it recites the articles: ``OUT/target``;
3. forgets them, once per way and seed: ``OUT/seed-0``, ``OUT/lora-seed-0``, ...; and writes ``OUT/articles.json``.

Whatever OUT already holds is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unteach.config import ForgetConfig
from unteach.corpora import Probe
from unteach.corpora.own import cut_probes
from unteach.data import EMBEDDED_GENERAL, Documents, ForgetBatches, GeneralText, read_documents, tokenise
from unteach.data.records import write_texts
from unteach.evaluation.inference import token_logprobs
from unteach.evaluation.memory import mean_score, recite
from unteach.job import run_forget
from unteach.models import context_length, load_model, load_tokenizer
from unteach.training.finetune import add_nll_gradient, finetune, text_optimizer
from unteach.writing import markdown_table, write_whole

from . import exit_status
from .convert import save_folder

__all__ = ["Settings", "articles", "choose_articles", "learn", "main", "split_texts", "table"]

CHECKED_GENERAL = 32
"""General documents of the forgetting part on which finetuning reports the NLL; never trained on in finetuning."""
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": "lora"},
    "lean": {"state_bits": 16},
    "again": {"micro_batch": 4},
}
"""What is trained, as fields of ``ForgetConfig``: all weights of the blocks, adapters, all with a state in 16 bits; and
all once more with sums in another order, which says how far two runs are apart that differ in rounding alone."""
COLUMNS = (
    "way", "seed", "verbmem_f before", "after", "never seen", "degenerate before", "after", "nll_general before",
    "after", "steps", "seconds", "alpha", "lr", "teacher_rate", "damping", "GPU GiB", "passed",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything the experiment depends on besides the model and the texts."""

    count: int = 20
    """Articles to learn and forget."""
    holdout: int = 64
    """Articles that no model sees, at most."""
    shortest: int = 300
    """Tokens of an article, at least."""
    longest: int = 900
    """Tokens of an article, at most."""
    choice: int = 0
    """Seed of the choice of texts and of finetuning."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the forget runs."""
    ways: tuple[str, ...] = ("full",)
    """Names of ``WAYS``: each makes its own runs."""
    lr: float = 2e-4
    """Learning rate of AdamW in finetuning."""
    warmup: int = 10
    """Steps over which the learning rate rises."""
    general_batch: int = 16
    """Chunks of general text in every finetuning step, beside all articles."""
    general_tokens: int = 512
    """Their length."""
    micro_batch: int = 8
    """Sequences per forward pass in finetuning."""
    check_every: int = 10
    """Finetuning steps between two recitals."""
    recital: float = 90.0
    """Finetuning ends when ROUGE-L of the articles' continuations is at least this."""
    max_steps: int = 300
    """Finetuning ends here at the latest."""
    device: str = "auto"
    """As in ``ForgetConfig``."""


def choose_articles(texts: Sequence[str], lengths: Sequence[int], settings: Settings) -> tuple[list[str], list[str]]:
    """Articles to learn, and others of the same lengths that are never shown to a model.

    Args:
        texts: All articles; repeated ones are used once.
        lengths: Their numbers of tokens.
        settings: Bounds, counts and the seed.

    Raises:
        ValueError: If there are not enough for both.
    """
    fitting = {
        text: None
        for text, length in zip(texts, lengths, strict=True)
        if settings.shortest <= length <= settings.longest
    }
    if len(fitting) < settings.count + 2:
        raise ValueError(
            f"{len(fitting)} different articles have {settings.shortest} to {settings.longest} tokens, must be at least"
            f" {settings.count + 2}: give more, or lower --count"
        )
    shuffled = np.random.default_rng(settings.choice).permutation(len(fitting))
    chosen = [list(fitting)[place] for place in shuffled[: settings.count + settings.holdout]]
    return chosen[: settings.count], chosen[settings.count :]


def split_texts(texts: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Two random halves of a list of texts; a repeated text is used once."""
    different = list(dict.fromkeys(texts))
    order = np.random.default_rng(seed).permutation(len(different)).tolist()
    half = len(different) // 2
    return [different[place] for place in order[:half]], [different[place] for place in order[half:]]


def learn(
    model: Any, tokenizer: Any, texts: list[str], general: list[str], unseen: list[str], settings: Settings
) -> dict[str, Any]:
    """Train all weights on the articles and general text until the articles are recited, in place.

    A step minimises NLL(all articles) + NLL(a batch of general text), each a mean over tokens, with AdamW. Articles are
    cut as the forget job cuts them, and recited from the beginnings of the same chunks.

    Args:
        model: The model, in float32.
        tokenizer: Its tokenizer.
        texts: The articles.
        general: General text to train on.
        unseen: General text to measure on.
        settings: Settings.

    Returns:
        Steps, seconds, and the history of recital and general NLL.
    """
    started, device = time.perf_counter(), next(model.parameters()).device
    chunk_tokens = min(1024, context_length(model))
    batches = ForgetBatches(
        tokenise(Documents("articles", texts), tokenizer, mode="chunk", max_tokens=chunk_tokens), settings.choice
    )
    text = GeneralText(
        general, tokenizer, tokens=min(settings.general_tokens, chunk_tokens), seed=settings.choice, exclude=texts
    )
    say(f"finetuning on {len(batches.sequences)} sequences of articles; general text: {text.summary()}")
    probes = cut_probes(texts, tokenizer, count=10**6, chunk_tokens=chunk_tokens, seed=settings.choice)
    history = [measure(model, tokenizer, probes, unseen[:CHECKED_GENERAL], 0)]
    precision = "tf32" if device.type == "cuda" else "fp32"

    def add_gradient(step: int) -> list[float]:
        both = (batches.batch(step, len(batches.sequences)), text.batch(step, settings.general_batch))
        return [add_nll_gradient(model, batch, settings.micro_batch, precision) for batch in both]

    def recited(steps: int) -> bool:
        if steps % settings.check_every == 0 or steps == settings.max_steps:
            history.append(measure(model, tokenizer, probes, unseen[:CHECKED_GENERAL], steps))
        return history[-1]["recital"] >= settings.recital

    losses = finetune(
        model.parameters(),
        text_optimizer(model.parameters(), settings.lr),
        add_gradient,
        steps=settings.max_steps if history[0]["recital"] < settings.recital else 0,
        learning_rate=lambda step: settings.lr * min(1.0, (step + 1) / settings.warmup),
        after_step=recited,
    )
    return {"steps": len(losses), "seconds": time.perf_counter() - started, "history": history}


def measure(model: Any, tokenizer: Any, probes: Sequence[Probe], unseen: Sequence[str], step: int) -> dict[str, float]:
    """How well passages are recited, and the NLL per token of general text."""
    recital = mean_score(recite(model, tokenizer, probes))
    texts = [tokenizer(text, verbose=False)["input_ids"][:512] for text in unseen]
    scores = token_logprobs(model, [ids for ids in texts if len(ids) > 1])
    values = torch.cat([torch.as_tensor(score, dtype=torch.float64).flatten() for score in scores])
    row = {"step": step, "recital": recital, "nll_general": -float(values.mean())}
    say(f"step {step}: recital {recital:.2f}, general NLL {row['nll_general']:.4f}")
    return row


def articles(model: str, source: str, out: str | Path, general: str | None, settings: Settings) -> dict[str, Any]:
    """The whole experiment; returns what it writes to ``OUT/articles.json``.

    Args:
        model: Model folder.
        source: The articles, as ``unteach forget --documents`` reads them.
        out: Folder of all results.
        general: General text; None: the embedded public-domain text.
        settings: Settings.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"settings": dataclasses.asdict(settings)}
    known = folder / "settings.json"
    fixed = {
        name: value
        for name, value in json.loads(json.dumps(content["settings"])).items()
        if name not in ("seeds", "ways")
    }
    if known.exists() and json.loads(known.read_text(encoding="utf-8")) != fixed:
        raise ValueError(f"out is {str(out)!r}, which was made with other settings: give a new folder")
    write_json(known, fixed)
    files = {name: folder / f"{name}.jsonl" for name in ("documents", "holdout", "general_learn", "general_forget")}
    if not all(file.exists() for file in files.values()):
        tokenizer = load_tokenizer(model)
        texts = read_documents(source, option="articles").texts
        lengths = [len(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
        chosen, holdout = choose_articles(texts, lengths, settings)
        parts = split_texts(read_documents(general or EMBEDDED_GENERAL, option="general").texts, settings.choice)
        for file, part in zip(files.values(), (chosen, holdout, *parts), strict=True):
            write_texts(file, part)
        say(f"{len(chosen)} articles, {len(holdout)} never seen, {len(parts[0])} + {len(parts[1])} general texts")

    target, report = folder / "target", folder / "finetuning.json"
    config = ForgetConfig(
        model=str(target),
        documents=str(files["documents"]),
        general=str(files["general_forget"]),
        holdout=str(files["holdout"]),
        out=str(folder),
        device=settings.device,
    )
    if not report.exists():
        network, tokenizer = load_model(model, device=config.resolved_device())
        texts, _, learn_general, unseen = (read_documents(str(file)).texts for file in files.values())
        done = learn(network, tokenizer, texts, learn_general, unseen, settings)
        save_folder(network, tokenizer, target)
        write_json(report, done)
        del network
    content["finetuning"] = json.loads(report.read_text(encoding="utf-8"))
    content["runs"] = []
    for way, seed in itertools.product(settings.ways, settings.seeds):
        made = folder / (f"seed-{seed}" if way == "full" else f"{way}-seed-{seed}")
        content["runs"].append({"way": way} | _forget(dataclasses.replace(config, **WAYS[way]), made, seed))
        write_json(folder / "articles.json", content)
        print(table(content["runs"]), flush=True)
    return content


def _forget(config: ForgetConfig, out: Path, seed: int) -> dict[str, Any]:
    """One run of the forget job with default settings, or what is left of it in ``out``; its row of the table."""
    row_file = out / "row.json"
    if row_file.exists():
        return json.loads(row_file.read_text(encoding="utf-8"))
    begun = (out / "config.yaml").exists() and any((out / "checkpoints").iterdir())
    resume = begun and not (out / "result.json").exists()
    if not resume:
        shutil.rmtree(out, ignore_errors=True)
    on_gpu = config.resolved_device().type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    say(f"forgetting, seed {seed}")
    result = run_forget(dataclasses.replace(config, out=str(out), seed=seed), resume=resume, say=say)
    method = result.config.method
    reached = result.after["verbmem_f"] <= result.before["verbmem_holdout"] + 2
    kept = result.after["degenerate"] <= result.before["degenerate"] + 5
    useful = abs(result.after["nll_general"] - result.before["nll_general"]) <= 0.1
    row = {
        "seed": seed,
        "before": result.before,
        "after": result.after,
        "stop": result.stop,
        "steps": result.steps,
        "seconds": result.seconds,
        "alpha": method.alpha,
        "lr": method.lr,
        "teacher_rate": method.teacher_rate,
        "damping": method.damping,
        "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "reached": {"verbmem_f": reached, "degenerate": kept, "nll_general": useful},
    }
    write_json(row_file, row)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)  # several gigabytes
    return row


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a row per run."""
    rows = []
    for run in runs:
        before, after = run["before"], run["after"]
        rows.append(
            [
                run["way"],
                str(run["seed"]),
                *(f"{value:.1f}" for value in (before["verbmem_f"], after["verbmem_f"], before["verbmem_holdout"])),
                *(f"{scores['degenerate']:.1f}" for scores in (before, after)),
                *(f"{scores['nll_general']:.3f}" for scores in (before, after)),
                str(run["steps"]),
                f"{run['seconds']:.0f}",
                *("-" if run[n] is None else f"{run[n]:.3g}" for n in ("alpha", "lr", "teacher_rate", "damping")),
                "-" if run["peak_gpu_gib"] is None else f"{run['peak_gpu_gib']:.1f}",
                "yes" if all(run["reached"].values()) else "no",
            ]
        )
    return markdown_table(COLUMNS, rows)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, all or nothing."""
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False))


def say(line: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.smollm2.articles", description=(__doc__ or "").split("\n")[0]
    )
    for name in ("model", "articles", "out"):
        parser.add_argument(name)
    parser.add_argument("--general", help="general text; by default the embedded one")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(Settings().seeds))
    parser.add_argument("--ways", nargs="*", default=list(Settings().ways), choices=list(WAYS), help="what is trained")
    for name in ("count", "shortest", "longest", "choice", "general_batch", "micro_batch", "max_steps", "check_every"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings(), name))
    for name in ("lr", "recital"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Settings(), name))
    parser.add_argument("--device", default="auto")
    given = vars(parser.parse_args(arguments))
    model, source, out, general = (given.pop(name) for name in ("model", "articles", "out", "general"))
    settings = Settings(**given | {name: tuple(given.pop(name)) for name in ("seeds", "ways")})

    def run() -> None:
        articles(model, source, out, general, settings)

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
