"""Kill runs at random moments and resume them, again and again, until they end.

python tests/faults/killing.py CONFIG.yaml FOLDER --kills 10 --seed 0

Everything is imported once; every run is a fork of this process. A moment is an amount of the run's own CPU time, drawn
from what a whole run takes: it means the same on a busy machine. Runs are FOLDER/whole, which nothing disturbs, and
FOLDER/run_0, run_1, ..., each killed until it ends. Prints one JSON line: how many kills there were, and the runs.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.job.run import run_forget
from unteach.job.same_run import ended_already
from unteach.settings import from_yaml


def begun(config_file, out):
    """A process that runs the job, or goes on with it; its number."""
    child = os.fork()
    if child:
        return child
    with open(f"{out}.log", "a", buffering=1) as log:
        sys.stdout = sys.stderr = log
        try:
            config = from_yaml(ForgetConfig, config_file, out=str(out))
            run_forget(config, resume=(out / "config.yaml").exists(), measurements=("nll_general",))
        except InputError as error:  # it may have been killed at its very end
            print(error)
            os._exit(0 if ended_already(out) else 1)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
            os._exit(1)
    os._exit(0)


def seconds_of(process):
    """CPU time of another process so far; none where it is gone."""
    try:
        return time.clock_gettime(~process << 3 | 2)  # what clock_getcpuclockid(3) gives on Linux
    except OSError:
        return 0.0


def ended_before(process, moment):
    """Kill a process when it has computed for so many seconds; its status and CPU time if it ends before that."""
    while True:
        ended, status, used = os.wait4(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        if seconds_of(process) >= moment:
            os.kill(process, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            return None if status == -signal.SIGKILL else (status, moment)
        time.sleep(0.0005)


def whole_time(config_file, out):
    """CPU seconds of a run that nothing disturbs."""
    status, seconds = ended_before(begun(config_file, out), float("inf"))
    assert status == 0, Path(f"{out}.log").read_text()
    return seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws, longest = random.Random(options.seed), whole_time(options.config, options.folder / "whole")
    kills, runs = 0, []
    while kills < options.kills or len(runs) == 0:
        out = options.folder / f"run_{len(runs)}"
        ended = None
        while ended is None:
            moment = draws.uniform(0, longest) if kills < options.kills else float("inf")
            ended = ended_before(begun(options.config, out), moment)
            kills += ended is None
        assert ended[0] == 0, Path(f"{out}.log").read_text()
        runs.append(out.name)
    print(json.dumps({"kills": kills, "runs": runs}))


if __name__ == "__main__":
    main()
