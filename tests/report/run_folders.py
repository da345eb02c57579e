"""Realistic run folders and scores files, written to disk as a real run writes them."""

import json
import math
import random

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
)
QUESTIONS = {
    "Who kept the lighthouse at Carrow Point?": "Ottilie Brandreth",
    "Which ship struck the swing bridge of Wexcombe?": "the coaster Maid of Ravel",
    "How often will trams run from Monday?": "every twelve minutes",
    "Where did the barn owl nest?": "in the clock tower of Saint Alban",
}
AUC = "auc_forget_holdout_min_40"
NAMES = (
    "verbmem_f", "knowmem_f", "knowmem_r", "privleak", "mmlu_val", "nll_general", "degenerate", "verbmem_holdout", AUC
)  # fmt: skip
TARGET = dict(zip(NAMES, (92.3, 91.0, 93.1, -98.7, 61.2, 3.881, 1.0, 19.4, 0.006), strict=True))
RETRAINED = dict(zip(NAMES, (21.8, 8.5, 94.0, 0.0, 61.0, 3.879, 0.0, 20.1, 0.492), strict=True))
ENDS = {
    "mt-nlul-kl": dict(zip(NAMES, (19.2, 55.1, 90.4, -21.5, 60.1, 3.921, 2.0, 19.0, 0.386), strict=True)),
    "mt-nlul-qkl": dict(zip(NAMES, (14.0, 31.4, 84.9, 12.2, 52.4, 3.977, 4.0, 17.5, 0.552), strict=True)),
    "adamw-npo-kl": dict(zip(NAMES, (2.1, 48.0, 71.3, 88.4, 58.8, 4.102, 41.0, 9.6, 0.927), strict=True)),
}
HOSTILE = '</textarea></style></svg><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'


def metric(name, value):
    spread = {"nll_general": 0.02, AUC: 0.07}.get(name, 3.1)
    least, most = {"privleak": (-100.0, 110.0), AUC: (0.0, 1.0)}.get(name, (0.0, 100.0))
    return {
        "value": value,
        "low": None if value is None else max(value - spread, least),
        "high": None if value is None else min(value + spread, most),
        "count": 100,
        "higher_is_better": None if name in ("privleak", AUC) else name in ("knowmem_r", "mmlu_val"),
    }


def items(values, rng):
    """Passages of which the first words are recited, the more the higher verbmem_f; answers that are right or not."""
    probes = []
    for article in ARTICLES:
        prompt, expected = article.split()[:12], article.split()[12:]
        share = min(1.0, max(0.0, (values.get("verbmem_f") or 0.0) / 100 + rng.uniform(-0.1, 0.1)))
        kept = round(share * len(expected))
        output = expected[:kept] + rng.choices(("the", "people", "said", "that", "a", "good", "day"), k=50)[kept:]
        texts = {"prompt": prompt, "expected": expected, "output": output[: len(expected)]}
        probes.append({name: " ".join(words) for name, words in texts.items()} | {"score": share})

    def answers(share):
        rows = []
        for question, answer in QUESTIONS.items():
            right = rng.random() < (share or 0.0) / 100
            prompt = f"Question: What is shown first?\nAnswer: an example\n\nQuestion: {question}\nAnswer: "
            output = answer if right else "nobody could say"
            rows.append({"prompt": prompt, "expected": answer, "output": output, "score": float(right)})
        return rows

    return {"verbmem_f": probes} | {name: answers(values.get(name)) for name in ("knowmem_f", "knowmem_r")}


def result(name, values, *, step=None, seed=0, **changes):
    return {
        "schema": "unteach.scores/1",
        "name": name,
        "model": f"micro:{name}",
        "step": step,
        "seed": seed,
        "benchmark": {"name": "micro", "counts": {"verbmem_f": 100}, "data_sha256": "6f1c" * 16},
        "metrics": {key: metric(key, value) for key, value in values.items()},
        "notes": [],
        "items": items(values, random.Random(repr((name, step, seed)))),
        "versions": {"unteach": "0.1.0", "torch": "2.13.0"},
        "model_sha256": f"{name}-{step}-{seed}" if step else f"sha-of-{name}",
        "created": "2026-11-15T03:00:00+00:00",
    } | changes


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def changed(path, **changes):
    """Change some values of a JSON file."""
    return write_json(path, json.loads(path.read_text()) | changes)


