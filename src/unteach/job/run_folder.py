"""What a run writes: its folder, the metrics of every step, also for a tracker; and scores that several runs share."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from unteach.config import ForgetConfig
from unteach.data import Documents
from unteach.data.records import MESSAGES
from unteach.errors import InputError, first_line
from unteach.evaluation.scores import Scores, as_json
from unteach.evaluation.verdict import Finding
from unteach.job.inputs import PIPED
from unteach.job.lock import clear_litter, free_problem, holding, is_new, made_folder, remove_made
from unteach.job.receipts.privacy import secret_of, without_text
from unteach.method.optimizers import OPTIMIZERS
from unteach.models.distributed import from_first_rank, is_first_rank
from unteach.settings import nearest_name
from unteach.writing import file_sha256, sealed, sync, unsealed, write_whole

try:
    import fcntl
except ImportError:  # not on Windows: there two processes may measure the same
    fcntl = None  # type: ignore[assignment]

__all__ = ["STOP_SCORES", "ForgetResult", "MeasuredOnce", "RunFolder", "SharedScores"]

RUN_LOG = "run.log"
"""Every line that the terminal shows."""
STOP_SCORES = "evaluations/stop.jsonl"
"""A line for every evaluation of the stop rule, in the order in which they were made, and one before the first step."""
SUMS = "checkpoints/sums.json"
"""SHA-256 of all scores that a resumed run reads back, as they are or were before."""
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
    """Scores on passages that the stop rule did not use; likewise ``after``."""
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
    seconds_of: dict[str, float] = dataclasses.field(default_factory=dict)
    """What the ``seconds`` were spent on: ``steps``, ``looks`` of the stop rule, and the ``rest``, which is reading,
    measuring before and after, and writing. Of a run that was resumed, in all its parts."""

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
                return _from_file(file)
            value = compute()
            write_whole(file, json.dumps(_plain(value)))
            return value


def _plain(scores: Any) -> Any:
    return scores.to_dict() if isinstance(scores, Scores) else scores


def _from_file(file: Path) -> Any:
    """What was written as ``_plain``."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return Scores.from_dict(content) if isinstance(content, dict) and "schema" in content else content


