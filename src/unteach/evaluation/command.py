"""`unteach evaluate MODEL... --benchmark NAME --out scores.json`: what the command takes and does."""

import copy
import dataclasses
import gc
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from unteach.corpora import Benchmark
from unteach.corpora.catalog import NAMES, add_multiple_choice, load_benchmark
from unteach.corpora.own import own_benchmark, question_problems, read_questions
from unteach.data.documents import read_documents
from unteach.errors import InputError, template_problems
from unteach.evaluation.formulas import Metric
from unteach.evaluation.inference import evaluating
from unteach.evaluation.metrics import METRICS
from unteach.evaluation.scores import SCHEMA, Scores, evaluate, write_json
from unteach.method.tensors import resolved_device
from unteach.models import find_folder, load_model
from unteach.models.load import weight_paths
from unteach.models.threads import choose_threads
from unteach.writing import file_sha256

_GENERAL_TEXTS, _GENERAL_BYTES = 200, 4_000_000


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Measure what models recite, know and leak.

    Examples:
        unteach evaluate micro:target micro:retrained --reference micro:retrained
        unteach evaluate my-model/ --benchmark muse-news --data muse-news/ --out scores.json
        unteach evaluate my-model/ --benchmark own --documents forget/ --holdout unseen/ --questions
        questions.jsonl
    """

    models: tuple[str, ...]
    """Model folders, Hugging Face ids, or `micro:NAME`."""
    benchmark: str = "micro"
    """micro, muse-news, muse-books, tofu-forget01, tofu-forget05, tofu-forget10, mmlu, or own (your documents)."""
    data: Path | None = None
    """Folder with the benchmark's tables; by default they come from the Hugging Face hub."""
    reference: str | None = None
    """A model retrained without the forget set, or its scores file: needed for PrivLeak and TOFU's forget quality."""
    reference_auc: float | None = None
    """Instead of a reference: its membership AUC (MUSE's own 7B models: 0.4772 for News, 0.5393 for Books)."""
    documents: str | None = None
    """Benchmark own: the documents that were to be forgotten."""
    holdout: str | None = None
    """Benchmark own: documents of the same kind that the model never saw."""
    questions: Path | None = None
    """Benchmark own: a file of questions and answers about the forgotten documents."""
    retain_questions: Path | None = None
    """Benchmark own: a file of questions and answers about what was to be kept."""
    question_template: str | None = None
    r"""How a question is put to the model, such as "Question: {question}\nAnswer:". None: as a user turn of its chat
    template, or so."""
    general: str | None = None
    """General text, for the loss on it (nll_general)."""
    mmlu: Path | None = None
    """Folder with the MMLU validation questions, to be measured besides the benchmark."""
    lm_eval: tuple[str, ...] = ()
    """Also run these tasks of EleutherAI's lm-evaluation-harness (pip install lm-eval)."""
    lm_eval_tasks: Path | None = None
    """Folder with further task files for the harness."""
    limit: int | None = None
    """Measure only the first so many items of every kind."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the weights. In fp32 the text does not depend on the batch size."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU where there is one."""
    batch_size: int = 128
    """Most prompts decoded together."""
    seed: int = 0
    """Of the bootstrap intervals and of the choice of probes."""
    out: Path | None = None
    """Write the scores, with every item, to this file."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: EvaluateOptions) -> dict[str, Any]:
    """Measure all models: `{"schema": "unteach.scores/1", "results": [...]}`, one result per model, as in `out`.

    Raises:
        InputError: with every problem of the options found.
    """
    _check(options)
    if resolved_device(options.device).type == "cpu":
        choose_threads(None)
    reference = options.reference_auc if options.reference is None else _reference(options, options.reference)
    results = [_evaluate(options, name, reference).to_dict() for name in options.models]
    content = {"schema": SCHEMA, "results": results}
    if options.out is not None:
        write_json(options.out, content)
    return content


def _check(options: EvaluateOptions) -> None:
    """Report everything wrong with the options at once."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    benchmark, own = options.benchmark, options.benchmark == "own"
    problems = []
    if not options.models:
        problems.append("models is empty: name at least one model folder, Hugging Face id or micro:NAME")
    if benchmark not in (*NAMES, "own"):
        problems.append(f"benchmark is {benchmark!r}: allowed are {', '.join((*NAMES, 'own'))}")
    if own and "documents" not in given:
        problems.append("documents is not given: the benchmark own needs the documents that were to be forgotten")
    for name in ("documents", "holdout", "questions", "retain_questions"):
        if name in given and not own:
            problems.append(f"{name} is given, but the benchmark is {benchmark!r}: set benchmark to own")
    for name in ("data", "mmlu", "lm_eval_tasks"):
        if name in given and not given[name].is_dir():
            problems.append(f"{name} is {str(given[name])!r}: there is no such folder")
    for name in ("questions", "retain_questions"):
        problems += question_problems(name, given.get(name))
    if "reference" in given and "reference_auc" in given:
        problems.append("reference and reference_auc are both given: give one of them")
    if not 0 < given.get("reference_auc", 1) <= 1:
        problems.append(f"reference_auc is {options.reference_auc}: a number above 0 and at most 1 is needed")
    for name in ("limit", "batch_size"):
        if given.get(name, 1) < 1:
            problems.append(f"{name} is {given[name]}: at least 1 is needed")
    problems += template_problems(options.question_template, options.questions or options.retain_questions)
    if options.lm_eval and importlib.util.find_spec("lm_eval") is None:
        problems.append("lm_eval names tasks, but the package is missing: pip install lm-eval")
    if options.out is not None and options.out.is_dir():
        problems.append(f"out is {str(options.out)!r}: a folder, must be a file to write")
    if problems:
        raise InputError(problems)


