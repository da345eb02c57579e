"""SIGKILL at random moments, and again while it is resumed: a run ends with the bytes of one that was left alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import make_inputs, names_in, result_of, settings

from steps import mean_teacher
from unteach.settings import to_yaml


@pytest.mark.parametrize(
    ("kills", "loops_every"), [(10, 0), pytest.param(50, 2, marks=pytest.mark.slow)], ids=["ten", "fifty"]
)
def test_killed_at_random_moments_a_run_ends_with_the_same_bytes(tmp_path, kills, loops_every):
    folder = make_inputs(tmp_path)
    method = mean_teacher(token_share=0.25, loops_every=loops_every)
    (folder / "config.yaml").write_text(to_yaml(settings(folder, folder / "run", method=method)))
    program = Path(__file__).with_name("killing.py")
    words = [sys.executable, program, folder / "config.yaml", folder, "--kills", str(kills)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == kills
    for run in found["runs"]:
        assert result_of(folder / run) == result_of(folder / "whole"), (folder / f"{run}.log").read_text()
        assert names_in(folder / run) == names_in(folder / "whole")
