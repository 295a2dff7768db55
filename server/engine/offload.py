"""The host tier of the prefix cache: which blocks that the device gave up are in host memory, and their ways there,
back and to disk. Knows no tensors (the memory is behind a protocol), and of requests only what they look for.

A block is findable from the moment its copy is queued, and usable once it has arrived. What fails to arrive, or is
forgotten on the way, is simply not there: the prefix is computed again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from models.transfers import FinishedTransfers, Transfers
from server.engine.block_pool import BlockPool, IntegrityError
from server.engine.disk_tier import DiskTier
from server.engine.offload_stats import OffloadStats
from server.engine.prefixes import Prefix, new_serial
from server.engine.request import Request

WORTH_A_COPY = 256  # tokens: shorter prefixes are computed as soon as fetched
MAX_DISK_READS = 64  # blocks on their way from disk at once
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


@dataclass(slots=True, eq=False)
class Held:
    """A block's content in a host slot."""

    prefix: Prefix
    slot: int
    is_arriving: bool = True  # the bytes are not there yet
    is_forgotten: bool = False


class Offload:
    """Slots are numbered from 1, as blocks are."""

    def __init__(
        self, memory: HostMemory, disk: DiskTier | None = None, *, min_blocks: int, ready: float = 0.25
    ) -> None:
        """Only prefixes that were hit, or of requests with at least `min_blocks` full blocks, are worth a copy. That
        share of the slots is kept `ready` to be given up: it is on disk already, if there is one."""
        self.min_blocks = min_blocks
        self._memory = memory
        self._disk = disk
        self._pool = BlockPool(memory.num_slots + 1)
        self.ready_slots = int(memory.num_slots * ready)
        self._by_hash: dict[bytes, Held] = {}
        self._by_slot: dict[int, Held] = {}
        self._stores: list[tuple[int, int]] = []  # for the next transfer
        self._loads: list[tuple[int, int]] = []
        self._room = 0
        self._storing: dict[int, Held] = {}  # by slot
        self._loading: dict[int, Held] = {}  # by block
        self._reading: dict[int, Held] = {}  # by slot, which is the ticket
        self._writing: dict[int, Held] = {}  # by slot, negative as the ticket
        self.num_queried = self.num_stored = self.num_loaded = self.num_skipped = 0  # blocks

    @property
    def num_slots(self) -> int:
        return self._memory.num_slots

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    def serial(self, block_hash: bytes, token_bytes: bytes, parent: int, request: Request) -> int:
        """Of a prefix just computed: what it is known by here already, or a new one."""
        held = self._by_hash.get(block_hash)
        known = held is not None and held.prefix.continues(parent, token_bytes, request)
        return held.prefix.serial if held is not None and known else new_serial()

    def find(
        self, block_hash: bytes, token_bytes: bytes, parent: int, request: Request, *, may_read: bool
    ) -> Held | None:
        """What the request needs after `parent`, arriving or here. Begins to read it if it is on disk only."""
        held = self._by_hash.get(block_hash)
        if held is not None:
            return held if held.prefix.continues(parent, token_bytes, request) else None
        if not may_read or self._disk is None or block_hash not in self._disk:
            return None
        if len(self._reading) >= MAX_DISK_READS:
            return None
        prefix = Prefix(block_hash, token_bytes, parent, request.cache_salt, request.adapter_digest, new_serial())
        held = self._hold(prefix)
        if held is not None:
            self._reading[held.slot] = held
            self._disk.read(prefix, self._memory.slot_bytes(held.slot - 1), held.slot)
        return held

    def keep(self, prefix: Prefix, block: int) -> bool:
        """Sees to it that a block's content is here, as it is before the next step. False: not now, it was too much."""
        held = self._by_hash.get(prefix.hash)
        if held is not None and held.prefix.serial == prefix.serial:
            self.pin(held)
            self.unpin(held)
            return True
        if self._room <= 0:
            return False
        if held is not None:  # the same tokens after a prefix that nobody finds any more
            self._drop(held)
        held = self._hold(prefix)
        if held is None:
            return False
        self._room -= 1
        self._storing[held.slot] = held
        self._stores.append((block, held.slot - 1))
        return True

    def load(self, held: Held, block: int) -> None:
        """Queues the copy of what is here into a block; settle() says when it has arrived."""
        self.pin(held)
        self._loading[block] = held
        self._loads.append((held.slot - 1, block))

    def pin(self, held: Held) -> None:
        """Its slot is not given up before unpin(). Raises IntegrityError when it has been already."""
        if not held.is_forgotten and self._by_slot.get(held.slot) is not held:
            raise IntegrityError(f"host slot {held.slot} has another content by now")
        self._pool.share(held.slot, held.prefix.cache_salt)

    def unpin(self, held: Held) -> None:
        self._pool.drop(held.slot, None if held.is_forgotten else held.prefix.cache_salt)

    def settle(self) -> list[tuple[int, Held]]:
        """Takes note of what has arrived. Returns the blocks loaded, and with what (forgotten since, perhaps)."""
        finished = self._memory.finished()
        for slot in finished.stored_slots:
            held = self._storing.pop(slot + 1)
            held.is_arriving = False
            self.unpin(held)
            self.num_stored += 1
        loaded: list[tuple[int, Held]] = []
        for block in finished.loaded_blocks:
            held = self._loading.pop(block)
            self.unpin(held)
            self._retire(held)  # the device has it now: here it goes first
            loaded.append((block, held))
            self.num_loaded += 1
        if self._disk is not None:
            self._settle_disk(self._disk)
            self._write_ahead(self._disk)
        self._room = self._memory.store_room()
        return loaded

    def queue(self) -> None:
        if self._stores or self._loads:
            self._memory.queue(Transfers(self._stores, self._loads))
            self._stores, self._loads = [], []

    def forget(self, block_hash: bytes) -> None:
        """In every tier from here on: the content is not to be found again."""
        held = self._by_hash.get(block_hash)
        if held is not None:
            self._drop(held)
        if self._disk is not None:
            self._disk.forget(block_hash)

    def stats(self) -> OffloadStats:
        return OffloadStats(
            num_slots=self._memory.num_slots,
            num_held=len(self._by_hash),
            block_bytes=self._memory.block_bytes,
            queried_blocks=self.num_queried,
            stored_blocks=self.num_stored,
            loaded_blocks=self.num_loaded,
            skipped_blocks=self.num_skipped,
            disk=None if self._disk is None else self._disk.stats(),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless slots, names and what is on its way agree. O(slots)."""
        on_their_way: Sequence[dict[int, Held]] = (self._storing, self._loading, self._reading, self._writing)
        self._pool.check([[held.slot] for group in on_their_way for held in group.values()])
        idle = dict(self._pool.idle_blocks())
        for slot, held in self._by_slot.items():
            if held.slot != slot or self._by_hash.get(held.prefix.hash) is not held or held.is_forgotten:
                raise IntegrityError(f"host slot {slot}: its content is not found under its name")
            if self._pool.is_idle(slot) and idle.get(slot) != held.prefix.cache_salt:
                raise IntegrityError(f"host slot {slot}: held and free, but not under its owner")
        if len(self._by_hash) != len(self._by_slot) or not idle.keys() <= self._by_slot.keys():
            raise IntegrityError("host memory names slots that do not know it")
        if self._disk is not None:
            self._disk.check_integrity()

    def _hold(self, prefix: Prefix) -> Held | None:
        """A slot for content that is about to arrive. None: all are in use."""
        taken = self._pool.take()
        if taken is None:
            return None
        slot, was_idle = taken
        if was_idle:
            del self._by_hash[self._by_slot.pop(slot).prefix.hash]
        held = self._by_hash[prefix.hash] = self._by_slot[slot] = Held(prefix, slot)
        return held

    def _drop(self, held: Held) -> None:
        held.is_forgotten = True
        del self._by_hash[held.prefix.hash], self._by_slot[held.slot]
        if self._pool.is_idle(held.slot):
            self._pool.blank(held.slot, held.prefix.cache_salt)

    def _settle_disk(self, disk: DiskTier) -> None:
        for result in disk.finished():
            if result.ticket < 0:
                held = self._writing.pop(-result.ticket)
                self.unpin(held)
                self._retire(held)
                continue
            held = self._reading.pop(result.ticket)
            held.is_arriving = False
            if not result.succeeded and not held.is_forgotten:
                self._drop(held)
            self.unpin(held)

    def _write_ahead(self, disk: DiskTier) -> None:
        """Copies what would be given up soon to disk, so that giving it up costs nothing."""
        while self._pool.num_ready < self.ready_slots and len(self._writing) < MAX_DISK_WRITES:
            found = self._pool.next_to_retire()
            if found is None:
                return
            held = self._by_slot[found[0]]
            if held.prefix.hash in disk:
                self._retire(held)
                continue
            if not disk.write(held.prefix, self._memory.slot_bytes(held.slot - 1), -held.slot):
                return
            self.pin(held)
            self._writing[held.slot] = held

    def _retire(self, held: Held) -> None:
        if not held.is_forgotten and self._pool.is_idle(held.slot):
            self._pool.retire(held.slot, held.prefix.cache_salt)