def _reference(options: EvaluateOptions, reference: str) -> Scores:
    """The reference's scores: read from a file, or measured (membership and TOFU only)."""
    path = Path(reference).expanduser()
    if not path.is_file():
        return _evaluate(options, reference, None, measurements=("privleak", "tofu"), option="reference")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = [Scores.from_dict(result) for result in content.get("results", [content])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"reference is {str(path)!r}: not a scores file ({error})") from error
    if len(found) != 1:
        raise InputError(f"reference is {str(path)!r}: it holds {len(found)} results, must hold one")
    return found[0]


def _evaluate(
    options: EvaluateOptions,
    name: str,
    reference: Scores | float | None,
    *,
    measurements: tuple[str, ...] | None = None,
    option: str = "model",
) -> Scores:
    """Load one model, measure it, and let go of it."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    device = str(resolved_device(options.device))
    model, tokenizer = load_model(name, dtype=dtype, device=device, option=option)
    try:
        scores = evaluate(
            model,
            tokenizer,
            _benchmark(options, tokenizer),
            reference_scores=reference,
            measurements=measurements,
            batch_size=options.batch_size,
            seed=options.seed,
        )
        if options.lm_eval and measurements is None:
            scores.metrics.update(run_harness(model, tokenizer, options))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{option} is {name!r}: {error}") from error
    finally:
        del model
        gc.collect()
        torch.cuda.empty_cache()
    settings = scores.settings | {"precision": options.precision, "batch_size": options.batch_size, "device": device}
    short = name if name.startswith("micro:") else Path(name).expanduser().resolve().name
    return scores.replace(name=short, model=name, settings=settings, model_sha256=hash_weights(find_folder(name)))


def _benchmark(options: EvaluateOptions, tokenizer: Any) -> Benchmark:
    """The benchmark with everything the options add to it."""
    if options.benchmark == "own":
        assert options.documents is not None
        documents = read_documents(options.documents, option="documents")
        holdout = read_documents(options.holdout, option="holdout") if options.holdout else None
        benchmark = own_benchmark(
            tokenizer,
            documents.in_form_of(tokenizer),
            holdout_documents=holdout.in_form_of(tokenizer) if holdout else (),
            forget_questions=read_questions(options.questions) if options.questions else (),
            retain_questions=read_questions(options.retain_questions) if options.retain_questions else (),
            question_template=options.question_template,
            seed=options.seed,
        )
        notes = (*benchmark.notes, *documents.notes, *(holdout.notes if holdout else ()))
        benchmark = dataclasses.replace(benchmark, notes=notes)
    else:
        benchmark = load_benchmark(options.benchmark, options.data)
    if options.general is not None:
        texts = read_documents(options.general, max_bytes=_GENERAL_BYTES, seed=options.seed, option="general").texts
        benchmark = dataclasses.replace(benchmark, general_texts=tuple(texts[:_GENERAL_TEXTS]))
    if options.mmlu is not None:
        benchmark = add_multiple_choice(benchmark, options.mmlu)
    return benchmark if options.limit is None else benchmark.first(options.limit)


def run_harness(model: Any, tokenizer: Any, options: EvaluateOptions) -> dict[str, Metric]:
    """Run tasks of EleutherAI's lm-evaluation-harness (the optional package `lm-eval`).

    Each measure of a task is a metric `<task>:<measure>` in the harness's own unit, ± 1.96 of its standard errors.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=options.lm_eval_tasks and str(options.lm_eval_tasks))
    unknown = [task for task in options.lm_eval if task not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm_eval is {', '.join(unknown)}: not among the harness's {len(manager.all_tasks)} tasks")
    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    with evaluating(model):
        content = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=min(16, options.batch_size)),
            tasks=list(options.lm_eval),
            task_manager=manager,
            limit=options.limit,
            log_samples=False,
            bootstrap_iters=1000,
            **dict.fromkeys(kinds, options.seed),
        )
    return _as_metrics(content)


