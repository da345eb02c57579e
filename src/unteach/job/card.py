"""The model card (README.md) that lies beside an unlearned model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from unteach.evaluation.metrics import METRICS, MetricInfo
from unteach.evaluation.verdict import Finding, lines
from unteach.writing import format_number, in_words, markdown_table

__all__ = ["model_card"]

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LIMITS = (
    "The documents were unlearned, not proven absent: these weights descend from a model that was trained on them, and"
    " they are not those of a model retrained without them.",
    "The scores hold for the prompts and texts measured. Other wording, other languages or sampled output may still"
    " bring something back, and so may further training on related text or storing the weights with fewer bits.",
    "What the model knows from elsewhere (other documents, quotations, common knowledge) is not removed, even where the"
    " forget documents say the same.",
    "Unlearning is no access control and no legal statement; keep the original model's licence and terms in mind.",
)


def model_card(
    *,
    base_model: str,
    method: Mapping[str, Any],
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
    scores: Mapping[str, Mapping[str, float | None]],
    verdict: Sequence[Finding] = (),
    forgotten: bool = True,
    notes: Sequence[str] = (),
    licence: str | None = None,
    command: str | None = None,
) -> str:
    """Write the card from plain values.

    Args:
        base_model: What was unlearned: a hub id, a folder or `micro:NAME`.
        method: What was done: optimizer, loss, divergence, and anything else worth a line.
        settings: All settings of the run, as they would stand in a YAML file.
        data: Per source (`forget`, `general`, ...) its counts as a mapping, or a line of text.
        scores: Per column (`before`, `after`, perhaps `reference`) the metrics by name; None where not measured.
        verdict: What the scores say, see ``evaluation.verdict``.
        forgotten: Whether the run met its stop rule; a card of one that did not says so in its title.
        notes: What a user must know about this run besides, for instance how the weights were rounded.
        licence: The licence's name as the hub spells it, where it is known.
        command: The command that made the model.

    Returns:
        Markdown with the hub's front matter.
    """
    parts = [str(method[part]) for part in ("name", "optimizer", "loss", "divergence") if method.get(part)]
    named = in_words(parts) or ", ".join(parts)
    sections = [
        _front_matter(base_model, licence),
        f"# {_name_only(base_model)} with {_documents(data)} unlearned"
        + ("" if forgotten else ": not enough, the run ended without meeting its rule"),
        f"This model was made from `{base_model}` with unteach{f' ({named})' if named else ''}. The aim was"
        " that it no longer recites or knows chosen documents and otherwise stays as it was; the scores show how far"
        " that was reached.",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this folder, or its id on the hub\n'
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```",
        *(["## Verdict\n\n" + _verdict(verdict)] if verdict else []),
        "## Scores\n\n" + _score_table(scores),
        "## Method\n\n" + _table(("what", "value"), [(name, _shown(value)) for name, value in _flat(method)]),
        "## Data\n\n" + _table(("source", "counts"), [(name, _counts(value)) for name, value in data.items()]),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in [*_unmeasured(scores), *notes, *_LIMITS]),
        "## Settings\n\n```yaml\n" + yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True) + "```",
    ]
    if command:
        sections.append(f"## How it was made\n\n```\n{command}\n```")
    return "\n\n".join(sections) + "\n"


def _front_matter(base_model: str, licence: str | None) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    if _HUB_ID.fullmatch(base_model) and not Path(base_model).exists():
        lines += [f"base_model: {base_model}", "base_model_relation: finetune"]
    if licence:
        lines.append(f"license: {json.dumps(licence)}")
    lines.append("tags: [machine-unlearning, unteach]")
    return "---\n" + "\n".join(lines) + "\n---"


def _name_only(base_model: str) -> str:
    return re.split(r"[/\\:]", base_model.rstrip("/\\"))[-1] or base_model


def _documents(data: Mapping[str, Any]) -> str:
    """What was unlearned, in words: `12 documents`."""
    counts = data.get("forget")
    count = counts.get("documents") if isinstance(counts, Mapping) else None
    return "chosen documents" if count is None else "1 document" if count == 1 else f"{count:,} documents"


def _verdict(findings: Sequence[Finding]) -> str:
    """A line for each of the four questions, and for the parts of the last."""
    return "\n".join(f"{'  ' if line.startswith(' ') else ''}- {line.strip()}" for line in lines(findings))


def _score_table(scores: Mapping[str, Mapping[str, float | None]]) -> str:
    """A row per metric, known ones first and in the report's order, a column per model."""
    names = list(dict.fromkeys(name for column in scores.values() for name in column))
    order = [*METRICS]
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    rows = []
    for name in names:
        info = METRICS.get(name, MetricInfo(decimals=3))
        values = (format_number(column.get(name), info.decimals) for column in scores.values())
        rows.append((f"`{name}`", f"{info.title} {info.arrow}".strip(), *values))
    if not rows:
        return "Nothing was measured."
    legend = [f"- `{name}`: {METRICS[name].explanation}" for name in names if name in METRICS]
    return _table(("metric", "meaning", *scores), rows) + ("\n\n" + "\n".join(legend) if legend else "")


def _unmeasured(scores: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """What the scores cannot say, in words."""
    lines = []
    measured = {name for column in scores.values() for name, value in column.items() if value is not None}
    absent = [
        f"`{name}` ({METRICS[name].title})"
        for name in ("verbmem_f", "knowmem_f", "knowmem_r", "nll_general")
        if name not in measured
    ]
    if absent:
        lines.append(f"Not measured here: {', '.join(absent)}.")
    if not {"reference", "retrained"} & set(scores):
        lines.append(
            "No model trained without the documents was there to compare with: how such a model would score is not"
            " known, and `privleak` needs one."
        )
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value))
    return rows


def _counts(value: Any) -> str:
    if not isinstance(value, Mapping):
        return _shown(value)
    return ", ".join(f"{_shown(count)} {name.replace('_', ' ')}" for name, count in value.items())


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(entry) for entry in value) or "–"
    return str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars and line breaks inside a cell are made harmless."""
    plain = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return markdown_table(header, plain) if rows else "–"
