"""Memory and CPU share, read from files as Linux and its containers write them."""

import os
from pathlib import Path

from models.host import available_memory_bytes, usable_cpus


def _meminfo(folder: Path, kib: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal:       99999999 kB\nMemFree:          1 kB\nMemAvailable:   {kib} kB\n")
    return path


def test_without_a_container_limit_the_kernels_estimate_counts(tmp_path: Path) -> None:
    assert available_memory_bytes(cgroup=tmp_path, meminfo=_meminfo(tmp_path, 1000)) == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert available_memory_bytes(cgroup=tmp_path, meminfo=_meminfo(tmp_path, 1000)) == 1000 * 1024


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert available_memory_bytes(cgroup=tmp_path, meminfo=_meminfo(tmp_path, 1000)) == 400_000


def test_there_is_an_answer_without_proc(tmp_path: Path) -> None:
    assert available_memory_bytes(cgroup=tmp_path, meminfo=tmp_path / "none") > 0


def test_a_containers_cpu_quota_counts(tmp_path: Path) -> None:
    affinity = len(os.sched_getaffinity(0))
    assert usable_cpus(cgroup=tmp_path) == affinity
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(cgroup=tmp_path) == affinity
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cpus(cgroup=tmp_path) == 1
