"""A host memory and a disk whose copies happen as late, as early and in as odd an order as they may, by a seed. Memory
that somebody else may be writing holds junk from the first to the last moment at which it may."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from cranked_engine import Engine
from host_memory import block_bytes
from test_lagging_device import LaggingRunner

from attention_backend.metadata import KVPages
from models.kv_offload import KVOffload
from models.transfers import FinishedTransfers, Transfers
from server.engine import disk_tier
from server.engine.block_files import file_bytes
from server.engine.disk_tier import DiskTier
from server.engine.prefixes import Prefix

JUNK = 0xEE

T = TypeVar("T")


class SeededThreads:
    """For a ThreadPoolExecutor: as many of the oldest jobs as there are threads may be the next to be done."""

    def __init__(self, rng: random.Random, num_threads: int) -> None:
        self._rng = rng
        self._num_threads = num_threads
        self._jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self.go_on()

    def go_on(self) -> None:
        while self._jobs and self._rng.random() < 0.4:
            self._do_one()

    def shutdown(self) -> None:
        while self._jobs:
            self._do_one()

    def _do_one(self) -> None:
        self._jobs.pop(self._rng.randrange(min(len(self._jobs), self._num_threads)))()


class HostileDisk(DiskTier):
    """Writes less than it might; what is being read into is not what it was."""

    def __init__(self, engine: Engine, folder: Path, num_blocks: int, rng: random.Random) -> None:
        size, block_size = block_bytes(engine), engine.runner.block_size
        max_bytes = num_blocks * file_bytes(size, block_size)
        super().__init__(folder, max_bytes=max_bytes, fingerprint=bytes(32), block_bytes=size, block_size=block_size)
        self.threads = SeededThreads(rng, self.num_readers), SeededThreads(rng, 1)
        for threads in self._readers, self._writer:
            threads.shutdown()
        self._readers, self._writer = self.threads  # type: ignore[assignment]

    def read(self, prefix: Prefix, memory: memoryview, ticket: int) -> None:
        memory[:] = bytes([JUNK]) * len(memory)
        super().read(prefix, memory, ticket)

    def finished(self) -> list[disk_tier.DiskResult]:
        for threads in self.threads:
            threads.go_on()
        return super().finished()


class HostileMemory(KVOffload):
    """As beside a GPU: what leaves is taken between two steps, and crosses when it likes; what comes back is written
    when it likes, after the steps launched before."""

    def __init__(self, runner: LaggingRunner, num_slots: int, rng: random.Random) -> None:
        memory = torch.from_numpy(runner.memory)
        half = memory.shape[1] // 2
        num_bytes = num_slots * runner.memory[0].nbytes
        super().__init__([KVPages(memory[:, :half], memory[:, half:])], num_bytes)
        self._runner = runner
        self._rng = rng
        self._crossing: list[tuple[int, bytes]] = []  # slot, what will be in it
        self._coming_back: list[tuple[int, int]] = []  # slot, block
        self._stored: list[int] = []  # and not reported yet
        self._loaded: list[int] = []

    @property
    def is_busy(self) -> bool:
        return any((self._runner.queue, self._crossing, self._coming_back, self._stored, self._loaded))

    def store_room(self) -> int:
        return self._rng.choice([0, 1, 3, 1000])

    def queue(self, transfers: Transfers) -> None:
        for block, slot in transfers.stores:
            self._spoil_slot(slot)
            self._runner.queue.append(lambda block=block, slot=slot: self._gather(block, slot))  # type: ignore[misc]
        for slot, block in transfers.loads:
            self._runner.queue.append(lambda slot=slot, block=block: self._launch_load(slot, block))  # type: ignore[misc]

    def finished(self) -> FinishedTransfers:
        while self._runner.queue and self._rng.random() < 0.6:  # the device goes on by itself
            self._runner.queue.pop(0)()
        for slot, content in self._some(self._crossing):
            self.slot_bytes(slot)[:] = content
            self._stored.append(slot)
        for slot, block in self._some(self._coming_back):
            super().queue(Transfers(loads=[(slot, block)]))
            self._loaded.append(block)
        super().finished()
        return FinishedTransfers(self._some(self._stored), self._some(self._loaded))

    def _gather(self, block: int, slot: int) -> None:
        self._crossing.append((slot, self._runner.memory[block].tobytes()))

    def _launch_load(self, slot: int, block: int) -> None:
        self._runner.memory[block] = np.int64(-JUNK)
        self._coming_back.append((slot, block))

    def _spoil_slot(self, slot: int) -> None:
        self.slot_bytes(slot)[:] = bytes([JUNK]) * self.block_bytes

    def _some(self, items: list[T]) -> list[T]:
        taken = [item for item in items if self._rng.random() < 0.4]
        items[:] = [item for item in items if item not in taken]
        return taken
