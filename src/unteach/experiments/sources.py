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

import yaml

from unteach.config import ForgetConfig, Method, checked
from unteach.corpora import Benchmark
from unteach.data import EMBEDDED_GENERAL, GENERAL_BYTES, read_documents
from unteach.errors import InputError
from unteach.experiments.presets import METHODS, MICRO_SETTINGS, methods_of_the_paper
from unteach.experiments.setups import Setup

if TYPE_CHECKING:
    from unteach.experiments.reproduce import ReproduceOptions

__all__ = ["BENCHMARKS", "build", "instructions", "read_benchmark"]

BENCHMARKS = ("micro", "muse-news", "muse-books", "tofu")
SETTINGS = ("config", "methods", "losses", "recovery")
"""Parts of a settings file."""
HELDOUT, PROBES, FOLDS = 64, 100, 4
"""General texts set aside to measure on, verbatim probes, and sequential requests."""
MICRO_STEPS = 120
"""Longest run on the embedded benchmark: what has not been forgotten by then is not forgotten in 200 steps either."""


def build(options: ReproduceOptions, work: Path, say: Callable[[str], None]) -> Setup:
    """The setup of a benchmark.

    Args:
        options: Of the command.
        work: A temporary folder for texts; they are never written to the results.
        say: Gets the lines for people.

    Raises:
        InputError: With what is missing.
    """
    given = _read_settings(options.settings)
    problems = []
    if options.benchmark not in BENCHMARKS:
        problems.append(f"benchmark is {options.benchmark!r}: it must be one of {', '.join(BENCHMARKS)}")
    elif options.benchmark != "micro" and not options.model:
        problems.append(f"model is missing: name the model that has learned the {options.benchmark} documents")
    if options.limit is not None and options.limit < 1:
        problems.append(f"limit is {options.limit}: it must be at least 1")
    if problems:
        raise InputError(problems)
    if options.benchmark == "micro":
        return _micro(options, given, work, say)
    return _tables(options, given, work, say)


