"""The host tier of the prefix cache: which blocks that the device gave up are in host memory, and their ways there,
back and to disk. Knows no tensors (the memory is behind a protocol), and of requests only what they look for.

A block is findable from the moment its copy is queued, and usable once it has arrived. What fails to arrive, or is
forgotten on the way, is simply not there: the prefix is computed again."""

import time
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from models.transfers import FinishedTransfers, Transfers
from server.engine.disk_reads import ComputeSeconds, DiskReads
from server.engine.disk_tier import DiskTier
from server.engine.host_slots import Held, HostSlots
from server.engine.offload_stats import OffloadStats
from server.engine.prefixes import Prefix, new_serial
from server.engine.request import Request

WORTH_A_COPY = 256  # tokens: shorter prefixes are computed as soon as fetched
MAX_DISK_WRITES = 16


class HostMemory(Protocol):
    """models.kv_offload.KVOffload: `num_slots` slots of a block each, from 0."""

    @property
    def num_slots(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def store_room(self) -> int:
        """Blocks that the next transfer may store without making the device wait."""
        ...

    def queue(self, transfers: Transfers) -> None:
        """Behind all steps launched so far, and before the next one. Waits for nothing."""
        ...

    def finished(self) -> FinishedTransfers: ...

    def slot_bytes(self, slot: int) -> memoryview: ...


class Offload:
    def __init__(
        self,
        memory: HostMemory,
        disk: DiskTier | None = None,
        *,
        min_blocks: int,
        compute_seconds: ComputeSeconds,
        ready: float = 0.25,
    ) -> None:
        """Only prefixes that were hit, or of requests with at least `min_blocks` full blocks, are worth a copy. That
        share of the slots is kept `ready` to be given up: it is on disk already, if there is one. What is there is read
        where that is predicted to take less than `compute_seconds`."""
        self.min_blocks = min_blocks
        self._memory = memory
        self.disk = disk
        self.slots = HostSlots(memory.num_slots)
        self.reads = None if disk is None else DiskReads(disk, self.slots, memory.slot_bytes, compute_seconds)
        self.ready_slots = int(memory.num_slots * ready)
        self._stores: list[tuple[int, int]] = []  # for the next transfer
        self._loads: list[tuple[int, int]] = []
        self._room = 0
        self._storing: dict[int, Held] = {}  # by slot
        self._loading: dict[int, Held] = {}  # by block
        self._writing: dict[int, Held] = {}  # by slot, negative as the ticket
        self._num_flushed = self._ends_ns = 0
        self.num_queried = self.num_stored = self.num_loaded = self.num_skipped = self.num_failed = 0  # blocks

    @property
    def num_slots(self) -> int:
        return self._memory.num_slots

    @property
    def is_storing(self) -> bool:
        return bool(self._storing)

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    def serial(self, block_hash: bytes, token_bytes: bytes, parent: int, request: Request) -> int:
        """Of a prefix just computed: what it is known by here already, or a new one."""
        held = self.find(block_hash, token_bytes, parent, request)
        return new_serial() if held is None else held.prefix.serial

    def find(self, block_hash: bytes, token_bytes: bytes, parent: int, request: Request) -> Held | None:
        """What the request needs after `parent`, arriving or here."""
        held = self.slots.find(block_hash)
        return held if held is not None and held.prefix.continues(parent, token_bytes, request) else None

    def is_on_disk_only(self, block_hash: bytes) -> bool:
        return self.disk is not None and block_hash in self.disk and self.slots.find(block_hash) is None

    def read(self, block_hash: bytes, token_bytes: bytes, parent: int, request: Request) -> Held | None:
        """Begins to read what is_on_disk_only() and the request needs after `parent`. None: there is no slot for it."""
        prefix = Prefix(block_hash, token_bytes, parent, request.cache_salt, request.adapter_digest, new_serial())
        return None if self.reads is None else self.reads.begin(prefix)

    def keep(self, prefix: Prefix, block: int) -> bool:
        """Sees to it that a block's content is here, as it is before the next step. False: not now, it was too much."""
        held = self.slots.find(prefix.hash)
        if held is not None and held.prefix.serial == prefix.serial:
            self.slots.pin(held)
            self.slots.unpin(held)
            return True
        if self._room <= 0:
            return False
        if held is not None:  # the same tokens after a prefix that nobody finds any more
            self.slots.forget(held)
        held = self.slots.take(prefix)
        if held is None:
            return False
        self._room -= 1
        self._storing[held.slot] = held
        self._stores.append((block, held.slot - 1))
        return True

    def load(self, held: Held, block: int) -> None:
        """Queues the copy of what is here into a block; settle() says when it has arrived."""
        self.slots.pin(held)
        self._loading[block] = held
        self._loads.append((held.slot - 1, block))

    def settle(self) -> list[tuple[int, Held, bool]]:
        """Takes note of what has arrived, or never will. Returns the blocks that loads were for, with what, and whether
        it is there now to be found: it may have been forgotten since."""
        finished = self._memory.finished()
        for slot in finished.stored_slots:
            held = self._storing.pop(slot + 1)
            held.is_arriving = False
            self.slots.unpin(held)
            self.num_stored += 1
        for slot in finished.failed_slots:
            self.slots.lose(self._storing.pop(slot + 1))
            self.num_failed += 1
        loaded: list[tuple[int, Held, bool]] = []
        for block in finished.loaded_blocks:
            held = self._loading.pop(block)
            self.slots.unpin(held)
            self.slots.retire(held)  # the device has it now: here it goes first
            loaded.append((block, held, not held.is_forgotten))
            self.num_loaded += 1
        for block in finished.failed_blocks:
            held = self._loading.pop(block)
            self.slots.unpin(held)
            self.num_failed += 1
            loaded.append((block, held, False))
        if self.disk is not None:
            self._settle_disk(self.disk)
            self.disk.look_at_writer()
            if self.reads is not None:
                self.reads.give_up_late()
            if not self._ends_ns:
                self._write_ahead(self.disk)
        self._room = self._memory.store_room()
        return loaded

    def queue(self) -> None:
        if self._stores or self._loads:
            self._memory.queue(Transfers(self._stores, self._loads))
            self._stores, self._loads = [], []

    def end(self) -> None:
        """No request is left: from now on flush() alone says what goes to disk."""
        self._ends_ns = time.time_ns()

    def flush(self, hashes: Sequence[bytes] | None = None) -> int:
        """After end(): writes to disk what of `hashes` (used last first), or of all, is only here, and says how many
        blocks. Later calls are for what was used before. Waits for the disk: what is written is whole at any time."""
        disk = self.disk
        if disk is None:
            return 0
        wanted = self.slots.idle() if hashes is None else map(self.slots.find, hashes)
        rest = [held for held in wanted if held is not None and held.prefix.hash not in disk]
        before = disk.num_written
        for held in rest[: max(0, disk.num_places - self._num_flushed)]:
            # After a restart, what was used longest ago goes first, as it does here.
            if not self._write(disk, held, self._ends_ns - 1000 * self._num_flushed):
                break
            self._num_flushed += 1
            if len(self._writing) >= MAX_DISK_WRITES:
                disk.wait()
                self._settle_disk(disk)
        disk.wait()
        self._settle_disk(disk)
        return disk.num_written - before

    def forget(self, block_hash: bytes) -> None:
        """In every tier from here on: the content is not to be found again."""
        held = self.slots.find(block_hash)
        if held is not None:
            self.slots.forget(held)
        if self.disk is not None:
            self.disk.forget(block_hash)

    def stats(self) -> OffloadStats:
        return OffloadStats(
            num_slots=self._memory.num_slots,
            num_held=len(self.slots),
            block_bytes=self._memory.block_bytes,
            queried_blocks=self.num_queried,
            stored_blocks=self.num_stored,
            loaded_blocks=self.num_loaded,
            skipped_blocks=self.num_skipped,
            failed_blocks=self.num_failed,
            declined_blocks=0 if self.reads is None else self.reads.num_declined,
            disk=None if self.disk is None else self.disk.stats(),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless slots, names and what is on its way agree. O(slots)."""
        groups = (self._storing, self._loading, self._writing)
        reading = () if self.reads is None else self.reads.arriving
        self.slots.check_integrity(chain(reading, *(group.values() for group in groups)))
        if self.disk is not None:
            self.disk.check_integrity()

    def _settle_disk(self, disk: DiskTier) -> None:
        for result in disk.finished():
            if result.ticket < 0:
                held = self._writing.pop(-result.ticket)
                self.slots.unpin(held)
                self.slots.retire(held)
            elif self.reads is not None:
                self.reads.end(result)

    def _write_ahead(self, disk: DiskTier) -> None:
        """Copies what would be given up soon to disk, so that giving it up costs nothing."""
        while self.slots.num_ready < self.ready_slots and len(self._writing) < MAX_DISK_WRITES:
            held = self.slots.next_to_retire()
            if held is None:
                return
            if held.prefix.hash in disk:
                self.slots.retire(held)
            elif not self._write(disk, held):
                return

    def _write(self, disk: DiskTier, held: Held, used_ns: int | None = None) -> bool:
        """Begins to copy an idle slot to disk. False: it cannot be written now."""
        memory = self._memory.slot_bytes(held.slot - 1)
        if not disk.write(held.prefix, memory, -held.slot, used_ns=used_ns):
            return False
        self.slots.pin(held)
        self._writing[held.slot] = held
        return True
