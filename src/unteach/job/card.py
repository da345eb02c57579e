"""The model card (README.md) that lies beside an unlearned model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from unteach.evaluation.metrics import METRICS, MetricInfo
from unteach.evaluation.verdict import Finding, lines
from unteach.writing import format_number, in_words, markdown_table

__all__ = ["model_card", "with_audits"]

Columns = Mapping[str, Mapping[str, float | None]]
_LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its id on the hub
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```"""
_LOADING_ADAPTER = """```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

folder = "."  # this folder, or its id on the hub; adapter_config.json names the model that the adapter belongs to
model = AutoPeftModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```"""
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
    settings: Mapping[str, Any],
    data: Mapping[str, Mapping[str, int]],
    scores: Columns,
    verdict: Sequence[Finding] = (),
    forgotten: bool = True,
    notes: Sequence[str] = (),
) -> str:
    """The card from plain values: Markdown with the hub's front matter.

    Args:
        base_model: What was unlearned: a hub id, a folder or `micro:NAME`.
        settings: All settings of the run, as they would stand in a YAML file, the ``method`` among them.
        data: Counts of each source (`forget`, `general`, ...).
        scores: Per column (`before`, `after`, perhaps `reference`) the metrics by name; None where not measured.
        verdict: What the scores say, see ``evaluation.verdict``.
        forgotten: Whether the run met its stop rule; a card of one that did not says so in its title.
        notes: What a user must know about this run besides, for instance how the weights were rounded.
    """
    method = settings.get("method", {})
    parts = [str(method[part]) for part in ("optimizer", "loss", "divergence") if method.get(part)]
    named = in_words(parts) or ", ".join(parts)
    adapter, bits = settings.get("save") == "adapter", settings.get("base_bits")
    front = f"---\nlibrary_name: {'peft' if adapter else 'transformers'}\npipeline_tag: text-generation\n"
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", base_model) and not Path(base_model).exists():
        front += f"base_model: {base_model}\nbase_model_relation: {'adapter' if adapter else 'finetune'}\n"
    name = re.split(r"[/\\:]", base_model.rstrip("/\\"))[-1] or base_model
    count = data.get("forget", {}).get("documents")
    documents = "chosen documents" if count is None else "1 document" if count == 1 else f"{count:,} documents"
    sources = [
        (source, ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items()))
        for source, counts in data.items()
    ]
    sections = [
        front + "tags: [machine-unlearning, unteach]\n---",
        f"# {name} with {documents} unlearned"
        + ("" if forgotten else ": not enough by its own rule")
        + (f" ({', '.join(wrong)})" if (wrong := [found.title for found in verdict if found.answer is False]) else ""),
        f"This model was made from `{base_model}` with unteach{f' ({named})' if named else ''}. The aim was"
        " that it no longer recites or knows chosen documents and otherwise stays as it was; the scores show how far"
        " that was reached.",
        _LOADING_ADAPTER if adapter else _LOADING,
    ]
    if verdict:  # a line for each of the four questions, and for the parts of the last
        answers = [f"{'  ' if line.startswith(' ') else ''}- {line.strip()}" for line in lines(verdict)]
        sections.append("## Verdict\n\n" + "\n".join(answers))
    if adapter and bits in (4, 8):
        rounded = f"The scores are those of the adapter on a base rounded to {bits} bits: on the base as it is, measure"
        notes = [f"{rounded} again (`unteach evaluate`).", *notes]
    sections += [
        "## Scores\n\n" + _score_table(scores),
        "## Data\n\n" + (markdown_table(("source", "counts"), sources) if sources else "–"),
        "## Limits\n\n"
        + "\n".join(f"- {line}" for line in [*_unmeasured(scores, settings.get("base")), *notes, *_LIMITS]),
        "## Settings\n\n```yaml\n" + yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True) + "```",
    ]
    return "\n\n".join(sections) + "\n"


def with_audits(card: str, results: Sequence[str]) -> str:
    """A card with the results of audits, a line each, before its scores; those that stood there go."""
    title = "## Does it hold?"
    card = re.sub(rf"{re.escape(title)}\n.*?(?=^## )", "", card, flags=re.MULTILINE | re.DOTALL)
    listed = "\n".join(f"- {line}" for line in results)
    said = f"{title}\n\nAttacks on the model, against models or documents that cannot know (`unteach audit`):\n\n"
    front, scores, rest = card.partition("## Scores\n")
    return f"{front}{said}{listed}\n\n{scores}{rest}"


def _score_table(scores: Columns) -> str:
    """A row per metric, known ones first and in the report's order, a column per model."""
    measured = dict.fromkeys(name for column in scores.values() for name in column)
    names = [*(name for name in METRICS if name in measured), *(name for name in measured if name not in METRICS)]
    rows = []
    for name in names:
        info = METRICS.get(name, MetricInfo(decimals=3))
        values = (format_number(column.get(name), info.decimals) for column in scores.values())
        rows.append((f"`{name}`", f"{info.title} {info.arrow}".strip(), *values))
    if not rows:
        return "Nothing was measured."
    legend = [f"- `{name}`: {METRICS[name].explanation}" for name in names if name in METRICS]
    return markdown_table(("metric", "meaning", *scores), rows) + ("\n\n" + "\n".join(legend) if legend else "")


def _unmeasured(scores: Columns, base: str | None = None) -> list[str]:
    """What the scores cannot say, in words; ``base`` names a model from before the documents, where there was one."""
    said = []
    measured = {name for column in scores.values() for name, value in column.items() if value is not None}
    wanted = [name for name in ("verbmem_f", "knowmem_f", "knowmem_r", "nll_general") if name not in measured]
    if wanted:
        said.append(f"Not measured here: {', '.join(f'`{name}` ({METRICS[name].title})' for name in wanted)}.")
    if not {"reference", "retrained"} & set(scores):
        retrained = "how such a model would score is not known, and `privleak` needs one."
        if base:
            said.append(
                f"Of the models that never saw the documents only `{base}`, from before they were learned, was"
                f" there to compare with, and no retrained one: {retrained}"
            )
        else:
            said.append(f"No model trained without the documents was there to compare with: {retrained}")
    return said
