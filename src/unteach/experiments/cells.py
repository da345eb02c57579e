"""Cells of an experiment: one method with one seed is one small JSON file, so that a run can stop anywhere and go on.

A cell's file holds the *key* of what it was measured with: a hash of its name, its seed, the settings that differ from
``KEY_DEFAULTS``, the models' weights and the texts, never of paths, so that a cell made on one machine is known on
another and stays known when a setting is added. A cell with another key counts as missing and is measured again. The
file also holds the version and the commit of the code that measured it; a cell of an older version is kept and marked,
and ``--fresh`` measures it again.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import unteach
from unteach.config import ForgetConfig, Method
from unteach.evaluation.scores import library_versions, write_json
from unteach.method.losses import LOSSES
from unteach.writing import json_sha256, markdown_table

__all__ = ["KEY_DEFAULTS", "Cell", "CellFolder", "differing", "thinned"]

CURVE = ("nll_forget", "forget_loss", "grad_norm", "divergence")
KEY_DEFAULTS: dict[str, dict[str, Any]] = {
    "ForgetConfig": {
        "documents": "", "out": "", "general": None, "keep": None, "holdout": None, "reference": None,
        "questions": None, "keep_questions": None, "question_template": None, "keep_batch": 16, "keep_weight": 1.0,
        "alternates": None,
        "base": None, "text_field": "text", "skip_unreadable": False, "document_mode": "chunk", "max_tokens": None,
        "general_tokens": None, "general_mib": 64, "batch": 16, "general_batch": 16, "micro_batch": None,
        "trainable": "blocks",
        "method": {}, "phases": [], "precision": {}, "compile": False, "checkpoint_activations": False, "stop": {},
        "divergence_form": "difference",
        "expected_steps": 100, "max_steps": 500, "evaluate_every": 20, "probes": 64, "checkpoint_every": 20,
        "keep_checkpoints": 2, "seed": 0, "device": "auto", "track": "none", "private": False,
        "save_dtype": "auto", "threads": None, "adapter": None, "rank": None, "base_bits": None, "save": "merged",
        "state_bits": 32,
    },
    "Method": {
        "optimizer": "mean_teacher", "optimizer_options": {}, "loss": "nlul", "loss_options": {}, "goal": "base",
        "divergence": "kl", "token_share": 0.25, "loops_every": 4, "loops_once_found": False, "alpha": None,
        "lr": None, "momentum": 0.95, "teacher_rate": None, "damping": None, "project_conflicts": False,
        "anchor": 0.0, "alpha_growth": 0.0, "hold_budget": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "weight_decay": 0.0,
        "warmup": 100, "steps": None,
    },
    "loss npo": {"beta": 0.1, "ratio": "sum"},
    "loss nlul": {"tolerance": 0.0},
    "loss match": {"pull": "softplus", "margin": 0.0, "slope": 1.0},
    "loss simnpo": {"beta": 4.5, "delta": 0.0},
    "loss wga": {"beta": 1.0},
    "loss satimp": {"beta1": 5.0, "beta2": 1.0},
    "loss undial": {"beta": 10.0},
    "loss clamped_entropy": {"threshold": 0.5},
    "loss jensun": {"token": 0},
    "loss dpo": {"beta": 0.1},
    "loss rmu": {"layer": None, "coefficient": 20.0, "seed": 0},
    "Precision": {"forget": "auto", "divergence": "auto"},
    "Stop": {
        "metric": None, "parity": None, "utility_floor": 0.5, "plateau": 3, "refine": True, "unmet": "nearest",
        "probes": None,
    },
    "RecoverySettings": {"lr": 1e-4, "steps": 100, "batch": 16, "max_tokens": 512},
    "RelearningSettings": {"lr": 1e-4, "steps": [0, 5, 10, 20, 40, 80], "batch": 24},
    "AuditSettings": {"quick": True},
    "TheoremSettings": {
        "seed": 0, "lr": 0.4, "teacher_rate": 0.5, "damping": 0.1, "momenta": [0.0, 0.9], "loss_weight": 0.1,
        "num_steps": 40, "halvings": 7, "ridge": 0.01,
    },
}  # fmt: skip
"""What a setting is where a key does not name it; for ever: cells have been measured with these.

A new setting is added with the default it has when it comes. A default that changes later does not change here: keys
then name the new value, and cells of the old one are not taken for cells of the new.
"""


def differing(settings: Any) -> dict[str, Any]:
    """The fields of a settings dataclass that differ from ``KEY_DEFAULTS``, as plain JSON values."""
    frozen, found = KEY_DEFAULTS.get(type(settings).__name__, {}), {}
    if isinstance(settings, ForgetConfig | Method):
        settings = settings.chosen()
    for field in dataclasses.fields(settings):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = _plain(getattr(settings, field.name))
        if field.name == "loops_every":
            value = None if settings.loops_once_found else value or None  # never: found in no cell that is shipped
        if field.name == "loss_options":
            usually = KEY_DEFAULTS.get(f"loss {settings.loss}", {})  # of a loss without an entry every option is named
            every = LOSSES[settings.loss].hyper | value
            value = {name: option for name, option in every.items() if (name, option) not in usually.items()}
        if field.name != "loops_once_found" and value != frozen.get(field.name, _plain(default)):
            found[field.name] = value
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return differing(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method with one seed."""

    name: str
    """Of the file, and of the row in the table."""
    seed: int
    settings: Mapping[str, Any]
    """All that the result depends on, as plain JSON values: what differs from ``KEY_DEFAULTS``, and hashes of models
    and texts; no paths."""
    run: Callable[[], dict[str, Any]]
    """Measures the cell: what its file holds besides name, seed, key and versions."""
    needs: Sequence[Cell] = ()
    """Cells whose contents ``run`` reads; it measures them where they are missing."""

    @property
    def key(self) -> str:
        """Hash of name, seed and settings."""
        content = {"name": self.name, "seed": self.seed, "settings": self.settings}
        return json_sha256(content)[:16]

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


