"""Where an experiment's models and texts come from.

The embedded benchmark needs nothing. For the others the models are given by flags, and the texts come from a folder
with the benchmark's tables or from the Hugging Face hub; what the forget job reads is written to a temporary folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unteach.config import ForgetConfig, Method
from unteach.corpora import Question, micro
from unteach.corpora.catalog import UNLEARNED, add_multiple_choice, named_benchmark
from unteach.corpora.own import cut_probes
from unteach.data import EMBEDDED_GENERAL, GENERAL_BYTES, read_documents
from unteach.data.records import read_rows, write_texts
from unteach.errors import InputError
from unteach.experiments import METHODS, MICRO_SETTINGS, methods_of_the_paper
from unteach.experiments.setups import Setup
from unteach.models import find_folder, load_tokenizer, read_context_length
from unteach.settings import checked, from_values, read_settings

if TYPE_CHECKING:
    from unteach.experiments.reproduce import ReproduceOptions

__all__ = ["build", "instructions"]

SETTINGS = ("config", "methods", "losses", "recovery", "relearning", "deep", "field", "audits", "trajectories")
"""Parts of a settings file."""
HELDOUT, PROBES, FOLDS = 64, 100, 4
"""General texts set aside to measure on, verbatim probes, and sequential requests."""
MICRO_STEPS = 120
"""Longest run on the embedded benchmark: what has not been forgotten by then is not forgotten in 200 steps either."""


def build(options: ReproduceOptions, work: Path, say: Callable[[str], None]) -> Setup:
    """The setup of a benchmark; texts are written to the temporary folder ``work``, never to the results."""
    given = _read_settings(options.settings)
    problems = []
    if options.benchmark not in UNLEARNED:
        problems.append(f"benchmark is {options.benchmark!r}: it must be one of {', '.join(UNLEARNED)}")
    elif options.benchmark != "micro" and not options.model:
        problems.append(f"model is missing: name the model that has learned the {options.benchmark} documents")
    if options.limit is not None and options.limit < 1:
        problems.append(f"limit is {options.limit}: it must be at least 1")
    if problems:
        raise InputError(problems)
    shared: dict[str, Any] = {
        "benchmark": options.benchmark,
        "limit": options.limit,
        "settings": given,
        "say": say,
        "runs": options.runs,
    }
    return Setup(**shared, **(_micro if options.benchmark == "micro" else _tables)(options, given, work))


def _read_settings(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    content = read_settings(path, "settings")
    if not set(content) <= set(SETTINGS):
        raise InputError(f"settings is {str(path)!r}: it must hold no other parts than {', '.join(SETTINGS)}")
    parts = content | {f"methods.{name}": fields for name, fields in (content.get("methods") or {}).items()}
    wrong = [name for name, part in parts.items() if not isinstance(part, dict)]
    if wrong:
        raise InputError([f"settings is {str(path)!r}: {name} must hold settings of its own" for name in wrong])
    return content


def _methods(known: Mapping[str, Method], given: Mapping[str, Any]) -> dict[str, Method]:
    """The methods by name, with the fields that the settings file changes or the methods it adds."""
    methods = dict(known)
    problems: list[str] = []
    for name, fields in given.get("methods", {}).items():
        start = dataclasses.asdict(methods[name]) if name in methods else {}
        methods[name] = checked(Method, start | fields, f"methods.{name}.", problems)
    if problems:
        raise InputError(problems)
    return methods


def _micro(options: ReproduceOptions, given: dict[str, Any], work: Path) -> dict[str, Any]:
    """The fields of a setup for the embedded benchmark."""
    model = options.model or MICRO_SETTINGS["model"]
    final, questions, keep_questions = micro.load_benchmark("measure"), None, None
    if options.limit:  # by its folder the forget job does not know the model, and measures a few passages of its own
        model, final = str(find_folder(model)), final.first(options.limit)
        questions = _write_questions(work / "questions.jsonl", final.knowledge_forget)
        keep_questions = _write_questions(work / "keep_questions.jsonl", final.knowledge_retain)
    kept = [text for story in micro.stories("retain")[::2] for text in story.documents]
    others = [text for kind, text in micro.mixed_documents("general_mixed") if kind == "news"]
    start = MICRO_SETTINGS | {"model": model, "device": options.device, "max_steps": MICRO_STEPS}
    start |= {"reference": options.reference} if options.reference else {}
    return {
        "config": from_values(ForgetConfig, start | given.get("config", {}), "config."),
        "methods": _methods(METHODS, given),
        "final": final,
        "folds": tuple(f"micro:{fold}" for fold in micro.FOLDS),
        "retain": "micro:retain",
        "instruct": tuple(micro.documents("instruct")),
        "incompetent": options.base or "micro:small",
        "base": options.base or "micro:base",
        "keep": options.keep or "micro:retain",
        "keep_half": write_texts(work / "keep_half.jsonl", kept),
        "keep_others": write_texts(work / "keep_others.jsonl", others),
        "holdout": "micro:holdout",
        "alternates": "micro:alternates",
        "questions": questions,
        "keep_questions": keep_questions,
    }


def _tables(options: ReproduceOptions, given: dict[str, Any], work: Path) -> dict[str, Any]:
    """The same for a benchmark of the catalog: texts to files, probes cut where the forget job cuts its chunks."""

    def written(name: str, texts: Sequence[str]) -> str | None:
        return write_texts(work / f"{name}.jsonl", texts) if texts else None

    tokenizer = load_tokenizer(options.model)
    entry = named_benchmark(options.benchmark)
    assert entry.documents is not None
    tables, documents = entry.load(options.data), entry.documents(options.data)
    retain = written("retain", entry.retain(options.data) if entry.retain else [])
    asked = entry.questions(options.data) if entry.questions else tables.knowledge_forget
    general = read_documents(options.general or EMBEDDED_GENERAL, max_bytes=GENERAL_BYTES, option="general")
    general, heldout = general.set_aside(min(HELDOUT, len(general) // 4), 0)
    start = {
        "model": options.model,
        "documents": written("documents", documents),
        "general": written("general", general.texts),
        "holdout": written("holdout", tables.membership_holdout),
        "reference": options.reference or None,
        "device": options.device,
    }
    config = from_values(ForgetConfig, start | given.get("config", {}), "config.")
    chunk, _ = config.lengths(read_context_length(options.model))
    prompt, expected = entry.probe_tokens
    sizes = {"count": PROBES, "chunk_tokens": chunk, "prompt_tokens": prompt, "expected_tokens": expected}
    holdout = tables.membership_holdout
    final = dataclasses.replace(
        tables,
        verbatim_forget=cut_probes(documents, tokenizer, **sizes),
        verbatim_holdout=cut_probes(holdout, tokenizer, **sizes) if holdout else (),
        general_texts=tuple(heldout.texts),
        notes=(*tables.notes, "verbmem_f: probes begin where the training chunks begin"),
    )
    if options.mmlu is not None:
        final = add_multiple_choice(final, options.mmlu)
    quarter = -(-len(documents) // FOLDS)
    return {
        "config": config,
        "methods": _methods(methods_of_the_paper(), given),
        "final": final.first(options.limit) if options.limit else final,
        "folds": tuple(
            write_texts(work / f"fold_{n + 1}.jsonl", documents[n * quarter : (n + 1) * quarter]) for n in range(FOLDS)
        ),
        "retain": retain,
        "instruct": instructions(options.instruct) if options.instruct else None,
        "incompetent": options.base or None,
        "base": options.base or None,
        "keep": options.keep or retain,
        "holdout": config.holdout,
        "questions": _write_questions(work / "questions.jsonl", asked),
        "keep_questions": _write_questions(work / "keep_questions.jsonl", tables.knowledge_retain),
        "table_probes": tables.verbatim_forget[: options.limit],
    }


def _write_questions(path: Path, questions: Sequence[Question]) -> str | None:
    rows = [{"question": item.question, "answer": item.answer} for item in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path) if rows else None


def instructions(path: Path) -> tuple[str, ...]:
    """Instructions with responses as texts, from a file with the columns ``instruction``, ``input`` and ``output``."""
    rows = read_rows(path, ("instruction", "output"))
    return tuple(
        f"Instruction: {row['instruction']}\n"
        + (f"Input: {row['input']}\n" if row.get("input") else "")
        + f"Response: {row['output']}"
        for row in rows
    )
