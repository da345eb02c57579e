"""The longest files begin first, so that two workers end at about the same time; a run without plan and report."""

from types import SimpleNamespace

import pytest

LONGEST = (
    "test_sharded.py", "test_cli.py", "test_page.py", "test_plan.py", "test_micro.py", "test_loop.py",
    "test_theory.py", "test_reproduce.py", "test_generation.py", "test_losses.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture
def run_alone(monkeypatch):
    """``unteach forget`` neither plans nor draws, which takes two thirds of a tiny run and has tests of its own."""
    monkeypatch.setattr("unteach.job.command.planning.plan", lambda config: SimpleNamespace(problems=list))
    monkeypatch.setattr("unteach.report.write_report", lambda runs, out: out)
