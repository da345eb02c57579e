"""How much memory and disk this machine still has."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

__all__ = ["free_device_memory", "free_disk", "free_host_memory"]


def free_device_memory(device: torch.device) -> int | None:
    """Free memory of the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def free_host_memory() -> int | None:
    """Main memory that can still be used: what the system has, within what this process may use of it."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(
                int((group / limit).read_text()) - int((group / used).read_text()) + _reclaimable(group / limit)
            )
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(0, min(limits)) if limits else None


def _reclaimable(limit: Path) -> int:
    """File copies in a control group's memory, which the system gives up when memory is wanted."""
    lines = limit.with_name("memory.stat").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "total_inactive_file ")))


def free_disk(out: str) -> int | None:
    """Free disk where the run folder will be."""
    folder = Path(out or ".").expanduser().resolve()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
