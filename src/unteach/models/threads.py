"""How many CPU threads a run computes with: chosen once, said, written to its config, kept when it is resumed.

PyTorch counts the cores of the machine. Where a container may use two of 64, 64 threads wait for each other, and a run
takes several times as long.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from unteach.config import ForgetConfig
from unteach.models.distributed import ranks

__all__ = ["choose_threads", "usable_cores", "with_threads"]

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def with_threads(config: ForgetConfig, say: Callable[[str], None]) -> ForgetConfig:
    """On a CPU, choose the threads of a run, say how many, and write them into its config; torchrun gives its processes
    one each."""
    if config.resolved_device().type != "cpu" or ranks() > 1:
        return config
    threads, reason = choose_threads(config.threads)
    say(f"threads: {threads} ({reason})")
    return dataclasses.replace(config, threads=threads)


def choose_threads(given: int | None) -> tuple[int, str]:
    """Set the number of CPU threads, and give it back with its reason.

    A given number wins, then ``OMP_NUM_THREADS``, then a number set before by ``torch.set_num_threads``, that is one
    that PyTorch would not have chosen by itself.
    """
    current = torch.get_num_threads()
    everywhere, here = range(os.cpu_count() or 1), _allowed()
    unset = {len(everywhere), len(here), len(_cores(everywhere)), len(_cores(here))}
    if given is not None:
        chosen, reason = given, "as the settings say"
    elif os.environ.get("OMP_NUM_THREADS"):
        chosen, reason = current, "as OMP_NUM_THREADS says"
    elif current not in unset:
        chosen, reason = current, "as torch.set_num_threads says"
    else:
        chosen, reason = (
            min(current, usable_cores()),
            "physical cores that are free to use; --threads sets another number",
        )
    if chosen != current:
        torch.set_num_threads(chosen)
    return chosen, reason


def usable_cores() -> int:
    """Physical cores that this process may use: of its CPUs, at most as many as its container is given."""
    return max(1, min(len(_cores(_allowed())), _quota()))


def _allowed() -> list[int]:
    """The CPUs, two for a core with two threads, that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _cores(cpus: range | list[int]) -> set[str]:
    """The physical cores of CPUs; each CPU for one where the system does not say."""
    return {_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}


def _quota() -> int:
    """Cores that the container's share of time amounts to, as Linux's control groups say (version 2, or 1)."""
    limit, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if not limit:
        limit, period = (_read(_CGROUP / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if limit.isdecimal() and period.isdecimal():  # "max" and -1: no limit
        return -(-int(limit) // int(period))
    return os.cpu_count() or 1


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