class RunFolder:
    """The run folder (``out``), or a temporary one; a resumed run reads back what it wrote before."""

    def __init__(self, out: Path | None, resume: bool, measured_once: MeasuredOnce, private: bool = False) -> None:
        self._measured_once = measured_once
        self.private = private
        self._temporary = tempfile.TemporaryDirectory() if out is None and is_first_rank() else None
        self.path = from_first_rank(Path(self._temporary.name) if self._temporary else Path(str(out)))
        self.resume, self._shown = resume, list[str]()
        self.say: Callable[[str], None] = self._shown.append
        """Gets what people should know of files that are damaged."""
        self._lock, self._begun = ExitStack(), False
        self._made: Path | None = None

    def begin(self) -> None:
        """Make the folder of a new run, and keep other processes out of it (a resumed run does so before it reads)."""
        if self._temporary or self.resume:
            return
        self._made = made_folder(self.path)
        self._lock.enter_context(holding(self.path))
        if not from_first_rank(is_new(self.path)):
            raise InputError(f"out is {str(self.path)!r}, in which another run began meanwhile: name a new folder")
        self._begun = True
        clear_litter(self.path)

    def write(self, name: str, content: Any) -> None:
        """Write a text, or anything else as JSON, all or nothing."""
        if is_first_rank():
            text = content if isinstance(content, str) else as_json(content)
            if not isinstance(content, str):
                sums = self._sums()
                sums[name] = [*sums.get(name, [])[-1:], hashlib.sha256(text.encode()).hexdigest()]
                write_whole(self.path / SUMS, sealed(sums))  # first: a file that is there has its sum there
            write_whole(self.path / name, text)

    def _sums(self) -> dict[str, Any]:
        try:
            return unsealed((self.path / SUMS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}

    def _sound(self, name: str) -> bool:
        """Whether a file is there as it was written; what is damaged is said."""
        file, sums = self.path / name, self._sums()
        if not self.resume or not file.is_file():
            return False
        try:
            if file_sha256(file) not in sums.get(name, ()):
                raise ValueError("its checksum does not match" if name in sums else "its checksum is lost")
            _from_file(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.say(f"warning: {file} is damaged ({first_line(error)}) and is measured again")
            return False
        return True

    def add_line(self, name: str, row: dict[str, Any]) -> None:
        """Add a line to a file of JSON lines."""
        if is_first_rank():
            _add_line(self.path / name, row)

    def settle(self) -> None:
        """Return when every log is on the disk."""
        for name in ("metrics.jsonl", STOP_SCORES, RUN_LOG) if is_first_rank() else ():
            if (self.path / name).exists():
                with (self.path / name).open("rb+") as lines:
                    sync(lines)

    def log(self, *lines: str) -> None:
        """Add lines to what the terminal has shown; they wait until the run begins, which may yet be refused."""
        self._shown += lines
        if (self.path / "config.yaml").exists():
            add_to_log(self.path, self._shown)
            self._shown.clear()

    def remember(self, name: str, compute: Callable[[], T], shared: str = "") -> T:
        """Scores: read back when a run is resumed, else computed, by one of all runs that share them under a name."""
        if from_first_rank(self._sound(name) if is_first_rank() else False):
            return _from_file(self.path / name)
        once = self._measured_once if shared else lambda name, compute: compute()
        scores = once(shared, lambda: from_first_rank(compute()))
        if is_first_rank():
            plain = _plain(scores)
            self.write(name, without_text(plain, secret_of(self.path)) if self.private else plain)
        return scores

    def with_documents(self, config: ForgetConfig, documents: Documents) -> ForgetConfig:
        """Keep documents that came from standard input, so that the run can be resumed; the config that names them.

        A private run keeps none: who resumes it pipes them in again.
        """
        if config.documents != "-" or self.private:
            return config
        turns = documents.conversations
        rows = [
            {MESSAGES: turns[number]} if number in turns else {config.text_field: text}
            for number, text in enumerate(documents.texts)
        ]
        self.write(PIPED, "".join(json.dumps(row) + "\n" for row in rows))
        return dataclasses.replace(config, documents=str(self.path / PIPED))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._temporary:
            self._temporary.cleanup()
        elif is_first_rank() and kind is not None and not self.resume:
            refused = issubclass(kind, InputError) and not (self.path / "metrics.jsonl").exists()
            if self._begun and (refused or not (self.path / "config.yaml").exists()):
                remove_made(self.path, self._made)
        self._lock.close()


def add_to_log(run: Path, lines: Sequence[str]) -> None:
    """Add lines to what the terminal has shown of a run."""
    if is_first_rank():
        with (run / RUN_LOG).open("a", encoding="utf-8") as log:
            log.writelines(f"{line}\n" for line in lines)


def going_on(out: Path | None, max_steps: int | None = None) -> str:
    """The command that goes on with a run."""
    return f"unteach forget --resume {shlex.quote(str(out))}" + (f" --max-steps {max_steps}" if max_steps else "")


def how_to_get_more(rule: str, config: ForgetConfig, out: Path | None) -> list[str]:
    """A line on what can be done where a run ended by this rule, which is not its own."""
    if rule not in ("max_steps", "plateau", "finished"):
        return []
    most = 2 * config.max_steps if rule == "max_steps" else None
    further = f"go on with: {going_on(out, most)}; or " if out and rule != "plateau" else ""
    return [f"for more, {further}start again and pull harder: --alpha {3 * (config.method.alpha or 1):.2g}"]


@contextmanager
def step_log(file: Path, config: ForgetConfig) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Inside the block, what takes the row of every step: for the file, a progress bar, and the tracker."""
    check_tracker(config.track)
    try:
        tracker = TRACKERS[config.track](file.parent)
    except ImportError:
        raise InputError(f"track is {config.track!r}, which is not installed: pip install {config.track}") from None
    console = Console(file=sys.stderr)
    columns = (
        "step {task.completed}/{task.total}",
        BarColumn(bar_width=20),
        "{task.description}",
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=config.max_steps)

        def add(row: dict[str, Any]) -> None:
            _add_line(file, row)
            shown = (
                f"NLL {row['nll_forget']:.3f}  divergence {row['divergence']:.1e}  |g| {row['grad_norm']:.2g}  "
                f"clip {row['clip_factor']:.2f}  {row['tokens_per_second']:,.0f} tokens/s"
            )
            progress.update(task, completed=row["step"], description=shown)
            logging.getLogger("unteach").debug("step %d: %s", row["step"], shown)
            tracker(row)

        try:
            yield add
        finally:
            tracker(None)


def rewind(file: Path, step: int) -> None:
    """Drop the rows after a step from a log: they will come again. What is no row goes too, such as half a line."""
    if file.exists():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        write_whole(file, "".join(f"{line}\n" for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    """The step of a row; infinity where it is none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return math.inf


def _add_line(file: Path, row: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def check_start(config: ForgetConfig, resume: bool = False, *, alone: bool = False) -> None:
    """Refuse a new run in a folder that holds something, and what is no tracker; ``alone``: other ranks do not call."""
    problem = "" if resume or not config.out else free_problem(Path(config.out))
    if not problem and not resume and config.out and not is_new(Path(config.out)):
        problem = f"which exists and is not empty: name a new folder, or --resume {config.out}"
    if problem := problem if alone else from_first_rank(problem):
        raise InputError(f"out is {config.out!r}{', ' if problem.startswith('which') else ': '}{problem}")
    check_tracker(config.track)


def check_tracker(name: str) -> None:
    """Refuse what is no tracker."""
    if name not in TRACKERS:
        raise InputError(f"track is {name!r}: it must be one of {', '.join(TRACKERS)}{nearest_name(name, TRACKERS)}")


def _tensorboard(folder: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def track(row: dict[str, Any] | None) -> None:
        if row is None:
            writer.close()
            return
        for name in row.keys() - {"step"}:
            writer.add_scalar(name, row[name], row["step"])

    return track


def _service(module_name: str, folder: Path) -> Tracker:
    """A tracker that has wandb's calls."""
    module = importlib.import_module(module_name)
    module.init(project="unteach", name=folder.name)
    return lambda row: module.finish() if row is None else module.log(row)


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "none": lambda folder: lambda row: None,
    "tensorboard": _tensorboard,
    "wandb": functools.partial(_service, "wandb"),
    "trackio": functools.partial(_service, "trackio"),
}
"""What opens each tracker, given the run folder. To add one, add it here; ``--track NAME`` finds it."""
