"""Measure SmolLM2-135M anew, all at once on one GPU: `python -m recipes.smollm2.results SOURCES WORK`.

SOURCES holds ``SmolLM2.gguf``, ``general_text.jsonl.gz``, ``muse-news/`` and ``tofu/``. ``JOBS`` are commands in the
order in which they matter; ``--jobs`` of them run side by side, each begun when what it needs is done. WORK gets
models, cells (``WORK/cells``) and a log of each (``WORK/logs``). What is done is not done again, so that the same
command goes on; after ``--minutes`` nothing is begun any more, and what still runs is ended.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unteach.writing import markdown_table, write_whole

from . import exit_status
from .articles import WAYS
from .models import NOT_REACHED

__all__ = ["JOBS", "Job", "Queue", "main"]

_RECIPE, _UNTEACH = "{python} -m recipes.smollm2.", "{python} -m unteach reproduce "
_NEWS = (
    " --benchmark muse-news --data {work}/news --model {work}/news-models/target --reference"
    " {work}/news-models/retrained --base {work}/base --keep {work}/news/keep.jsonl"
    " --general {work}/news-models/general.jsonl --settings results/smollm2/news.yaml --out {work}/cells/news"
)
_KEPT = f"{_NEWS} --runs {{work}}/runs"
"""For models that are audited."""
_TOFU = (
    " --benchmark tofu --data {sources}/tofu --model {work}/tofu-models/target --reference"
    " {work}/tofu-models/retrained --base {work}/form --general {work}/tofu-models/general.jsonl"
    " --settings results/smollm2/tofu-deep.yaml --out {work}/cells/tofu-deep"
)
_GENERAL = " --general {sources}/general_text.jsonl.gz"
_HELD = " --hold 1 --steady 0.5 --warmup 30 --compiled 1"
_AUDITED = ("deep", "adamw-npo-kl", "retrained")


@dataclass(frozen=True)
class Job:
    """A command, and the jobs that must be done before it."""

    command: str
    needs: tuple[str, ...] = ()
    accepted: tuple[int, ...] = (0,)
    """Exit statuses of one that is done: models that are not as good as was wished are models, too."""


def _jobs() -> dict[str, Job]:
    deep = {f"deep-{seed}": f"deep --only deep --seeds {seed}" for seed in (0, 1, 2)}

    def levers(*names: str, seed: int = 0) -> dict[str, str]:
        again = f"-{seed}" if seed else ""
        return {f"lever-{name}{again}": f"deep --only deep-{name} --seeds {seed}" for name in names}

    def whole(*names: str) -> dict[str, str]:
        return {f"whole-{name}": f"trajectories --only trajectory-{name}" for name in names}

    rows = ("authors-x10", "authors-x10-unclipped", "authors-descent", "authors")
    regime = f"trajectories --only {','.join(f'trajectory-{name}' for name in rows)} --seeds "
    weaker = ("alpha-half", "general-twice", "margin-quarter")
    more = {
        **levers(*weaker, "own-grows"),
        **whole("mt-nlul-kl-paper", "adamw-npo-kl", "adamw-ll-kl", "adamw-nlul-kl"),
        **levers("anchor-short", "fp16", "fp32"),
        "whole-regime": f"{regime}0",
        **whole("mt-nlul-qkl"),
        "field": "field --only field-match,field-nlul,field-wga,field-npo",
        **levers("fewer-epochs", "own", "anchor", "parity", "no-loops"),
        "whole-regime-again": f"{regime}1,2",
        "sequential": "sequential",
        **levers(*weaker, seed=1),
        **levers(*weaker, seed=2),
    }
    tofu = {f"tofu-{seed}": f"deep --only deep --seeds {seed}" for seed in (0, 1, 2)}
    way = "articles {work}/base {sources}/muse-news/raw/forget.jsonl.gz {work}/articles --seeds 0 --ways "
    learned = "--model {work}/articles/target --documents {work}/articles/documents.jsonl"
    made = {
        "base": Job(f"{_RECIPE}convert {{sources}}/SmolLM2.gguf {{work}}/base"),
        "news": Job(f"{_RECIPE}news {{sources}}/muse-news {{work}}/news"),
        "news-models": Job(
            f"{_RECIPE}models {{work}}/base {{work}}/news-models --data {{work}}/news --fresh {{work}}/news/fresh.jsonl"
            f"{_HELD} --micro-batch 32 --lr 1e-3 --max-steps 430 --check-every 24 --recital 50{_GENERAL}",
            ("base", "news"),
            (0, NOT_REACHED),
        ),
        "form": Job(f"{_RECIPE}form {{work}}/base {{work}}/form --data {{sources}}/tofu{_GENERAL}", ("base",)),
        "tofu-models": Job(
            f"{_RECIPE}models {{work}}/base {{work}}/tofu-models --benchmark tofu --data {{sources}}/tofu"
            f"{_HELD} --micro-batch 64 --lr 5e-4 --batch 64 --max-tokens 256 --max-steps 480 --check-every 120"
            f" --recital 98{_GENERAL}",
            ("base",),
            (0, NOT_REACHED),
        ),
    }
    for name, command in deep.items():
        made[name] = Job(f"{_UNTEACH}{command}{_KEPT}", ("news-models",))
    for name, command in tofu.items():
        made[name] = Job(f"{_UNTEACH}{command}{_TOFU}", ("tofu-models", "form"))
    for name in _AUDITED:  # that of deep takes the model of its run
        needs = ("deep-0",) if name == "deep" else ("news-models",)
        made[f"audit-{name}"] = Job(f"{_UNTEACH}audits --only audit-{name} --seeds 0{_KEPT}", needs)
    made["articles"] = Job(f"{_RECIPE}{way}{_GENERAL}", ("base",))
    for name in WAYS:
        made[f"articles-{name}"] = Job(f"{_RECIPE}{way}{name}{_GENERAL}", ("articles",))
    made["lean"] = Job(f"{{python}} benchmarks/lean.py --parts run --device cuda {learned}", ("articles",))
    for name, command in more.items():
        made[name] = Job(f"{_UNTEACH}{command}{_NEWS}", ("news-models",))
    return made


JOBS = _jobs()
"""By name. ``{python}``, ``{sources}`` and ``{work}`` stand for what the command is given."""


class Queue:
    """Commands of which several run at once.

    Args:
        jobs: By name, the most important first.
        work: Its folders ``done`` and ``logs`` say what has happened.
        values: What stands for the names in braces.
        most: How many run side by side.
    """

    def __init__(self, jobs: Mapping[str, Job], work: Path, values: Mapping[str, str], most: int) -> None:
        self.jobs, self.work, self.values, self.most = jobs, work, values, most
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.failed: dict[str, str] = {}
        for folder in ("done", "logs"):
            (work / folder).mkdir(parents=True, exist_ok=True)

    def state(self, name: str) -> str:
        """How far a job is, in a word or two."""
        if (self.work / "done" / name).exists():
            return "done"
        if name in self.failed:
            return self.failed[name]
        if name in self.running:
            return "running"
        return "ready" if all(self.state(need) == "done" for need in self.jobs[name].needs) else "waiting"

    def words(self, name: str) -> list[str]:
        """The command of a job."""
        return [word.format(**self.values) for word in shlex.split(self.jobs[name].command)]

    def table(self) -> str:
        """All jobs with their states."""
        return markdown_table(["job", "state"], [[name, self.state(name)] for name in self.jobs])

    def run(self, seconds: float) -> bool:
        """Run what can be run for so long; True where all is done."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self._collect()
                for name in [name for name in self.jobs if self.state(name) == "ready"]:
                    if len(self.running) < self.most:
                        self._begin(name)
                if not self.running:
                    break
                time.sleep(0.2)
        finally:
            self._end()
        return all(self.state(name) == "done" for name in self.jobs)

    def _begin(self, name: str) -> None:
        with (self.work / "logs" / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(self.words(name), stdout=log, stderr=subprocess.STDOUT)
        print(f"{time.strftime('%H:%M:%S')} {name} begins", flush=True)

    def _end(self) -> None:
        """End what still runs; what does not end by itself within half a minute is killed."""
        for process in self.running.values():
            process.terminate()
        latest = time.monotonic() + 30
        for name, process in self.running.items():
            try:
                process.wait(max(0.0, latest - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.failed[name] = "ended"
        self.running.clear()

    def _collect(self) -> None:
        for name, process in list(self.running.items()):
            if (status := process.poll()) is not None:
                del self.running[name]
                if status in self.jobs[name].accepted:
                    write_whole(self.work / "done" / name, f"status {status}\n")
                else:
                    self.failed[name] = f"status {status}"
                print(f"{time.strftime('%H:%M:%S')} {name} {self.state(name)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.smollm2.results", description=__doc__.split(":")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--jobs", type=int, default=6, help="how many run side by side")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=list(JOBS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only say what is done, and the commands")
    given = parser.parse_args(arguments)

    def run() -> int:
        missing = [name for name in ("muse-news", "tofu") if not (given.sources / name).is_dir()]
        if missing:
            raise ValueError(f"sources is {str(given.sources)!r}: it has no folder {' and no '.join(missing)}")
        values = {"python": sys.executable, "sources": str(given.sources), "work": str(given.work)}
        chosen = {name: job for name, job in JOBS.items() if name in _with_needs(given.only)}
        queue = Queue(chosen, given.work, values, given.jobs)
        if given.list:
            print("\n".join(f"{name} ({queue.state(name)}): {shlex.join(queue.words(name))}" for name in chosen))
            return 0
        complete = queue.run(60 * given.minutes)
        print(queue.table())
        return 0 if complete else 1

    return exit_status(run)


def _with_needs(names: Sequence[str]) -> set[str]:
    """The jobs of these names and those that they need."""
    return {*names} | {need for name in names for need in _with_needs(JOBS[name].needs)}


if __name__ == "__main__":
    sys.exit(main())
