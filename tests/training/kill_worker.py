"""Kill a forget job at random moments, resume it, and compare with an uninterrupted run.

python tests/training/kill_worker.py FOLDER [--kills 10] [--seed 0]

Prints one JSON line: how many kills, and whether the saved models are byte for byte the same.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers of all tests; this file is run by itself
from steps import FORGET, GENERAL, mean_teacher  # noqa: E402
from tiny_models import save_tiny  # noqa: E402
from unteach.config import ForgetConfig, Stop  # noqa: E402
from unteach.job import run_forget  # noqa: E402


def config(folder, out):
    return ForgetConfig(
        model=str(folder / "model"), documents=str(folder / "documents.jsonl"),
        general=str(folder / "general.jsonl"), out=str(folder / out),
        method=mean_teacher(token_share=0.25, loops_every=4),
        batch=8, general_batch=8, general_tokens=24, max_steps=30, evaluate_every=8, checkpoint_every=2, probes=4,
        save_dtype="float32", stop=Stop(metric="verbmem_f <= -1"),  # never met
    )  # fmt: skip


def in_child(folder, out, resume):
    """Fork (everything is imported already), run the job there, and return the child's process id."""
    child = os.fork()
    if child == 0:
        sys.stderr = open(folder / f"{out}.log", "a")  # noqa: SIM115
        try:
            run_forget(config(folder, out), resume=resume)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def exit_code(child, wait=True):
    """Of a child process; None where it still runs."""
    process, status = os.waitpid(child, 0 if wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if process else None


def last_step(run):
    """The last step in the log, which may end in half a line."""
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return 0
    return json.loads(lines[-1])["step"] if lines else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.folder
    save_tiny(folder / "model", "llama")
    for name, texts in (("documents", FORGET), ("general", GENERAL * 2)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    assert exit_code(in_child(folder, "whole", resume=False)) == 0, (folder / "whole.log").read_text()
    draws = random.Random(options.seed)
    moments = sorted(draws.sample(range(1, 29), options.kills))  # steps after which the kills come, a little later
    run, kills, resume, code = folder / "killed", 0, False, None
    while code is None:
        child = in_child(folder, "killed", resume)
        if kills < options.kills:
            while last_step(run) < moments[kills] and code is None:
                time.sleep(0.002)
                code = exit_code(child, wait=False)
            time.sleep(draws.uniform(0, 0.1))
            code = exit_code(child, wait=False) if code is None else code
            if code is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
        else:
            code = exit_code(child)
        resume = (run / "config.yaml").exists() and any((run / "checkpoints").glob("step_*/state.json"))
        if not resume:
            shutil.rmtree(run, ignore_errors=True)
    assert code == 0, (folder / "killed.log").read_text()
    weights = [(folder / out / "model" / "model.safetensors").read_bytes() for out in ("whole", "killed")]
    rows = [(folder / out / "metrics.jsonl").read_text().splitlines() for out in ("whole", "killed")]
    losses = [[json.loads(row)["forget_loss"] for row in side] for side in rows]
    print(json.dumps({"kills": kills, "identical": weights[0] == weights[1] and losses[0] == losses[1]}))


if __name__ == "__main__":
    main()
