"""How many CPU threads are chosen, on machines that are written down."""

from __future__ import annotations

import pytest
import torch

from unteach.models import threads
from unteach.models.threads import choose_threads, usable_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of so many CPUs, two to a core, on some of which this process may run, in a container."""
    before = torch.get_num_threads()

    def build(cpus: int, allowed: int, quota: str = "max 100000") -> None:
        for cpu in range(cpus):
            file = tmp_path / f"cpu/cpu{cpu}/topology/thread_siblings_list"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{cpu % (cpus // 2)},{cpu % (cpus // 2) + cpus // 2}\n")
        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(threads, "_CPUS", tmp_path / "cpu")
        monkeypatch.setattr(threads, "_CGROUP", tmp_path)
        monkeypatch.setattr("os.cpu_count", lambda: cpus)
        monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(allowed)), raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    yield build
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cpus", "allowed", "quota", "cores"),
    [(8, 8, "max 100000", 4), (8, 2, "max 100000", 2), (64, 64, "200000 100000", 2), (64, 64, "150000 100000", 2),
     (64, 64, "", 32), (2, 2, "50000 100000", 1)],
)  # fmt: skip
def test_physical_cores_that_may_be_used(machine, cpus, allowed, quota, cores):
    machine(cpus, allowed, quota)
    assert usable_cores() == cores
    torch.set_num_threads(cpus)  # as PyTorch may choose by itself
    threads, reason = choose_threads(None)
    assert (threads, torch.get_num_threads()) == (cores, cores)
    assert "core" in reason


def test_what_was_set_before_wins(machine, monkeypatch):
    machine(64, 64, "200000 100000")
    torch.set_num_threads(3)
    assert choose_threads(None) == (3, "as torch.set_num_threads says")
    torch.set_num_threads(64)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert choose_threads(None) == (64, "as OMP_NUM_THREADS says")
    assert choose_threads(5)[0] == torch.get_num_threads() == 5
