"""The folder of a run, which the first rank writes and all read; and scores that several runs share."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from unteach.config import ForgetConfig
from unteach.evaluation.scores import Scores
from unteach.models.distributed import from_first_rank, is_first_rank
from unteach.settings import to_yaml
from unteach.writing import write_whole

try:
    import fcntl
except ImportError:  # not on Windows: there two processes may measure the same
    fcntl = None  # type: ignore[assignment]

__all__ = ["STOP_SCORES", "MeasuredOnce", "RunFolder", "SharedScores"]

STOP_SCORES = "evaluations/stop.jsonl"
"""A line for every evaluation of the stop rule, in the order in which they were made, and one before the first step."""
T = TypeVar("T")
MeasuredOnce = Callable[[str, Callable[[], Any]], Any]
"""Takes a name and what measures it; gives back what was measured under that name, once."""


class SharedScores:
    """Scores that several runs need, measured once.

    Args:
        folder: Where they are kept for other processes, too, which wait while one measures; None: in memory only.
    """

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
            write_whole(
                file, json.dumps({"scores": value.to_dict()} if isinstance(value, Scores) else {"value": value})
            )
            return value


class RunFolder:
    """The run folder, or a temporary one where no run folder is wanted.

    Args:
        out: The folder; None: a temporary one.
        resume: Read back what a run wrote before.
        measured_once: Keeps the scores that several runs from one model share.
    """

    def __init__(self, out: Path | None, resume: bool, measured_once: MeasuredOnce) -> None:
        self._measured_once = measured_once
        self._temporary = tempfile.TemporaryDirectory() if out is None and is_first_rank() else None
        self.path = from_first_rank(Path(self._temporary.name) if self._temporary else Path(str(out)))
        self.resume = resume
        if is_first_rank():
            self.path.mkdir(parents=True, exist_ok=True)

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, all or nothing."""
        if is_first_rank():
            write_whole(self.path / name, json.dumps(content, indent=1, ensure_ascii=False))

    def add_line(self, name: str, row: dict[str, Any]) -> None:
        """Add a line to a file of JSON lines."""
        if is_first_rank():
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")

    def remember(self, name: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Scores that the stop rule compares with: computed once, read back when a run is resumed."""
        file = self.path / "checkpoints" / f"{name}.json"
        if from_first_rank(self.resume and file.exists()):
            return json.loads(file.read_text(encoding="utf-8"))
        scores = self._measured_once(f"stop {name}", lambda: from_first_rank(compute()))
        self.write_json(f"checkpoints/{name}.json", scores)
        return scores

    def scores(self, name: str, compute: Callable[[], Scores], config: ForgetConfig, step: int | None) -> Scores:
        """Scores of the final benchmark, written to ``evaluations/`` and read back when a run is resumed."""
        file = self.path / "evaluations" / f"{name}.json"
        if from_first_rank(self.resume and file.exists()):
            return Scores.from_dict(json.loads(file.read_text(encoding="utf-8")))
        model = config.reference if step is None else config.model

        def measure() -> Scores:
            scores = from_first_rank(compute())
            return scores.replace(step=step, seed=config.seed, model=model, name=name if step is None else "")

        scores = measure() if step else self._measured_once(f"final {name}", measure)
        if is_first_rank():
            scores.write(file)
        return scores

    def write_config(self, config: ForgetConfig) -> None:
        """Write ``config.yaml``, all or nothing."""
        if is_first_rank():
            write_whole(self.path / "config.yaml", to_yaml(config))

    def clean_up(self) -> None:
        """Remove a temporary folder."""
        if self._temporary:
            self._temporary.cleanup()
