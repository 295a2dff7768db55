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


def test_a_containers_memory_limit_counts_and_files_that_it_caches_do_not(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("130000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 90000\nfile 40000\nshmem 10000\ninactive_file 20000\nactive_file 10000\n"
    )
    assert available_memory_bytes(cgroup=tmp_path, meminfo=_meminfo(tmp_path, 1000)) == 400_000


def test_a_memory_limit_of_the_first_version_of_control_groups_counts(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("500000\n")
    (folder / "memory.usage_in_bytes").write_text("130000\n")
    (folder / "memory.stat").write_text(
        "inactive_file 1\nactive_file 2\ntotal_inactive_file 20000\ntotal_active_file 10000\n"
    )
    assert available_memory_bytes(cgroup=tmp_path, meminfo=_meminfo(tmp_path, 1000)) == 400_000
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_memory_bytes(cgroup=tmp_path, meminfo=_meminfo(tmp_path, 1000)) == 1000 * 1024


def test_there_is_an_answer_without_proc(tmp_path: Path) -> None:
    assert available_memory_bytes(cgroup=tmp_path, meminfo=tmp_path / "none") > 0


def test_a_containers_cpu_quota_counts(tmp_path: Path) -> None:
    affinity = len(os.sched_getaffinity(0))
    assert usable_cpus(cgroup=tmp_path) == affinity
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(cgroup=tmp_path) == affinity
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cpus(cgroup=tmp_path) == 1


def test_a_cpu_quota_of_the_first_version_of_control_groups_counts(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cpus(cgroup=tmp_path) == len(os.sched_getaffinity(0))
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    assert usable_cpus(cgroup=tmp_path) == 1
