"""The real host memory over a fake runner's blocks, and one whose copies take a while."""

from collections import deque
from math import inf

import torch
from cranked_engine import Engine

from attention_backend.metadata import KVPages
from models.kv_offload import KVOffload
from models.transfers import FinishedTransfers, Transfers
from server.engine.disk_reads import ComputeSeconds
from server.engine.disk_tier import DiskTier
from server.engine.offload import Offload
from server.engine.offloading_cache import OffloadingKVCache


def never(_context: int, _count: int) -> float:
    """How long computing takes where reading always takes less."""
    return inf


class SlowOffload(KVOffload):
    """What is stored is taken at once, as on a device; what is loaded is written, and all reported, turns later."""

    def __init__(self, memory: torch.Tensor, num_slots: int, *, turns: int, room: int = 1_000_000) -> None:
        half = memory.shape[1] // 2
        super().__init__(
            [KVPages(memory[:, :half], memory[:, half:])], num_slots * memory[0].numel() * memory.element_size()
        )
        assert self.num_slots == num_slots
        self.room = room
        self.turns = turns
        self._late: deque[tuple[int, Transfers]] = deque()
        self._turn = 0

    def store_room(self) -> int:
        return min(self.room, super().store_room())

    def queue(self, transfers: Transfers) -> None:
        super().queue(Transfers(stores=transfers.stores))
        self._late.append((self._turn + self.turns, transfers))

    def finished(self) -> FinishedTransfers:
        self._turn += 1
        stored: list[int] = []
        loaded: list[int] = []
        while self._late and self._late[0][0] <= self._turn:
            _, transfers = self._late.popleft()
            super().queue(Transfers(loads=transfers.loads))
            stored += [slot for _, slot in transfers.stores]
            loaded += [block for _, block in transfers.loads]
        super().finished()
        return FinishedTransfers(stored, loaded)


def give_host_memory(
    engine: Engine,
    num_slots: int,
    *,
    disk: DiskTier | None = None,
    turns: int = 0,
    min_blocks: int = 1,
    room: int = 1_000_000,
    compute_seconds: ComputeSeconds = never,
) -> OffloadingKVCache:
    """Before the first turn. What is on disk is read, unless computing it takes less."""
    memory = SlowOffload(torch.from_numpy(engine.runner.memory), num_slots, turns=turns, room=room)
    offload = Offload(memory, disk, min_blocks=min_blocks, compute_seconds=compute_seconds)
    cache = OffloadingKVCache(engine.runner.num_blocks, engine.runner.block_size, offload)
    engine.use_cache(cache)
    return cache


def block_bytes(engine: Engine) -> int:
    return engine.runner.memory[0].nbytes
