"""What this machine lends to a process: memory and CPU share, container limits included. Knows no model."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes(*, cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Memory that can be taken without swapping: the kernel's estimate, or what the container's limit leaves."""
    available = _meminfo_available(meminfo)
    limit, used = _read_number(cgroup / "memory.max"), _read_number(cgroup / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def usable_cpus(*, cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may run on, by affinity and by the container's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup / "cpu.max"  # "max 100000" or "200000 100000"
    if not quota.is_file():
        return affinity
    share, period = quota.read_text().split()
    return affinity if share == "max" else min(affinity, max(1, math.ceil(int(share) / int(period))))


def _meminfo_available(meminfo: Path) -> int:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no /proc (macOS): assume half is in use


def _read_number(path: Path) -> int | None:
    """None where there is no such file or no limit ("max")."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdecimal() else None