class CellFolder:
    """A folder of cells; ``say`` gets the lines for people, ``fresh`` measures cells of older versions again."""

    def __init__(self, folder: Path, say: Callable[[str], None], *, fresh: bool = False) -> None:
        self.folder, self.say, self.fresh = folder, say, fresh

    def path(self, cell: Cell) -> Path:
        """A cell's file."""
        return self.folder / f"{cell.name}-seed-{cell.seed}.json"

    def read_all(self) -> list[dict[str, Any]]:
        """What all files of cells hold that can be read, in the order of their names."""
        return [content for file in sorted(self.folder.glob("*-seed-*.json")) if (content := _read(file))]

    def state(self, cell: Cell) -> str:
        """``done``, ``older version``, ``other settings`` or ``missing``."""
        content = _read(self.path(cell))
        if content is None or content.get("key") != cell.key:
            return "missing" if content is None else "other settings"
        return "done" if content["versions"]["unteach"] == unteach.__version__ else "older version"

    def is_usable(self, cell: Cell) -> bool:
        """Whether a cell need not be measured."""
        return self.state(cell) in (("done",) if self.fresh else ("done", "older version"))

    def get(self, cell: Cell) -> dict[str, Any]:
        """A cell's content: read if it is usable, else measured and written."""
        if self.is_usable(cell) and (content := _read(self.path(cell))):
            return content
        self.say(f"measuring {cell}")
        started = time.perf_counter()
        found = json.loads(json.dumps(cell.run()), parse_constant=lambda name: None)  # JSON has no NaN
        gc.collect()
        torch.cuda.empty_cache()  # a worker that waits for its next cell should not keep others from theirs
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        content = {
            "schema": "unteach.cell/2",
            "name": cell.name,
            "seed": cell.seed,
            "key": cell.key,
            "settings": dict(cell.settings),
            **found,
            "seconds": round(time.perf_counter() - started, 1),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": library_versions(),
            "commit": _commit(),
            "hardware": {"gpu": gpu, "cpu": platform.machine(), "threads": torch.get_num_threads()},
        }
        write_json(self.path(cell), content)
        return content

    def complete(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Measure what is missing, with the table of states before, and after every cell; all contents, in order."""
        self.say(self.states(cells))
        for cell in cells:
            if not self.is_usable(cell):
                self.get(cell)
                self.say(self.states(cells))
        return self.finished(cells)

    def finished(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """The contents of those cells that are done, measuring nothing."""
        return [self.get(cell) for cell in cells if self.is_usable(cell)]

    def states(self, cells: Sequence[Cell]) -> str:
        """The table of what is done and what is missing: a row per name, a column per seed."""
        names, seeds = list(dict.fromkeys(c.name for c in cells)), sorted({c.seed for c in cells})
        of = {(cell.name, cell.seed): self.state(cell) for cell in cells}
        rows = [[name, *(of.get((name, seed), "–") for seed in seeds)] for name in names]
        missing = sum(not self.is_usable(cell) for cell in cells)
        table = markdown_table(["cell", *(f"seed {seed}" for seed in seeds)], rows)
        return f"{table}\n{len(cells) - missing} done, {missing} missing in {self.folder}"


def _read(file: Path) -> dict[str, Any] | None:
    """What a cell's file holds, whatever it was measured with; None where there is none that can be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


@functools.cache
def _commit() -> str | None:
    """The commit that this code is of, marked where files have changed since; None outside its repository."""
    is_of_it = "ls-files --error-unmatch cells.py"  # or it is installed inside another repository
    try:
        for words in (is_of_it, "describe --always --dirty --exclude=* --abbrev=12"):
            command = ["git", *words.split()]
            done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def thinned(rows: Sequence[Mapping[str, Any]], points: int = 60) -> dict[str, list[Any]]:
    """A run's training curve from the lines of ``metrics.jsonl``: evenly spaced steps, both ends among them; α where
    it moves."""
    count = min(points, len(rows))
    kept = [rows[round(place * (len(rows) - 1) / max(1, count - 1))] for place in range(count)]
    curve: dict[str, list[Any]] = {"step": [row["step"] for row in kept], "phase": [row["phase"] for row in kept]}
    names = [*CURVE, *(["alpha"] if all("alpha" in row for row in kept) else [])]
    return curve | {name: [float(f"{row[name]:.4g}") for row in kept] for name in names}
