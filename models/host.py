"""What this machine lends to a process: memory and CPU share, container limits included. Knows no model."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
#: (folder, limit, use) of memory: control groups of version 2, then of version 1.
_MEMORY_FILES = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


class HostMemoryError(RuntimeError):
    """There is not so much host memory."""


def available_memory_bytes(*, cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Memory that can be taken without swapping: the kernel's estimate, or what the container's limit leaves."""
    available = _meminfo_available(meminfo)
    for folder, limit_file, used_file in _MEMORY_FILES:
        limit, used = _read_number(cgroup / folder / limit_file), _read_number(cgroup / folder / used_file)
        if limit is not None and used is not None:
            taken = used - _cached_file_bytes(cgroup / folder / "memory.stat")
            available = min(available, max(limit - taken, 0))
    return available


def usable_cpus(*, cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may run on, by affinity and by the container's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup / "cpu.max"  # version 2: "max 100000" or "200000 100000"
    if quota.is_file():
        share, period = map(_number, quota.read_text().split())
    else:
        share, period = (_read_number(cgroup / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if share is None or period is None:
        return affinity
    return min(affinity, max(1, math.ceil(share / period)))


def _cached_file_bytes(statistics: Path) -> int:
    """What a control group's use holds of cached files. They make room when it is asked for, as in the kernel's
    estimate: weights that were just read are no memory that is taken."""
    if not statistics.is_file():
        return 0
    counts = dict(line.split() for line in statistics.read_text().splitlines())
    # Version 1 says what belongs to a limit in total_...; the bare names leave out the groups below it.
    return sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in ("active_file", "inactive_file"))


def _meminfo_available(meminfo: Path) -> int:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no /proc (macOS): assume half is in use


def _read_number(path: Path) -> int | None:
    """None where there is no such file or no limit."""
    return _number(path.read_text().strip()) if path.is_file() else None


def _number(text: str) -> int | None:
    """None for no limit ("max", or -1)."""
    return int(text) if text.isdecimal() else None
