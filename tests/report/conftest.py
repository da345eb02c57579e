from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import make_hostile, make_references, make_run

from unteach.report import write_report


@pytest.fixture(scope="session")
def full_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one with two seeds, and both references."""
    folder = tmp_path_factory.mktemp("full")
    runs = [make_run(folder / f"mt{seed}", seed=seed, steps=40, every=20) for seed in (0, 1)]
    runs.append(make_run(folder / "adamw", "adamw-npo-kl", steps=60, every=20))
    return write_report([*runs, make_references(folder / "references.json")], folder / "out" / "report.html")


@pytest.fixture(scope="session")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Markup in every text that a model, a document or a user gave."""
    folder = tmp_path_factory.mktemp("hostile")
    return write_report(make_hostile(folder), folder / "report.html")