def _as_metrics(content: Any) -> dict[str, Metric]:
    """The harness's table as metrics. Its keys read `<measure>,<filter>` and `<measure>_stderr,<filter>`."""
    metrics: dict[str, Metric] = {}
    for task, values in content["results"].items():
        count = int(content.get("n-samples", {}).get(task, {}).get("effective", 0))
        better = content.get("higher_is_better", {}).get(task, {})
        for key, value in values.items():
            measure, _, selection = key.partition(",")
            if not selection or measure.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{measure}_stderr,{selection}")
            known = isinstance(error, int | float)
            low, high = (value - 1.96 * error, value + 1.96 * error) if known else (None, None)
            name = f"{task}:{measure}" if selection == "none" else f"{task}:{measure}:{selection}"
            metrics[name] = Metric(float(value), low, high, count, better.get(measure), unit="lm-eval")
    return metrics


def hash_weights(folder: Path, sums: Mapping[str, str] | None = None) -> str:
    """Hash of a model's weights files, of an adapter with its base's: equal for byte-equal files of the same names.

    `sums` has the SHA-256 of the files, where they were read already.
    """
    digest = hashlib.sha256()
    for name, file in weight_paths(folder).items():
        digest.update(name.encode() + b"\0" + bytes.fromhex(sums[name] if sums else file_sha256(file)))
    return digest.hexdigest()


def show(content: dict[str, Any]) -> None:
    """Print the scores for people: the table, and what a reader must know of each model's."""
    console = Console()
    console.print(as_table(content))
    for scores in content["results"]:
        for note in scores["notes"]:
            console.print(f"{scores['name']}: {note}", markup=False, highlight=False)


def as_table(content: dict[str, Any]) -> Table:
    """The metrics of all results that the report explains, side by side, for a terminal; intervals in brackets."""
    results = content["results"]
    measured = {name for result in results for name in result["metrics"]}
    others = sorted(name for name in measured if ":" in name or (name.startswith("tofu_") and name not in METRICS))
    table = Table(title=results[0]["benchmark"]["name"])
    table.add_column("metric")
    for result in results:
        table.add_column(result["name"], justify="right")
    for name in [*(name for name in METRICS if name in measured), *others]:
        table.add_row(name, *(_cell(result["metrics"].get(name)) for result in results))
    return table


def _cell(metric: dict[str, Any] | None) -> str:
    if metric is None:
        return "–"
    digits = 1 if metric["unit"] == "percent" else 3
    interval = "" if metric["low"] is None else f" ({metric['low']:.{digits}f} to {metric['high']:.{digits}f})"
    return f"{metric['value']:.{digits}f}{interval}"
