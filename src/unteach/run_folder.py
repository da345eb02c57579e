"""The folder of a run, which the first rank writes and all read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig, to_yaml
from unteach.distributed import from_first_rank, is_first_rank

__all__ = ["RunFolder"]


class RunFolder:
    """The run folder, or a temporary one where no run folder is wanted.

    Args:
        out: The folder; None: a temporary one.
        resume: Read back what a run wrote before.
        shared: Scores that several runs from one model share: measured once.
    """

    def __init__(self, out: Path | None, resume: bool, shared: dict[str, Any]) -> None:
        self.shared = shared
        self._temporary = tempfile.TemporaryDirectory() if out is None and is_first_rank() else None
        self.path = from_first_rank(Path(self._temporary.name) if self._temporary else Path(str(out)))
        self.resume = resume
        if is_first_rank():
            self.path.mkdir(parents=True, exist_ok=True)

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, all or nothing."""
        if not is_first_rank():
            return
        partial = self.path / f"{name}.part"
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        os.replace(partial, self.path / name)

    def remember(self, name: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Scores that the stop rule compares with: computed once, read back when a run is resumed."""
        file = self.path / "checkpoints" / f"{name}.json"
        if from_first_rank(self.resume and file.exists()):
            return json.loads(file.read_text(encoding="utf-8"))
        if f"stop {name}" not in self.shared:
            self.shared[f"stop {name}"] = from_first_rank(compute())
        self.write_json(f"checkpoints/{name}.json", self.shared[f"stop {name}"])
        return self.shared[f"stop {name}"]

    def scores(self, name: str, compute: Callable[[], Any], config: ForgetConfig, step: int | None) -> Any:
        """Scores of the final benchmark, written to ``evaluations/`` and read back when a run is resumed."""
        from unteach.evaluation.scores import Scores

        file = self.path / "evaluations" / f"{name}.json"
        if from_first_rank(self.resume and file.exists()):
            return Scores.from_dict(json.loads(file.read_text(encoding="utf-8")))
        if not step and f"final {name}" in self.shared:
            scores = self.shared[f"final {name}"]
        else:
            model = config.reference if step is None else config.model
            scores = from_first_rank(compute())
            scores = scores.replace(step=step, seed=config.seed, model=model, name=name if step is None else "")
        if not step:
            self.shared[f"final {name}"] = scores
        if is_first_rank():
            scores.write(file)
        return scores

    def write_config(self, config: ForgetConfig) -> None:
        """Write ``config.yaml``, all or nothing."""
        if not is_first_rank():
            return
        partial = self.path / "config.yaml.part"
        partial.write_text(to_yaml(config), encoding="utf-8")
        os.replace(partial, self.path / "config.yaml")

    def clean_up(self) -> None:
        """Remove a temporary folder."""
        if self._temporary:
            self._temporary.cleanup()
