"""What this machine still has: main memory and disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["free_disk", "free_host_memory"]


def free_host_memory() -> int | None:
    """Main memory that can still be used: what the system has, within what this process may use of it."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if resource is not None:  # ulimit -v counts all addresses, also those of libraries
        allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
        if allowed != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limits.append(allowed - pages * resource.getpagesize())
    for folder, limit, used in (("", "max", "current"), ("memory", "limit_in_bytes", "usage_in_bytes")):
        group = Path("/sys/fs/cgroup", folder)
        try:
            most, now = (int((group / f"memory.{name}").read_text()) for name in (limit, used))
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):  # no such group, or "max"
            continue
        kept = [line.split()[1] for line in lines if line.startswith(("inactive_file ", "total_inactive_file "))]
        limits.append(most - now + sum(map(int, kept)))  # copies of files are given up when memory is wanted
    return max(0, min(limits)) if limits else None


def free_disk(out: str) -> int:
    """Free disk where the run folder will be."""
    folder = Path(out or ".").expanduser().resolve()
    return shutil.disk_usage(next(there for there in (folder, *folder.parents) if there.exists())).free
