"""What an experiment runs on: the models, texts, methods and measurements of a benchmark, behind one interface.

The embedded benchmark needs nothing. For the others the models are given by flags, and the texts come from a folder
with the benchmark's tables or from the Hugging Face hub; what the forget job reads is written to a temporary folder.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from unteach.config import ForgetConfig, Method, Stop, checked
from unteach.corpora import Benchmark, Probe
from unteach.data import EMBEDDED_GENERAL, GENERAL_BYTES, read_documents
from unteach.errors import InputError
from unteach.experiments.cells import thinned
from unteach.experiments.demo import METHODS as MICRO_METHODS

if TYPE_CHECKING:
    from unteach.evaluation.scores import Scores
    from unteach.experiments.reproduce import ReproduceOptions
    from unteach.job import ForgetResult

__all__ = ["BENCHMARKS", "NEVER", "Setup", "build", "instructions", "read_benchmark", "star_stop"]

BENCHMARKS = ("micro", "muse-news", "muse-books", "tofu")
NEVER = "verbmem_f <= -1"
"""A stop rule that is never met: the run takes all its steps."""
EXPERIMENTS_WITH_SETTINGS = ("losses", "recovery", "sequential")
HELDOUT = 64
"""General texts set aside to measure on."""
PROBES, FOLDS, EXAMPLES = 100, 4, 2
_PAPER_LR = {"npo": 1e-5}
"""AdamW's learning rates in the authors' runs; 1e-6 for the other losses."""
_INPUTS = ("model", "documents", "general", "holdout", "reference", "questions", "incompetent")
_WITHOUT_EFFECT = ("out", "device", "track", "micro_batch", "checkpoint_every", "keep_checkpoints", "save_dtype")


@dataclass
class Setup:
    """A benchmark ready to run on."""

    benchmark: str
    config: ForgetConfig
    """What all cells share; method, seed and the like are replaced."""
    methods: dict[str, Method]
    final: Benchmark
    """What every model is measured on."""
    folds: tuple[str, ...]
    """Disjoint parts of the documents, as sources."""
    retain: str | None
    """Documents to be kept, as a source."""
    instruct: tuple[str, ...] | None
    """Instructions with responses."""
    incompetent: str | None = None
    questions: str | None = None
    table_probes: tuple[Probe, ...] = ()
    """The benchmark's own verbatim probes, where ``final`` has others."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of single experiments, by their names."""
    say: Callable[[str], None] = print
    _shared: dict[Any, dict[str, Any]] = field(default_factory=dict)
    _hashes: dict[tuple[str, str], str] = field(default_factory=dict)
    _reference: Any = None

    @property
    def embedded(self) -> bool:
        """Whether this is the embedded benchmark, whose texts may be kept and whose probes have halves of their own."""
        return self.benchmark == "micro"

    def fixed(self, config: ForgetConfig) -> dict[str, Any]:
        """All that a run depends on, as plain values: settings, and hashes in place of models and texts."""
        values = dataclasses.asdict(config)
        inputs = {name: self._hash(name, values.pop(name)) for name in _INPUTS}
        for name in _WITHOUT_EFFECT:
            del values[name]
        return json.loads(json.dumps(values | {"inputs": inputs, "measured": self.final.data_sha256}))

    def _hash(self, kind: str, source: str | None) -> str | None:
        """A hash of a model's weights or of a source's texts, equal wherever they are."""
        if not source:
            return None
        if (kind, source) not in self._hashes:
            from unteach.evaluation.command import hash_weights
            from unteach.models import find_folder

            if kind in ("model", "reference", "incompetent"):
                found = hash_weights(find_folder(source, kind))
            elif kind == "questions":
                found = hashlib.sha256(Path(source).read_bytes()).hexdigest()
            else:
                found = read_documents(source, option=kind).sha256
            self._hashes[kind, source] = found[:16]
        return self._hashes[kind, source]

    def configured(self, method: str | Method, seed: int, **changes: Any) -> ForgetConfig:
        """The settings of a run.

        Args:
            method: A method, or the name of one.
            seed: Of the run.
            changes: Other fields of ``ForgetConfig``.
        """
        chosen = self.methods[method] if isinstance(method, str) else method
        losses = {chosen.loss, *(phase.loss for phase in changes.get("phases", ()))}
        if "it" in losses:
            changes["incompetent"] = self.incompetent
        return dataclasses.replace(self.config, method=chosen, seed=seed, **changes)

    def forget(self, config: ForgetConfig) -> tuple[ForgetResult, dict[str, Any]]:
        """Run the forget job and measure the model it ends with; returns the result and what a cell keeps of it."""
        from unteach.evaluation.scores import Scores
        from unteach.job import run_forget

        result = run_forget(config, say=self.say, shared=self._shared_by(config))
        out = Path(config.out)
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if config.model.startswith("micro:") and config.documents == "micro:forget" and self.embedded:
            file = out / "evaluations" / f"step_{result.steps:06d}.json"
            scores = Scores.from_dict(json.loads(file.read_text(encoding="utf-8")))
        else:
            scores = self.measure(result.model, config.seed)
        content = {
            "method": dataclasses.asdict(result.config.method),
            "phases": [dataclasses.asdict(phase) for phase in result.config.phases],
            "stop": result.stop,
            "steps": result.steps,
            "forget_seconds": round(result.seconds, 1),
            **self.kept(scores),
            "curve": thinned([json.loads(line) for line in lines]),
        }
        return result, content

    def _shared_by(self, config: ForgetConfig) -> dict[str, Any]:
        """What runs that start from the same model and measure the same passages need to measure once only."""
        seed = None if self.embedded else config.seed  # the embedded passages are the same for every seed
        measured = (config.general, config.holdout, config.reference, config.questions, config.probes)
        parts = (config.model, config.documents, *measured, seed)
        asks = "knowmem" in (config.stop.metric or "")  # the stop rule then needs other scores, the report the same
        known = self._shared.get((parts, not asks), {})
        final = {name: value for name, value in known.items() if name.startswith("final")}
        return self._shared.setdefault((parts, asks), final)

    def measure(self, model: Any, seed: int) -> Scores:
        """Everything that can be measured of a model."""
        from unteach.evaluation.suite import evaluate
        from unteach.models import load_tokenizer

        tokenizer = load_tokenizer(self.config.model)
        scores = evaluate(model, tokenizer, self.final, reference_scores=self.reference_scores(), seed=seed)
        if self.table_probes:
            own = Benchmark(self.benchmark, verbatim_forget=self.table_probes)
            found = evaluate(model, tokenizer, own, measurements=["verbmem_f"], seed=seed)
            scores.metrics["verbmem_f_tables"] = found.metrics["verbmem_f"]
        return scores

    def measure_named(self, name: str, seed: int) -> Scores:
        """The same for a model by its name or folder."""
        from unteach.models import load_model

        model = load_model(name, device=self.config.resolved_device())[0]
        try:
            return self.measure(model, seed)
        finally:
            del model
            gc.collect()

    def reference_scores(self) -> Scores | None:
        """The retrained model's membership and TOFU scores, which others are compared with; None without one."""
        if self._reference is None and self.config.reference:
            from unteach.evaluation.suite import evaluate
            from unteach.models import load_model

            model, tokenizer = load_model(self.config.reference, device=self.config.resolved_device())
            self._reference = evaluate(model, tokenizer, self.final, measurements=["privleak", "tofu"])
        return self._reference

    def kept(self, scores: Scores) -> dict[str, Any]:
        """What a cell keeps of scores: values with intervals, notes, and a few outputs where the texts may be shown."""
        metrics = {
            name: {"value": round(m.value, 4), "low": _round(m.low), "high": _round(m.high)}
            for name, m in scores.metrics.items()
        }
        content: dict[str, Any] = {"metrics": metrics, "notes": list(scores.notes)}
        if self.embedded:
            content["examples"] = {
                name: [
                    {key: item[key] for key in ("prompt", "question", "expected", "answer", "output") if key in item}
                    for item in scores.items_of(name)[:EXAMPLES]
                ]
                for name in ("verbmem_f", "knowmem_f")
                if name in scores.records
            }
        return content

    def retrained_knowledge(self, seed: int) -> float:
        """``knowmem_f`` of the retrained model, on the questions that a stop rule of that seed asks."""
        from unteach.corpora.own import read_questions, take_examples
        from unteach.evaluation.suite import evaluate
        from unteach.models import load_model

        if not self.config.reference:
            raise InputError("reference is missing: the stop at the retrained model's knowmem_f needs that model")
        asked = self.final
        if not self.embedded:
            if not self.questions:
                raise InputError("data has no questions on the forget documents: leave the cells with -star out")
            questions, examples = take_examples(read_questions(Path(self.questions)), 5, seed)
            asked = Benchmark("stop", knowledge_forget=questions, knowledge_forget_examples=examples)
        model, tokenizer = load_model(self.config.reference, device=self.config.resolved_device())
        return evaluate(model, tokenizer, asked, measurements=["knowmem_f"])["knowmem_f"]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


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
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"settings is {str(path)!r}: it cannot be read: {' '.join(str(error).split())}") from None
    allowed = ("config", "methods", *EXPERIMENTS_WITH_SETTINGS)
    if not isinstance(content, dict) or not set(content) <= set(allowed):
        raise InputError(f"settings is {str(path)!r}: it must hold no other parts than {', '.join(allowed)}")
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
        "general_tokens": 128,
        "wished_steps": 60,
        "max_steps": 200,
        "device": options.device,
    }
    return Setup(
        benchmark="micro",
        config=_config(start, given.get("config", {})),
        methods=_methods(MICRO_METHODS, given.get("methods", {})),
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
    from unteach.models import load_tokenizer

    tokenizer = load_tokenizer(options.model)
    documents, retain, questions, tables = read_benchmark(options, tokenizer, work)
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
    chunk = config.max_tokens or 1024
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
    baselines = {
        name: dataclasses.replace(m, lr=_PAPER_LR.get(m.loss, 1e-6), alpha=0.05, warmup=100)
        for name, m in MICRO_METHODS.items()
        if m.optimizer == "adamw"
    }
    quarter = -(-len(documents) // FOLDS)
    return Setup(
        benchmark=options.benchmark,
        config=config,
        methods=_methods({**MICRO_METHODS, **baselines}, given.get("methods", {})),
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


def read_benchmark(options: ReproduceOptions, tokenizer: Any, work: Path) -> Read:
    """The texts of MUSE or TOFU; a question of TOFU and its answer are one document.

    Args:
        options: ``benchmark`` and ``data`` are used.
        tokenizer: Its end-of-text token ends TOFU's answers.
        work: Folder for the file of questions.
    """
    return (_tofu if options.benchmark == "tofu" else _muse)(options, tokenizer, work)


def _muse(options: ReproduceOptions, tokenizer: Any, work: Path) -> Read:
    from unteach.corpora.muse import load_muse, muse_documents
    from unteach.corpora.rows import find_table

    name, data = options.benchmark, options.data
    tables = load_muse(name, data)
    retained = "retain1" if data is None or find_table(data, "raw/retain1") else "retain_standin"
    has_retain = data is None or find_table(data, f"raw/{retained}")
    retain = muse_documents(name, data, split=retained, deduplicate=True) if has_retain else []
    return muse_documents(name, data, deduplicate=True), retain, _write_questions(work, tables), tables


def _tofu(options: ReproduceOptions, tokenizer: Any, work: Path) -> Read:
    from unteach.corpora.tofu import SPLITS, load_tofu, tofu_pairs

    split = "forget10"
    tables = load_tofu(split, options.data)
    parts = [
        [
            f"{tables.settings.tofu_prompt.format(question=pair.question)} {pair.answer}{tokenizer.eos_token or ''}"
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


def star_stop(setup: Setup, seed: int) -> Stop:
    """The rule of the paper's star row: ``knowmem_f`` no higher than the retrained model's."""
    value = setup.retrained_knowledge(seed)
    return dataclasses.replace(setup.config.stop, metric=f"knowmem_f <= {value:.6g}")