def _read_settings(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"settings is {str(path)!r}: it cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not set(content) <= set(SETTINGS):
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
    for name, fields in given.items():
        start = dataclasses.asdict(methods[name]) if name in methods else {}
        methods[name] = checked(Method, start | fields, f"methods.{name}.", problems)
    if problems:
        raise InputError(problems)
    return methods


def _config(start: dict[str, Any], given: Mapping[str, Any]) -> ForgetConfig:
    problems: list[str] = []
    config = checked(ForgetConfig, start | dict(given), "config.", problems)
    if problems:
        raise InputError(problems)
    return config


def _micro(options: ReproduceOptions, given: dict[str, Any], work: Path, say: Callable[[str], None]) -> Setup:
    from unteach.corpora import micro
    from unteach.models import find_folder

    model = options.model or "micro:target"
    final, questions = micro.load_benchmark("measure"), None
    if options.limit:  # by its folder the forget job does not know the model, and measures a few passages of its own
        model, final = str(find_folder(model)), final.first(options.limit)
        questions = _write_questions(work, final)
    start = {
        "model": model,
        "documents": "micro:forget",
        "reference": options.reference or "micro:retrained",
        "device": options.device,
        **MICRO_SETTINGS,
        "max_steps": MICRO_STEPS,
    }
    return Setup(
        benchmark="micro",
        config=_config(start, given.get("config", {})),
        methods=_methods(METHODS, given.get("methods", {})),
        final=final,
        folds=tuple(f"micro:forget_{number}" for number in range(1, FOLDS + 1)),
        retain="micro:retain",
        instruct=tuple(micro.documents("instruct")),
        incompetent=options.incompetent or "micro:small",
        questions=questions,
        settings=given,
        say=say,
    )


def _tables(options: ReproduceOptions, given: dict[str, Any], work: Path, say: Callable[[str], None]) -> Setup:
    """MUSE or TOFU: texts to files, probes cut where the forget job cuts its chunks."""
    from unteach.corpora.catalog import add_multiple_choice
    from unteach.corpora.own import cut_probes
    from unteach.models import load_tokenizer, read_context_length

    tokenizer = load_tokenizer(options.model)
    documents, retain, questions, tables = read_benchmark(options, work)
    general = read_documents(options.general or EMBEDDED_GENERAL, max_bytes=GENERAL_BYTES, option="general")
    general, heldout = general.set_aside(min(HELDOUT, len(general) // 4), 0)
    holdout = tables.membership_holdout
    start = {
        "model": options.model,
        "documents": _write(work / "documents.jsonl", documents),
        "general": _write(work / "general.jsonl", general.texts),
        "holdout": _write(work / "holdout.jsonl", holdout) if holdout else None,
        "reference": options.reference or None,
        "device": options.device,
    }
    config = _config(start, given.get("config", {}))
    chunk, _ = config.lengths(read_context_length(options.model))
    sizes: dict[str, int] = {"count": PROBES, "chunk_tokens": chunk}
    if options.benchmark == "tofu":  # a question and its answer are short: the question is the prompt
        sizes |= {"prompt_tokens": 24, "expected_tokens": 40}
    final = dataclasses.replace(
        tables,
        verbatim_forget=cut_probes(documents, tokenizer, **sizes),  # type: ignore[arg-type]
        verbatim_holdout=cut_probes(holdout, tokenizer, **sizes) if holdout else (),  # type: ignore[arg-type]
        general_texts=tuple(heldout.texts),
        notes=(*tables.notes, "verbmem_f: probes begin where the training chunks begin"),
    )
    if options.mmlu is not None:
        final = add_multiple_choice(final, options.mmlu)
    own_probes = tables.verbatim_forget
    if options.limit:
        final, own_probes = final.first(options.limit), own_probes[: options.limit]
    quarter = -(-len(documents) // FOLDS)
    return Setup(
        benchmark=options.benchmark,
        config=config,
        methods=_methods(methods_of_the_paper(), given.get("methods", {})),
        final=final,
        folds=tuple(
            _write(work / f"fold_{n + 1}.jsonl", documents[n * quarter : (n + 1) * quarter]) for n in range(FOLDS)
        ),
        retain=_write(work / "retain.jsonl", retain) if retain else None,
        instruct=instructions(options.instruct) if options.instruct else None,
        incompetent=options.incompetent or None,
        questions=questions,
        table_probes=own_probes,
        settings=given,
        say=say,
    )


Read = tuple[list[str], list[str], str | None, Benchmark]
"""Documents, retained documents, a file of questions, and the benchmark."""


def read_benchmark(options: ReproduceOptions, work: Path) -> Read:
    """The texts of MUSE or TOFU; a question of TOFU and its answer are one document.

    Args:
        options: ``benchmark`` and ``data`` are used.
        work: Folder for the file of questions.
    """
    return (_tofu if options.benchmark == "tofu" else _muse)(options, work)


def _muse(options: ReproduceOptions, work: Path) -> Read:
    from unteach.corpora.muse import load_muse, muse_documents
    from unteach.corpora.rows import find_table

    name, data = options.benchmark, options.data
    tables = load_muse(name, data)
    retained = "retain1" if data is None or find_table(data, "raw/retain1") else "retain_standin"
    has_retain = data is None or find_table(data, f"raw/{retained}")
    retain = muse_documents(name, data, split=retained, deduplicate=True) if has_retain else []
    return muse_documents(name, data, deduplicate=True), retain, _write_questions(work, tables), tables


def _tofu(options: ReproduceOptions, work: Path) -> Read:
    from unteach.corpora.tofu import SPLITS, load_tofu, tofu_pairs

    split = "forget10"
    tables = load_tofu(split, options.data)
    parts = [
        [
            f"{tables.settings.tofu_prompt.format(question=pair.question)} {pair.answer}"
            for pair in tofu_pairs(part, options.data)
        ]
        for part in (split, SPLITS[split])
    ]
    asked = dataclasses.replace(tables, knowledge_forget=tofu_pairs(split, options.data))
    return parts[0], parts[1], _write_questions(work, asked), tables


def _write_questions(work: Path, tables: Benchmark) -> str | None:
    rows = [{"question": q.question, "answer": q.answer} for q in tables.knowledge_forget]
    path = work / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path) if rows else None


def _write(path: Path, texts: Sequence[str]) -> str:
    from unteach.experiments.smollm2 import write_texts

    write_texts(path, texts)
    return str(path)


def instructions(path: Path) -> tuple[str, ...]:
    """Instructions with responses as texts, from a file with the columns ``instruction``, ``input`` and ``output``."""
    from unteach.corpora.rows import check_columns, read_rows

    rows = read_rows(path)
    check_columns(rows, ("instruction", "output"), str(path))
    return tuple(
        f"Instruction: {row['instruction']}\n"
        + (f"Input: {row['input']}\n" if row.get("input") else "")
        + f"Response: {row['output']}"
        for row in rows
    )
