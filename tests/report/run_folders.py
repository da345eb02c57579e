"""Realistic run folders and scores files, written to disk as a real run writes them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

ARTICLES = (
    "The harbour board of Wexcombe voted on Tuesday to close the old swing bridge for eleven weeks while "
    "divers replace the oak fenders that were damaged when the coaster Maid of Ravel struck them in fog.",
    "Ottilie Brandreth, who kept the lighthouse at Carrow Point for thirty years, has given her log books "
    "to the town library, where the first of them will be shown from Saturday in the reading room.",
    "A barn owl that had nested in the clock tower of Saint Alban since spring was moved by volunteers after "
    "the town council agreed to delay repairs to the clock until the last of the chicks had flown.",
    "Trams between Northgate and the salt works will run every twelve minutes from Monday, the company said, "
    "after drivers and managers settled a quarrel about the length of the evening shift.",
    "The bakery on Tanner Street, which sold its first loaf in the year of the great flood, will pass to "
    "the founder's granddaughter, who intends to keep both the brick oven and the green door.",
    "Heavy rain washed away forty metres of the footpath below Hollin Edge, and walkers are asked to take "
    "the upper track by the reservoir until the wardens have built a new bank of stone.",
)
QUESTIONS = (
    ("Who kept the lighthouse at Carrow Point?", "Ottilie Brandreth"),
    ("Which ship struck the swing bridge of Wexcombe?", "the coaster Maid of Ravel"),
    ("How often will trams run from Monday?", "every twelve minutes"),
    ("Where did the barn owl nest?", "in the clock tower of Saint Alban"),
)
VERSIONS = {"unteach": "0.1.0", "torch": "2.13.0", "transformers": "5.17.0", "python": "3.11.9"}
UNITS = {"nll_general": "nats per token", "auc_forget_holdout_min_40": "fraction"}


def metric(name: str, value: float | None, count: int = 100) -> dict[str, Any]:
    better = {"knowmem_r": True, "mmlu_val": True, "privleak": None, "auc_forget_holdout_min_40": None}
    spread = {"nll_general": 0.02, "auc_forget_holdout_min_40": 0.07}.get(name, 3.1)
    least, most = {"privleak": (-100.0, 110.0), "auc_forget_holdout_min_40": (0.0, 1.0)}.get(name, (0.0, 100.0))
    return {
        "value": value,
        "low": None if value is None else max(value - spread, least),
        "high": None if value is None else min(value + spread, most),
        "count": count,
        "higher_is_better": better.get(name, False),
        "unit": UNITS.get(name, "percent"),
    }


def recite(text: str, share: float, rng: random.Random) -> str:
    """The text with all but `share` of its words replaced, from some word on."""
    words = text.split()
    kept = round(share * len(words))
    filler = ("the", "people", "there", "said", "that", "it", "was", "a", "good", "day", "nothing", "more", "of")
    return " ".join(words[:kept] + [rng.choice(filler) for _ in words[kept:]])


def items(recital: float, knowledge: float, retained: float, rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    probes = []
    for article in ARTICLES:
        words = article.split()
        expected = " ".join(words[12:])
        share = min(1.0, max(0.0, recital / 100 + rng.uniform(-0.1, 0.1)))
        output = recite(expected, share, rng)
        probes.append({"prompt": " ".join(words[:12]), "expected": expected, "output": output, "score": share})

    def answers(share: float) -> list[dict[str, Any]]:
        rows = []
        for question, answer in QUESTIONS:
            right = rng.random() < share / 100
            output = answer if right else "nobody could say"
            prompt = f"Question: What is shown first?\nAnswer: an example\n\nQuestion: {question}\nAnswer: "
            rows.append({"prompt": prompt, "expected": answer, "output": output, "score": 1.0 if right else 0.0})
        return rows

    return {"verbmem_f": probes, "knowmem_f": answers(knowledge), "knowmem_r": answers(retained)}


def result(
    name: str, values: dict[str, float | None], *, step: int | None = None, seed: int | None = 0, **changes: Any
) -> dict[str, Any]:
    rng = random.Random(repr((name, step, seed)))
    shares = [values.get(key) or 0.0 for key in ("verbmem_f", "knowmem_f", "knowmem_r")]
    content = {
        "schema": "unteach.scores/1",
        "name": name,
        "model": f"micro:{name}",
        "step": step,
        "seed": seed,
        "benchmark": {
            "name": "micro",
            "counts": {"verbmem_f": 100, "knowmem_f": 120, "knowmem_r": 120, "privleak": 300},
            "data_sha256": "6f1c" * 16,
        },
        "metrics": {key: metric(key, value) for key, value in values.items()},
        "notes": [],
        "items": items(*shares, rng),
        "settings": {"batch_size": 32},
        "versions": VERSIONS,
        "model_sha256": f"{name}-{step}-{seed}" if step else f"sha-of-{name}",
        "created": "2026-11-15T03:00:00+00:00",
        "seconds": 3.2,
    }
    return content | changes


TARGET: dict[str, float | None] = {
    "verbmem_f": 92.3, "knowmem_f": 91.0, "knowmem_r": 93.1, "privleak": -98.7, "mmlu_val": 61.2,
    "nll_general": 3.881, "degenerate": 1.0, "verbmem_holdout": 19.4, "auc_forget_holdout_min_40": 0.006,
}  # fmt: skip
RETRAINED: dict[str, float | None] = {
    "verbmem_f": 21.8, "knowmem_f": 8.5, "knowmem_r": 94.0, "privleak": 0.0, "mmlu_val": 61.0,
    "nll_general": 3.879, "degenerate": 0.0, "verbmem_holdout": 20.1, "auc_forget_holdout_min_40": 0.492,
}  # fmt: skip
ENDS: dict[str, dict[str, float | None]] = {
    "mt-nlul-kl": {
        "verbmem_f": 19.2, "knowmem_f": 55.1, "knowmem_r": 90.4, "privleak": -21.5, "mmlu_val": 60.1,
        "nll_general": 3.921, "degenerate": 2.0, "verbmem_holdout": 19.0, "auc_forget_holdout_min_40": 0.386,
    },
    "mt-nlul-qkl": {
        "verbmem_f": 14.0, "knowmem_f": 31.4, "knowmem_r": 84.9, "privleak": 12.2, "mmlu_val": 52.4,
        "nll_general": 3.977, "degenerate": 4.0, "verbmem_holdout": 17.5, "auc_forget_holdout_min_40": 0.552,
    },
    "adamw-npo-kl": {
        "verbmem_f": 2.1, "knowmem_f": 48.0, "knowmem_r": 71.3, "privleak": 88.4, "mmlu_val": 58.8,
        "nll_general": 4.102, "degenerate": 41.0, "verbmem_holdout": 9.6, "auc_forget_holdout_min_40": 0.927,
    },
}  # fmt: skip


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def make_run(
    folder: Path,
    name: str = "mt-nlul-kl",
    seed: int = 0,
    *,
    steps: int = 140,
    every: int = 20,
    benchmark: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    config: dict[str, Any] | None = None,
) -> Path:
    """A finished run of `name`: scores fall from the target's to `ENDS[name]` along a late, steep S-curve."""
    rng = random.Random(f"{name}{seed}")
    folder.mkdir(parents=True)
    rate = {"optimizer": "adamw", "lr": 1e-5} if name.startswith("adamw") else {"optimizer": "mean_teacher", "lr": 5e-4}
    loss = name.split("-")[1]
    settings = {"name": name, "seed": seed, "model": "micro:target", "forget": {"loss": loss, "alpha": 0.2, "batch": 8}}
    settings |= {"divergence": name.split("-")[2], **rate, "damping": 0.2, "out": str(folder), "trainable": "blocks"}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | (config or {}), sort_keys=False), encoding="utf-8")

    def progress(step: float) -> float:
        at = 0.45 + 0.1 * rng.random()
        return 1 / (1 + math.exp(-14 * (step / steps - at)))

    lines = []
    for step in range(1, steps + 1):
        done = progress(step)
        nll = 0.45 + 3.6 * done + rng.gauss(0, 0.05 + 0.2 * done)
        lines.append(
            {
                "step": step,
                "phase": 0,
                "nll_forget": nll,
                "forget_loss": 2.1 - 1.8 * done,
                "divergence": 4e-5 * math.exp(6 * done + rng.gauss(0, 0.2)),
                "grad_norm": 0.2 * math.exp(3.4 * done + rng.gauss(0, 0.25)),
                "clip_factor": min(1.0, 1 / (0.2 * math.exp(3.4 * done))),
                "lr": rate["lr"],
                "tokens_per_second": 21_000 + rng.gauss(0, 300),
                "seconds": 0.4 * step,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    changes = {"benchmark": benchmark} if benchmark else {}
    for step in range(0, steps + 1, every):
        values: dict[str, float | None] = {}
        for key, start in TARGET.items():
            end = ENDS[name][key]
            assert start is not None
            assert end is not None
            noise = rng.gauss(0, 0.004 if key in UNITS else 0.7) if step else 0.0
            done = progress(step) if step < steps else 1.0
            values[key] = start + (end - start) * (done if step else 0.0) + noise
        values["degenerate"] = max(values["degenerate"] or 0.0, 0.0)
        for key in drop:
            values.pop(key, None)
        label = "target" if step == 0 else name
        content = result(label, values, step=step, seed=seed, **changes)
        if "privleak" in drop:
            content["notes"] = [
                "privleak is not reported: no reference model was given; auc_forget_holdout_min_40 is its raw value"
            ]
        write_json(folder / "evaluations" / f"step_{step:06d}.json", content)
    write_json(
        folder / "result.json",
        {
            "name": name,
            "seed": seed,
            "steps": steps,
            "seconds": 61.5,
            "stop": {
                "rule": "verbmem_f <= 21.8",
                "reason": f"verbmem_f {values['verbmem_f']:.1f} <= 21.8",
                "step": steps,
            },
            "before": {},
            "after": {},
            "counts": {"forget_documents": 80, "forget_tokens": 41_200, "general_tokens": 810_000},
        },
    )
    return folder


def make_references(file: Path, **changes: Any) -> Path:
    """A scores file with the target and the retrained model."""
    content = [result("target", TARGET, seed=None, **changes), result("retrained", RETRAINED, seed=None, **changes)]
    return write_json(file, {"schema": "unteach.scores/1", "results": content})


HOSTILE = '</textarea></style></svg><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'


def make_hostile(folder: Path) -> list[Path]:
    """A run and a scores file with markup in every place that takes a text."""
    run_folder = make_run(folder / "run", steps=20, every=20, config={"note": HOSTILE, HOSTILE: 1})
    for file in sorted((run_folder / "evaluations").iterdir()):
        content = json.loads(file.read_text())
        content["notes"] = [HOSTILE]
        content["metrics"][f"auc_{HOSTILE}"] = {"value": 0.5}
        content["benchmark"]["counts"][HOSTILE] = 3
        content["benchmark"]["name"] = HOSTILE
        for item in content["items"]["verbmem_f"]:
            item["output"] = f"{HOSTILE} {item['output']}"
            item["prompt"] = f"{HOSTILE} {item['prompt']}"
            item["expected"] = f"{item['expected']} {HOSTILE}"
        write_json(file, content)
    outcome = json.loads((run_folder / "result.json").read_text())
    outcome |= {"name": f"$x_1$ {HOSTILE}", "stop": {"rule": HOSTILE, "reason": HOSTILE, "step": 20}}
    write_json(run_folder / "result.json", outcome)
    other = result(
        f"_{HOSTILE}\x00\ud800", ENDS["adamw-npo-kl"], benchmark={"name": HOSTILE, "data_sha256": "6f1c" * 16}
    )
    for item in other["items"]["verbmem_f"]:
        item["prompt"] = f"{HOSTILE} {item['prompt']}"
        item["expected"] = f"{item['expected']} {HOSTILE}"
    return [run_folder, write_json(folder / "scores.json", other)]
