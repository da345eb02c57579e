"""What a run gives back and writes: result, folder, metrics of every step, also for a tracker; and shared scores."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.evaluation.scores import Scores
from unteach.evaluation.verdict import Finding
from unteach.method.optimizers import OPTIMIZERS
from unteach.models.distributed import from_first_rank, is_first_rank
from unteach.settings import nearest_name
from unteach.writing import write_whole

try:
    import fcntl
except ImportError:  # not on Windows: there two processes may measure the same
    fcntl = None  # type: ignore[assignment]

__all__ = ["STOP_SCORES", "ForgetResult", "MeasuredOnce", "RunFolder", "SharedScores"]

STOP_SCORES = "evaluations/stop.jsonl"
"""A line for every evaluation of the stop rule, in the order in which they were made, and one before the first step."""
T = TypeVar("T")
MeasuredOnce = Callable[[str, Callable[[], Any]], Any]
"""Takes a name and what measures it; gives back what was measured under that name, once."""
Tracker = Callable[[dict[str, Any] | None], None]
"""Takes the row of every step and, at the end of the run, None."""


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """What ``forget`` gives back; the same as ``RUN/result.json``."""

    model: Any
    out: Path | None
    steps: int
    stop: dict[str, Any]
    before: dict[str, float]
    after: dict[str, float]
    counts: dict[str, Any]
    seconds: float
    config: ForgetConfig
    forgotten: bool = False
    """Whether the stop rule was met."""
    verdict: tuple[Finding, ...] = ()
    """Four questions and their answers; see ``evaluation.verdict``."""
    base: dict[str, float] = dataclasses.field(default_factory=dict)
    """Scores of the base model on the stop rule's passages, where there is one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        skipped = ("model", "config", "out")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped}
        method = self.config.method
        name = f"{OPTIMIZERS[method.optimizer].label}-{method.loss}-{method.divergence}"
        values["verdict"] = [finding.to_dict() for finding in self.verdict]
        return {"name": name, "seed": self.config.seed, "out": str(self.out)} | values


class SharedScores:
    """Scores that several runs need, measured once; in a folder for other processes, too, which wait meanwhile."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}

    def measured_once(self, name: str, compute: Callable[[], T]) -> T:
        """The scores of that name; ``compute`` is called if nobody has them yet."""
        if name not in self._known:
            self._known[name] = compute() if self._folder is None else self._in_folder(self._folder, name, compute)
        return self._known[name]

    @staticmethod
    def _in_folder(folder: Path, name: str, compute: Callable[[], Any]) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
        with file.with_suffix(".lock").open("w") as lock:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, also by a process that dies
            if file.exists():
                content = json.loads(file.read_text(encoding="utf-8"))
                return Scores.from_dict(content["scores"]) if "scores" in content else content["value"]
            value = compute()
            content = {"scores": value.to_dict()} if isinstance(value, Scores) else {"value": value}
            write_whole(file, json.dumps(content))
            return value


class RunFolder:
    """The run folder (``out``), or a temporary one; a resumed run reads back what it wrote before."""

    def __init__(self, out: Path | None, resume: bool, measured_once: MeasuredOnce) -> None:
        self._measured_once = measured_once
        self._temporary = tempfile.TemporaryDirectory() if out is None and is_first_rank() else None
        self.path = from_first_rank(Path(self._temporary.name) if self._temporary else Path(str(out)))
        self.resume = resume

    def write(self, name: str, content: Any) -> None:
        """Write a text, or anything else as JSON, all or nothing."""
        if is_first_rank():
            text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
            write_whole(self.path / name, text)

    def add_line(self, name: str, row: dict[str, Any]) -> None:
        """Add a line to a file of JSON lines."""
        if is_first_rank():
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")

    def _written_before(self, name: str) -> Any:
        """What a resumed run wrote before, or None."""
        file = self.path / name
        there = from_first_rank(self.resume and file.exists())
        return json.loads(file.read_text(encoding="utf-8")) if there else None

    def remember(self, name: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Scores that the stop rule compares with: computed once, read back when a run is resumed."""
        file = f"checkpoints/{name}.json"
        scores = self._written_before(file)
        if scores is None:
            scores = self._measured_once(f"stop {name}", lambda: from_first_rank(compute()))
            self.write(file, scores)
        return scores

    def scores(self, name: str, compute: Callable[[], Scores], config: ForgetConfig, step: int | None) -> Scores:
        """Scores of the final benchmark, written to ``evaluations/`` and read back when a run is resumed."""
        file = f"evaluations/{name}.json"
        known = self._written_before(file)
        if known is not None:
            return Scores.from_dict(known)
        model = config.reference if step is None else config.model

        def measure() -> Scores:
            scores = from_first_rank(compute())
            return scores.replace(step=step, seed=config.seed, model=model, name=name if step is None else "")

        scores = measure() if step else self._measured_once(f"final {name}", measure)
        if is_first_rank():
            scores.write(self.path / file)
        return scores

    def clean_up(self) -> None:
        """Remove a temporary folder."""
        if self._temporary:
            self._temporary.cleanup()


class StepLog:
    """Where the metrics of a run's steps go: ``metrics.jsonl``, a progress bar, and a tracker if one is wished for."""

    def __init__(self, folder: Path, config: ForgetConfig) -> None:
        self.file = folder / "metrics.jsonl"
        check_tracker(config.track)
        try:
            self.tracker = None if config.track == "none" else TRACKERS[config.track](folder)
        except ImportError:
            raise InputError(f"track is {config.track!r}, which is not installed: pip install {config.track}") from None
        self.console = Console(file=sys.stderr)
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.progress.add_task("", total=config.max_steps)

    def __enter__(self) -> StepLog:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()
        if self.tracker is not None:
            self.tracker(None)

    def add(self, row: dict[str, Any]) -> None:
        """Log one step."""
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = (
            f"NLL {row['nll_forget']:.3f}  divergence {row['divergence']:.1e}  |g| {row['grad_norm']:.2g}  "
            f"clip {row['clip_factor']:.2f}  {row['tokens_per_second']:,.0f} tokens/s"
        )
        self.progress.update(self.task, completed=row["step"], description=shown)
        if self.tracker is not None:
            self.tracker(row)

    def rewind(self, step: int) -> None:
        """Drop the rows after a step: they will come again. A half-written last line goes too."""
        if not self.file.exists():
            return
        rows = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] > step:
                    break
            except json.JSONDecodeError:
                break
            rows.append(f"{line}\n")
        write_whole(self.file, "".join(rows))


def check_tracker(name: str) -> None:
    """Refuse what is no tracker."""
    known = ["none", *TRACKERS]
    if name not in known:
        raise InputError(f"track is {name!r}: it must be one of {', '.join(known)}{nearest_name(name, known)}")


def _tensorboard(folder: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def track(row: dict[str, Any] | None) -> None:
        if row is None:
            writer.close()
        else:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(name, value, row["step"])

    return track


def _service(module_name: str, folder: Path) -> Tracker:
    """A tracker that has wandb's calls."""
    module = importlib.import_module(module_name)
    module.init(project="unteach", name=folder.name)
    return lambda row: module.finish() if row is None else module.log(row)


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": functools.partial(_service, "wandb"),
    "trackio": functools.partial(_service, "trackio"),
}
"""What opens each tracker, given the run folder. To add one, add it here; ``--track NAME`` finds it."""
