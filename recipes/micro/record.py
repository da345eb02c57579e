"""Write down what the shipped models are and score: `python -m recipes.micro.record`.

Measures the models on the CPU with the evaluation suite, writes `models/recorded.json` and prints the table of
docs/micro.md, and those of recipes/README.md for models with longer names. To be run once after the weights have
changed; half a minute for a model on one core. With a family of models, which is what their names begin with, the
others are not measured, and what is recorded of them stays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
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


def prefix_of(name: str) -> str:
    """Return what the names of a model and of those made with it begin with: `more_` for `more_target`, or nothing."""
    return name.removesuffix(name.rpartition("_")[2])


def families(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of models by what they begin with."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(prefix_of(name), []).append(name)
    return found


def measured(names: Sequence[str] = MODELS) -> dict[str, Any]:
    """Return hashes of the files of models and their scores, measured now on the CPU.

    PrivLeak compares with the retrained model of the same family, which therefore has none itself.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from unteach.evaluation.scores import library_versions

    from .score import score, with_other_examples

    bench = load_benchmark()
    references: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for name in sorted(names, key=lambda model: model != f"{prefix_of(model)}retrained"):  # the references first
        folder = model_folder(name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        scores = score(model, tokenizer, bench, reference=references.get(prefix_of(name)))
        references.setdefault(prefix_of(name), scores)
        models[name] = {
            "sha256": {path.name: sha256(path) for path in sorted(folder.iterdir())},
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "metrics": {metric: values.to_dict() for metric, values in scores.metrics.items()},
            "with_other_examples": with_other_examples(model, tokenizer, bench),
        }
    return {
        "data_sha256": bench.data_sha256,
        "versions": library_versions(),
        "models": {name: models[name] for name in names},
    }


def joined(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier record with models measured since, each with the versions it was measured with."""
    if before["data_sha256"] != new["data_sha256"]:
        raise ValueError("the benchmark has changed since the record was written: measure all models")
    added = {name: model | {"versions": new["versions"]} for name, model in new["models"].items()}
    models = before["models"] | added
    return before | {"models": {name: models[name] for name in MODELS if name in models}}


def tables(record: dict[str, Any]) -> list[str]:
    """Return the recorded scores as Markdown tables, one for each family of models."""
    return [table({name: record["models"][name] for name in names}) for names in families(record["models"]).values()]


def table(models: dict[str, Any]) -> str:
    """Return the records of models as a Markdown table: percent, `nll_general` in nats per token."""
    lines = ["| | " + " | ".join(models) + " |", "|---|" + "--:|" * len(models)]
    cells = [f"{model['parameters'] / 1e6:.2f} M" for model in models.values()]
    lines.append("| parameters | " + " | ".join(cells) + " |")
    for column in COLUMNS:
        values = [model["metrics"].get(column) for model in models.values()]
        digits = 3 if column == "nll_general" else 1
        cells = ["-" if value is None else f"{value['value']:.{digits}f}" for value in values]
        lines.append(f"| `{column}` | " + " | ".join(cells) + " |")
    for metric in ("knowmem_f", "knowmem_r"):
        spread = [model["with_other_examples"][metric] for model in models.values()]
        cells = [f"{min(values):.1f} to {max(values):.1f}" for values in spread]
        lines.append(f"| `{metric}`, other examples | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write and print."""
    from transformers.utils.logging import disable_progress_bar

    from unteach.evaluation.scores import write_json

    parser = argparse.ArgumentParser(prog="python -m recipes.micro.record", description=(__doc__ or "").split("\n")[0])
    known = families(MODELS)
    parser.add_argument("family", nargs="?", choices=[*known], help="what names begin with; without: all models")
    family = parser.parse_args(arguments).family
    disable_progress_bar()
    record = measured() if family is None else joined(read(), measured(known[family]))
    write_json(PATH, record)
    print("\n\n".join(tables(record)))


if __name__ == "__main__":
    main()
