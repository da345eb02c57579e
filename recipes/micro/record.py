"""Write down what the shipped models are and score: `python -m recipes.micro.record`.

Measures all four models on the CPU with the evaluation suite, writes `models/recorded.json` and prints the table of
docs/micro.md. To be run once after the weights have changed; a few minutes on one core.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from unteach.corpora.micro import FOLDER, MODELS, load_benchmark, model_folder

PATH = FOLDER / "models" / "recorded.json"
COLUMNS = (
    "verbmem_f", "verbmem_r", "verbmem_holdout", "knowmem_f", "knowmem_r", "knowmem_unasked", "knowmem_pretraining",
    "privleak", "mmlu_val", "nll_general", "degenerate",
)  # fmt: skip


def read() -> dict[str, Any]:
    """Return what was recorded."""
    content: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return content


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def measured() -> dict[str, Any]:
    """Return hashes of all model files and the scores of all models, measured now on the CPU.

    PrivLeak compares with the retrained model, which therefore has none itself.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from unteach.evaluation.scores import library_versions

    from .score import score, with_other_examples

    bench = load_benchmark()
    reference = None
    models: dict[str, Any] = {}
    for name in sorted(MODELS, key=lambda model: model != "retrained"):  # the reference first
        folder = model_folder(name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        scores = score(model, tokenizer, bench, reference=reference)
        reference = reference or scores
        models[name] = {
            "sha256": {path.name: sha256(path) for path in sorted(folder.iterdir())},
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "metrics": {metric: values.to_dict() for metric, values in scores.metrics.items()},
            "with_other_examples": with_other_examples(model, tokenizer, bench),
        }
    return {
        "data_sha256": bench.data_sha256,
        "versions": library_versions(),
        "models": {name: models[name] for name in MODELS},
    }


def table(record: dict[str, Any]) -> str:
    """Return the recorded scores as a Markdown table: percent, `nll_general` in nats per token."""
    lines = ["| | " + " | ".join(record["models"]) + " |", "|---|" + "--:|" * len(record["models"])]
    cells = [f"{model['parameters'] / 1e6:.2f} M" for model in record["models"].values()]
    lines.append("| parameters | " + " | ".join(cells) + " |")
    for column in COLUMNS:
        values = [model["metrics"].get(column) for model in record["models"].values()]
        digits = 3 if column == "nll_general" else 1
        cells = ["-" if value is None else f"{value['value']:.{digits}f}" for value in values]
        lines.append(f"| `{column}` | " + " | ".join(cells) + " |")
    for metric in ("knowmem_f", "knowmem_r"):
        spread = [model["with_other_examples"][metric] for model in record["models"].values()]
        cells = [f"{min(values):.1f} to {max(values):.1f}" for values in spread]
        lines.append(f"| `{metric}`, other examples | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write and print."""
    from transformers.utils.logging import disable_progress_bar

    from unteach.evaluation.scores import write_json

    disable_progress_bar()
    record = measured()
    write_json(PATH, record)
    print(table(record))


if __name__ == "__main__":
    main()
