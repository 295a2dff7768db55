"""Prefixes come back from real files where that is predicted to take less than computing them, and are computed
elsewhere: counted, and with the same answers. A slow file system is one whose tier looks at a clock that runs fast."""

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from cranked_engine import Engine, tokens
from fake_runner import FakeRunner
from host_memory import SlowOffload, block_bytes, give_host_memory, never
from test_offloaded_prefixes import FINGERPRINT, ask, fill_disk

from server.engine import disk_reads
from server.engine.config import EngineConfig
from server.engine.disk_reads import ComputeSeconds
from server.engine.disk_tier import DiskTier
from server.engine.offloading_cache import OffloadingKVCache
from server.engine.read_speed import MEASURED_FOR
from server.engine.runner import LoadedRunner
from server.engine.step_time import StepTimeModel
from server.engine.worker import make_scheduler

BLOCK_SIZE, DOCUMENT_BLOCKS = 16, 20
DOCUMENT, OTHER = (tokens(random.Random(seed), BLOCK_SIZE * DOCUMENT_BLOCKS) for seed in (0, 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for document in (DOCUMENT, OTHER):
        fill_disk(tmp_path, document)
    return tmp_path


class Clock:
    """Of a tier: seconds that pass with each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def reopened(
    folder: Path, compute_seconds: ComputeSeconds, clock: Callable[[], float] = time.monotonic
) -> tuple[Engine, DiskTier, OffloadingKVCache]:
    """After a restart: nothing in memory, and nobody knows how fast the disk is."""
    engine = Engine(80, BLOCK_SIZE)
    size = block_bytes(engine)
    disk = DiskTier(
        folder, max_bytes=2000 * (size + 1024), fingerprint=FINGERPRINT, block_bytes=size, block_size=BLOCK_SIZE,
        clock=clock,
    )  # fmt: skip
    return engine, disk, give_host_memory(engine, 80, disk=disk, turns=1, compute_seconds=compute_seconds)


def at_once(_context: int, _count: int) -> float:
    return 0.0


def test_where_computing_takes_less_no_more_is_read_than_tells_the_speed(folder: Path) -> None:
    clock = Clock(1e-6)
    engine, disk, cache = reopened(folder, at_once, clock)
    sample = disk.num_readers
    assert ask(engine, "first", [*DOCUMENT, 7]) == sample * BLOCK_SIZE
    assert cache.offload_stats().declined_blocks == DOCUMENT_BLOCKS - sample
    assert ask(engine, "other", [*OTHER, 7]) == 0
    assert cache.offload_stats().declined_blocks == 2 * DOCUMENT_BLOCKS - sample
    read_bytes = disk.stats().read_bytes
    assert ask(engine, "again", [*DOCUMENT, 7]) == BLOCK_SIZE * DOCUMENT_BLOCKS  # which was computed
    assert disk.stats().read_bytes == read_bytes
    engine.assert_nothing_is_held()
    disk.close()


def test_a_disk_that_was_slow_is_tried_again_after_a_while(folder: Path) -> None:
    clock = Clock(1e-6)
    engine, disk, _ = reopened(folder, at_once, clock)
    ask(engine, "first", [*DOCUMENT, 7])
    clock.now += MEASURED_FOR + 1
    assert ask(engine, "other", [*OTHER, 7]) == disk.num_readers * BLOCK_SIZE
    disk.close()


@pytest.mark.parametrize(("seconds", "is_read"), [(1e-9, True), (1.0, False)], ids=["fast files", "slow files"])
def test_the_model_of_steps_decides(folder: Path, seconds: float, is_read: bool) -> None:
    engine, disk, cache = reopened(folder, StepTimeModel().prompt_seconds, Clock(seconds))
    cached = ask(engine, "again", [*DOCUMENT, 7])
    rest = DOCUMENT_BLOCKS - disk.num_readers
    assert cached == BLOCK_SIZE * (DOCUMENT_BLOCKS if is_read else disk.num_readers)
    assert cache.offload_stats().declined_blocks == (0 if is_read else rest)
    engine.assert_nothing_is_held()
    disk.close()


def test_reading_ends_where_files_turn_out_to_be_slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_reads, "MAX_READS", 4)
    clock = Clock(1e-9)
    engine, disk, cache = reopened(folder, StepTimeModel().prompt_seconds, clock)
    assert ask(engine, "first", [*OTHER, 7]) == BLOCK_SIZE * DOCUMENT_BLOCKS
    clock.step = 1.0
    assert ask(engine, "again", [*DOCUMENT, 7]) == BLOCK_SIZE * 4
    assert cache.offload_stats().declined_blocks == DOCUMENT_BLOCKS - 4
    engine.assert_nothing_is_held()
    disk.close()


def test_nobody_waits_for_a_disk_that_hangs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that are pipes: opening one waits for who writes to it."""
    engine, disk, cache = reopened(folder, never)
    assert ask(engine, "before", [*OTHER, 7]) == BLOCK_SIZE * DOCUMENT_BLOCKS
    blocks = [path for path in folder.rglob("*.kv") if path.is_file()]
    for path in blocks:
        path.unlink()
        os.mkfifo(path)
    monkeypatch.setattr(disk_reads, "HANG_SECONDS", 0.2)
    assert ask(engine, "hangs", [*DOCUMENT, 7]) == 0
    assert f"{folder} has not given a KV block" in caplog.text
    assert cache.offload.reads is not None
    assert cache.offload.reads.arriving
    while cache.offload.reads.arriving:  # it goes on: those files are nobody's
        for path in blocks:
            with suppress(OSError):  # nobody reads this one
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        cache.settle()
    assert disk.stats().num_damaged == DOCUMENT_BLOCKS
    assert ask(engine, "after", [*DOCUMENT, 8]) == BLOCK_SIZE * DOCUMENT_BLOCKS  # which was computed
    engine.assert_nothing_is_held()
    disk.close()


def test_all_of_a_prompt_that_comes_back_by_reading_counts_for_it(folder: Path) -> None:
    asked: list[tuple[int, int]] = []

    def compute_seconds(context: int, count: int) -> float:
        asked.append((context, count))
        return 1.0

    engine, disk, _ = reopened(folder, compute_seconds, Clock(1e-9))
    ask(engine, "other", [*OTHER, 7])  # so that the speed is known
    asked.clear()
    assert ask(engine, "half", [*DOCUMENT[: 10 * BLOCK_SIZE], 7]) == 10 * BLOCK_SIZE
    assert asked == [(0, 10 * BLOCK_SIZE)]
    assert ask(engine, "whole", [*DOCUMENT, 7]) == DOCUMENT_BLOCKS * BLOCK_SIZE
    assert asked[1:] == [(10 * BLOCK_SIZE, 10 * BLOCK_SIZE)]
    disk.close()


def test_the_worker_takes_computing_from_the_steps_that_it_measured(tmp_path: Path) -> None:
    runner = FakeRunner(256, 64, 2048)
    config = EngineConfig(model="m", kv_offload_gb=0.01, kv_offload_dir=str(tmp_path), kv_offload_disk_gb=0.01)
    loaded = LoadedRunner(
        runner, "m", "cpu", "float32", 4096, 2048, 32_000, (2,), fingerprint=lambda: FINGERPRINT,
        host_memory=SlowOffload(torch.from_numpy(runner.memory), 10, turns=0),
    )  # fmt: skip
    scheduler = make_scheduler(config, loaded)
    cache = scheduler.cache
    assert isinstance(cache, OffloadingKVCache)
    assert cache.offload.disk is not None
    assert cache.offload.reads is not None
    assert cache.offload.reads.compute_seconds == scheduler.step_time.prompt_seconds
    cache.offload.disk.close()


def test_who_comes_while_all_reads_are_for_others_waits_for_its_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_reads, "MAX_READS", 2)
    engine, disk, _ = reopened(folder, never)
    engine.add("first", [*DOCUMENT, 7], max_tokens=2)
    engine.add("second", [*OTHER, 7], max_tokens=2)
    engine.run()
    assert engine.cached == {"first": BLOCK_SIZE * DOCUMENT_BLOCKS, "second": BLOCK_SIZE * DOCUMENT_BLOCKS}
    engine.assert_nothing_is_held()
    disk.close()
