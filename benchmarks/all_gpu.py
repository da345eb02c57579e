"""Run the GPU benchmarks one after the other, each in a process of its own with a time limit, and keep their output.

python benchmarks/all_gpu.py [--out FOLDER] [--only optimizer step-7B ...] [--tiny]

Results go to FOLDER/results.jsonl, what each prints to FOLDER/NAME.log and to the terminal. One that fails or takes too
long does not stop the others.
"""

import argparse
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = {  # name: (arguments, seconds)
    "optimizer": (["optimizer.py", "--parameters", "2e9"], 60),
    "vocab_head": (["vocab_head.py"], 90),
    "step-1.1B": (["step.py", "--shape", "1.1B", "--micro-batch", "20", "--plain-micro-batch", "4"], 200),
    "step-7B": (
        ["step.py", "--shape", "7B", "--micro-batch", "4", "--repeats", "3", "--ways", "fp16", "fp16+compile"],
        200,
    ),
    "precision": (["precision.py"], 80),
    "precision-adapters": (["precision.py", "--adapters", "16", "--models", "micro:target", "1.1B"], 80),
    "adapters-7B": (["adapters.py"], 300),
    "scaling": (["scaling.py"], 220),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmark-results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    source = str(HERE.parent / "src")
    environment = os.environ | {"PYTHONPATH": source, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    summary = []
    for name in options.only:
        arguments, limit = PARTS[name]
        command = [sys.executable, *arguments, "--json", str(out / "results.jsonl")] + ["--tiny"] * options.tiny
        print(f"\n=== {name}: {' '.join(arguments)} (at most {limit} s)", flush=True)
        started = time.perf_counter()
        with open(out / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=HERE,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = copy_output(process, log, started + limit)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with the compiler's processes
                process.wait()
        summary.append(f"{name}: {status}, {time.perf_counter() - started:.0f} s")
        print(f"=== {summary[-1]}", flush=True)
    print("\n" + "\n".join(summary))


def copy_output(process, log, deadline):
    """Copy what a process prints until it ends or the time is up; say how it ended."""
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    while selector.select(timeout=max(0.0, deadline - time.perf_counter())):
        piece = os.read(process.stdout.fileno(), 2**16)
        if not piece:
            return f"exit status {process.wait()}"
        log.write(piece)
        log.flush()
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    return "stopped at its time limit"


if __name__ == "__main__":
    main()
