"""Benchmarks run: a rename in ``src`` must not be found out on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
TINY = ("adapters", "lean", "optimizer", "paper_rows", "precision", "scaling", "step", "vocab_head")


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs_on_tiny_models(name):
    command = [sys.executable, f"benchmarks/{name}.py", "--tiny", "--device", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr, "a way failed, and others were measured"
    assert "| " in ended.stdout
