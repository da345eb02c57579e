"""Two ranks (gloo), of which one is killed: the run ends with one clear line, and goes on to the same bytes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import make_inputs, names_in, result_of, settings

from steps import mean_teacher
from unteach.settings import to_yaml


def two_ranks(*words):
    """What torchrun says of two ranks, its status, and how long it took."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    began = time.monotonic()
    ended = subprocess.run([*launcher, *map(str, words)], capture_output=True, text=True, timeout=600)
    return ended.stderr, ended.returncode, time.monotonic() - began


@pytest.mark.slow
def test_one_of_two_ranks_is_killed(tmp_path):
    folder = make_inputs(tmp_path)
    config = settings(folder, folder / "never", method=mean_teacher(token_share=0.25, loops_every=0))
    (folder / "config.yaml").write_text(to_yaml(config))
    begin = ("forget", "--config", folder / "config.yaml", "--out")
    said, _, whole = two_ranks("-m", "unteach", *begin, folder / "whole")
    assert "stopped after 3 steps" in said
    for doomed, step in ((0, 2), (1, 3)):
        run = folder / f"rank_{doomed}"
        said, status, seconds = two_ranks(Path(__file__).with_name("rank_that_dies.py"), doomed, step, *begin, run)
        assert status == 1
        ours = [line for line in said.splitlines() if line.startswith("unteach: ")]
        resume = f"unteach forget --resume {run}"
        assert ours == [f"unteach: another process of this run has ended; go on with: {resume}"], said
        assert seconds < 10 * whole + 60, "it waits for what will not come"  # gloo itself would wait half an hour
    run = folder / "rank_0"
    said, _, _ = two_ranks("-m", "unteach", "forget", "--resume", run)
    assert "goes on from step 1" in said
    assert result_of(run) == result_of(folder / "whole")
    assert names_in(run) == names_in(folder / "whole")
