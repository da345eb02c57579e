"""EleutherAI's lm-evaluation-harness on the same model (the optional package `lm-eval`)."""

import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unteach.evaluation.inference import evaluating
from unteach.evaluation.statistics import Metric


def harness_is_installed() -> bool:
    """Whether the package `lm-eval` can be imported."""
    return importlib.util.find_spec("lm_eval") is not None


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    task_folder: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
) -> dict[str, Metric]:
    """Run tasks of the harness.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
        tasks: task names as the harness knows them. Most of them need their data from the Hugging Face hub.
        task_folder: a folder with further task files.
        limit: only so many questions of each task.
        batch_size: most questions scored together.
        seed: for everything random in the harness.

    Returns:
        One metric per task and measure, named `<task>:<measure>`, in the harness's own unit. The interval is
        the value ± 1.96 of the harness's standard errors.

    Raises:
        ValueError: where the package is missing or a task is unknown.
    """
    if not harness_is_installed():
        raise ValueError("lm_eval names tasks, but the package is missing: pip install lm-eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm_eval is {', '.join(unknown)}: not among the harness's {len(manager.all_tasks)} tasks")
    with evaluating(model):
        wrapped = HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
        content = simple_evaluate(
            model=wrapped,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            log_samples=False,
            bootstrap_iters=1000,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    return _as_metrics(content)


def _as_metrics(content: Any) -> dict[str, Metric]:
    """The harness's table as metrics. Its keys read `<measure>,<filter>` and `<measure>_stderr,<filter>`."""
    metrics: dict[str, Metric] = {}
    for task, values in content["results"].items():
        count = content.get("n-samples", {}).get(task, {}).get("effective", 0)
        better = content.get("higher_is_better", {}).get(task, {})
        for key, value in values.items():
            measure, _, selection = key.partition(",")
            if not selection or measure.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{measure}_stderr,{selection}")
            spread = 1.96 * error if isinstance(error, int | float) else None
            name = f"{task}:{measure}" if selection == "none" else f"{task}:{measure}:{selection}"
            metrics[name] = Metric(
                value=float(value),
                low=None if spread is None else value - spread,
                high=None if spread is None else value + spread,
                count=int(count),
                higher_is_better=better.get(measure),
                unit="lm-eval",
            )
    return metrics