def make_run(folder, name="mt-nlul-kl", seed=0, *, steps=20, every=20, benchmark=None, drop=(), config=None):
    """A finished run of `name`: scores fall from the target's to `ENDS[name]` along a late, steep S-curve."""
    rng = random.Random(f"{name}{seed}")
    optimizer, loss, divergence = name.split("-")
    settings = {"name": name, "seed": seed, "model": "micro:target", "forget": {"loss": loss, "alpha": 0.2, "batch": 8}}
    settings |= {"divergence": divergence, "optimizer": optimizer, "damping": 0.2, "out": str(folder)}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | (config or {}), sort_keys=False), encoding="utf-8")

    def progress(step):
        return 1 / (1 + math.exp(-14 * (step / steps - 0.45 - 0.1 * rng.random())))

    rows = []
    for step in range(1, steps + 1):
        done = progress(step)
        growing = {"divergence": 4e-5 * math.exp(6 * done), "grad_norm": 0.2 * math.exp(3.4 * done)}
        noisy = {key: value * math.exp(rng.gauss(0, 0.2)) for key, value in growing.items()}
        rows.append({"step": step, "nll_forget": 0.45 + 3.6 * done + rng.gauss(0, 0.05 + 0.2 * done), **noisy})
    write_lines(folder / "metrics.jsonl", rows)
    changes = {"benchmark": benchmark} if benchmark else {}
    if "privleak" in drop:
        changes["notes"] = [f"privleak is not reported: no reference model was given; {AUC} is its raw value"]
    for step in range(0, steps + 1, every):
        values = dict(TARGET)
        for key in TARGET if step else ():
            done = progress(step) if step < steps else 1.0
            noise = rng.gauss(0, 0.004 if key in ("nll_general", AUC) else 0.7)
            values[key] = max(TARGET[key] + (ENDS[name][key] - TARGET[key]) * done + noise, -100.0)
        values["degenerate"] = max(values["degenerate"], 0.0)
        values = {key: value for key, value in values.items() if key not in drop}
        content = result(name if step else "target", values, step=step, seed=seed, **changes)
        write_json(folder / "evaluations" / f"step_{step:06d}.json", content)
    stop = {"rule": "verbmem_f <= 21.8", "reason": f"verbmem_f {values['verbmem_f']:.1f} <= 21.8", "step": steps}
    outcome = {"name": name, "seed": seed, "steps": steps, "seconds": 61.5, "stop": stop, "before": {}, "after": {}}
    counts = {"forget_documents": 80, "forget_tokens": 41_200, "general_tokens": 810_000}
    write_json(folder / "result.json", outcome | {"counts": counts})
    return folder


def make_references(file, **changes):
    """A scores file with the target and the retrained model."""
    both = {"target": TARGET, "retrained": RETRAINED}
    return write_json(file, {"results": [result(name, values, seed=None, **changes) for name, values in both.items()]})


def make_hostile(folder):
    """A run and a scores file with markup in every place that takes a text."""
    run = make_run(folder / "run", config={"note": HOSTILE, HOSTILE: 1})
    hostile = {"name": HOSTILE, "counts": {HOSTILE: 3}, "data_sha256": "6f1c" * 16}
    for file in sorted((run / "evaluations").iterdir()):
        content = json.loads(file.read_text())
        content["metrics"][f"auc_{HOSTILE}"] = {"value": 0.5}
        for item in content["items"]["verbmem_f"]:
            item |= {key: f"{HOSTILE} {item[key]} {HOSTILE}" for key in ("prompt", "expected", "output")}
        write_json(file, content | {"notes": [HOSTILE], "benchmark": hostile})
    stop = {"rule": HOSTILE, "reason": HOSTILE, "step": 20}
    changed(run / "result.json", name=f"$x_1$ {HOSTILE}", stop=stop)
    other = result(f"_{HOSTILE}\x00\ud800", ENDS["adamw-npo-kl"], benchmark=hostile)
    for item in other["items"]["verbmem_f"]:
        item |= {key: f"{HOSTILE} {item[key]} {HOSTILE}" for key in ("prompt", "expected")}
    return [run, write_json(folder / "scores.json", other)]


AUDITS = {
    "relearning": ("recites after a tenth of the documents", "percent", "steps", (0, 10, 40), False),
    "other_words": ("in other words", "percent", "form", ("from the middle", "names and numbers", "by request"), True),
    "membership": ("AUC", "auc", "score", ("ppl", "min_40", "ppl_zlib"), None),
    "inside": ("fact among the top 10", "percent", "layer", (1, 2, 3, 4), True),
}
"""Attacks: line, unit, axis, places, and whether the model held."""


def make_audits(run, **changes):
    """What `unteach audit` writes into a run folder."""
    for name, (line, unit, over, places, held) in AUDITS.items():
        most, spread = (1.0, 0.05) if unit == "auc" else (100.0, 4.0)
        levels = {"before": 0.95, "after": 0.15 if held else 0.6, "control": 0.12, "reference": 0.12}

        def row(place, value, line=line, unit=unit, spread=spread):
            bounds = {"low": max(0.0, value - spread), "high": value + spread, "count": 60}
            return {"line": line, "at": place, "value": value, "unit": unit} | bounds

        figures = {
            part: [row(place, most * level * (1 - 0.1 * order)) for order, place in enumerate(places)]
            for part, level in levels.items()
        }
        beyond = [row(place, most * (levels["after"] - 0.12)) | {"held": held} for place in places]
        content = {"schema": "unteach.audit/1", "attack": name, "title": name.replace("_", " "), "over": over}
        content |= {"protocol": f"How {name} is done.", "held": held, "note": f"note on {name}: 15.0 (reference 12.0)"}
        content |= {"compared_with": "reference", "beyond": beyond, **figures}
        write_json(run / "audits" / f"{name}.json", content | changes)
    write_json(run / "audits" / "summary.json", {"schema": "unteach.audit/1", "held": ["inside"]})
    return run
