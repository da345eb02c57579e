"""Everything a benchmark can measure on one model, in one call. What there is to measure stands in `metrics`."""

import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch

from unteach.corpora import Benchmark
from unteach.evaluation.inference import BATCH_SIZE, Advance, Batching
from unteach.evaluation.metrics import MEASUREMENTS, Evaluation
from unteach.evaluation.scores import Scores, library_versions

__all__ = ["MEASUREMENTS", "evaluate"]


def evaluate(
    model: Any,
    tokenizer: Any,
    benchmark: Benchmark,
    *,
    reference_scores: Scores | Mapping[str, Any] | float | None = None,
    measurements: Collection[str] | None = None,
    batch_size: int = BATCH_SIZE,
    batch_tokens: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    name: str = "",
    model_name: str = "",
    step: int | None = None,
) -> Scores:
    """Measure a model.

    Leaves the model and the random state of torch as they were: safe to call between training steps.

    Args:
        model: a Hugging Face causal language model, on any device, in any precision.
        tokenizer: its tokenizer.
        benchmark: what to measure on.
        reference_scores: for PrivLeak and TOFU's forget quality: the scores of a model retrained without the
            forget set, measured on the same benchmark; or its `auc_forget_holdout_min_40` as a number.
        measurements: names out of `MEASUREMENTS`, by default all that the benchmark has data for.
        batch_size: most prompts decoded together.
        batch_tokens: most tokens held at once, see `inference.Batching`.
        seed: of the bootstrap, kept in the result.
        progress: whether to show progress bars on stderr; by default where that is a terminal.
        name: of the result, to tell several apart.
        model_name: where the model is from.
        step: after how many training steps.

    Returns:
        The scores: `scores["verbmem_f"]` is a value, see `Scores`.
    """
    if isinstance(measurements, str) or set(measurements or ()) - set(MEASUREMENTS):
        raise ValueError(f"measurements is {measurements!r}: allowed are {', '.join(MEASUREMENTS)}")
    reference = reference_scores
    if isinstance(reference, int | float):
        reference = float(reference)
    elif reference is not None and not isinstance(reference, Scores):
        reference = Scores.from_dict(reference)
    started = time.perf_counter()
    absent = []
    with _progress_bars(progress) as start_bar:
        batching = Batching(batch_size, batch_tokens)
        evaluation = Evaluation(model, tokenizer, benchmark, reference, batching, seed, start_bar)
        for wanted, entry in MEASUREMENTS.items():
            if wanted not in measurements if measurements is not None else not entry.by_default:
                continue
            if all(getattr(benchmark, part) for part in entry.needs):
                entry.measure(evaluation, wanted)
            elif entry.absent:
                absent.append(f"{wanted} is not measured: the benchmark has no {entry.absent}")
    records = [record for group in evaluation.records.values() for record in group]
    repetitive = [float(record["degenerate"]) for record in records if "degenerate" in record]
    if repetitive:
        evaluation.add_mean("degenerate", repetitive)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # decoding took much more than training will: others may share the GPU
    settings = dataclasses.asdict(benchmark.settings)
    return Scores(
        benchmark=benchmark.name,
        metrics=evaluation.metrics,
        records=evaluation.records,
        notes=(*benchmark.notes, *evaluation.notes, *absent),
        settings={key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        data_sha256=benchmark.data_sha256,
        name=name,
        model=model_name,
        step=step,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=library_versions(),
    )


@contextmanager
def _progress_bars(show: bool | None) -> Iterator[Callable[[str, int], Advance]]:
    """Inside the block, a function that begins a bar on stderr, given a label and the number of items."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not (sys.stderr.isatty() if show is None else show)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:

        def start(label: str, total: int) -> Advance:
            task = progress.add_task(label, total=total)
            return lambda count: progress.advance(task, count)

        yield start
