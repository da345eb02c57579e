"""`unteach reproduce NAME`: the paper's experiments by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import nearest_name
from unteach.errors import InputError

__all__ = ["NAMES", "ReproduceOptions", "run"]

NAMES = {"theorem": "Theorem 1: the mean teacher beside natural-gradient descent"}


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """What the command takes."""

    name: str = ""
    """Which experiment: theorem."""
    out: Path = Path("results")
    """Folder for its table and figure."""
    seed: int = 0
    """Of the data and the start."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: ReproduceOptions) -> dict[str, Any]:
    """Run an experiment and return what it found."""
    if options.name not in NAMES:
        nearest = nearest_name(options.name, NAMES)
        raise InputError(f"name is {options.name!r}: it must be one of {', '.join(NAMES)}{nearest}")
    from unteach.experiments.theorem import Settings, draw, format_table, run_experiment

    result, drawn = run_experiment(Settings(seed=options.seed))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "theorem.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    draw(result, drawn, options.out / "theorem.png")
    if not options.json:
        print(format_table(result))
        print(f"Written: {options.out / 'theorem.json'} and {options.out / 'theorem.png'}")
    return result
