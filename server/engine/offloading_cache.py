"""A KV cache whose given up blocks go on living in host memory and on disk. Knows no tensors and no scheduling.

What a waiting request has there comes back before the request is admitted, into blocks that belong to the cache until
they have arrived; then they are hits like any others. So nothing that runs ever waits for a copy, requests with a
common prefix share one, and a copy that fails leaves a prompt to be computed."""

import logging
import time
from collections.abc import Sequence

from server.engine.fetching import Fetched, Found
from server.engine.kv_cache import Entry, KVCache
from server.engine.offload import Offload
from server.engine.offload_stats import OffloadStats
from server.engine.request import Request

logger = logging.getLogger(__name__)

AHEAD = 8  # 1 / AHEAD of the device's blocks is kept ready to be given up: blank, or in host memory already
STORING_INTERVAL = 0.001  # seconds between looks at copies to the host, with nothing else to do
FLUSHED = 64  # blocks of the device that go to disk together before the end
MAX_RETIRED = 1024  # blocks looked at in one turn, to be copied before they are given up


class OffloadingKVCache(KVCache):
    def __init__(self, num_blocks: int, block_size: int, offload: Offload) -> None:
        super().__init__(num_blocks, block_size)
        self.offload = offload
        self._ahead = max(1, self.pool.num_usable // AHEAD)
        self._is_worth_a_copy = bytearray(num_blocks)  # by block: it was hit, or is of a long request
        self._loading: dict[int, int] = {}  # serial number of a prefix on its way here -> its block, which we hold
        self._fetched: dict[str, Fetched] = {}  # by request
        self._num_wanted = 0  # blocks that a request would have taken in this turn, were they ready

    def allocate(self, request: Request, num_blocks: int, hits: Sequence[Entry] = ()) -> None:
        self._fetched.pop(request.request_id, None)
        self._num_wanted = 0
        for entry in hits:
            self._is_worth_a_copy[entry.block] = True
        super().allocate(request, num_blocks, hits)

    def release(self, request: Request) -> None:
        self._fetched.pop(request.request_id, None)
        if request.num_registered >= self.offload.min_blocks:
            for block in request.block_ids[: request.num_registered]:
                self._is_worth_a_copy[block] = self._by_block[block] is not None  # or a twin's is, and it is blank
        super().release(request)

    def withdraw(self, request: Request) -> None:
        super().withdraw(request)
        for block_hash in request.block_hashes:
            self.offload.forget(block_hash)

    def prepare(self, request: Request, hits: Sequence[Entry], num_blocks: int) -> bool:
        """Waits for more of the prefix, and for blocks that can be taken without losing what they hold."""
        offload, fetched = self.offload, self._fetched.get(request.request_id)
        usable = request.num_reusable // self.block_size
        if fetched is None:
            fetched = self._fetched[request.request_id] = Fetched()
            offload.num_queried += usable - len(hits)
        found = self._find_more(request, hits, usable, fetched)
        self._num_wanted = min(num_blocks - len(hits), offload.num_slots)
        self._retire_ahead()
        is_waiting = found.is_arriving or self.pool.num_ready < self._num_wanted
        is_worth_it = is_waiting or fetched.has_begun or found.num_blocks >= offload.min_blocks
        if found.in_host and is_worth_it and self.pool.num_ready >= self._num_wanted:
            is_waiting |= self._load(found, fetched)
        for _, held in reversed(found.in_host):
            offload.slots.unpin(held)
        if is_waiting:
            request.last_hits = len(hits) + found.num_blocks  # those that it will have
        return is_waiting

    def _find_more(self, request: Request, hits: Sequence[Entry], usable: int, fetched: Fetched) -> Found:
        """What follows `hits`, in all tiers. What is on disk only begins to be read. What may be loaded is pinned: its
        slot is neither for reads of what comes after it nor for what is copied out to make room."""
        found = Found(list(hits))
        is_behind_gap = False
        parent = hits[-1].serial if hits else 0
        for index, token_bytes in enumerate(self._contents(request, len(hits), usable), len(hits)):
            block_hash = request.block_hashes[index]
            entry = self._find(block_hash, token_bytes, parent, request)
            if entry is not None:  # on the device, after some that are not
                found.on_device.append(entry)
                parent = entry.serial
                continue
            held = self.offload.find(block_hash, token_bytes, parent, request)
            if held is None and index >= fetched.from_disk and self._may_read(request, index, usable, found, fetched):
                held = self.offload.read(block_hash, token_bytes, parent, request)
            if held is None:
                break
            parent = held.prefix.serial
            if held.is_arriving:
                fetched.from_disk = max(fetched.from_disk, index + 1)
                found.is_arriving = is_behind_gap = True
            elif parent in self._loading:
                found.is_arriving = True
            elif index < fetched.from_host and not is_behind_gap:  # it was here, and is lost again
                break
            elif not is_behind_gap:  # in order, so that one number says what was asked for
                self.offload.slots.pin(held)
                found.in_host.append((index, held))
            found.num_blocks += 1
        return found

    def _may_read(self, request: Request, index: int, usable: int, found: Found, fetched: Fetched) -> bool:
        """Whether a block is to be read now: it is on disk only, worth it, and not too much is on its way."""
        if fetched.computes_rest or not self.offload.is_on_disk_only(request.block_hashes[index]):
            return False
        if found.room is None:
            found.room = self._room_to_read(request, index, usable)
            fetched.computes_rest = found.room is None
        if not found.room:
            found.is_arriving |= not fetched.computes_rest  # after others
            return False
        found.room -= 1
        return True

    def _room_to_read(self, request: Request, first: int, usable: int) -> int | None:
        """As DiskReads.room() has it, for all of the prompt that is anywhere from block `first` on."""
        offload, num_on_disk, end = self.offload, 0, first
        for block_hash in request.block_hashes[first:usable]:
            if offload.is_on_disk_only(block_hash) and block_hash not in self._by_hash:
                num_on_disk += 1
            elif block_hash not in self._by_hash and offload.slots.find(block_hash) is None:
                break
            end += 1
        assert offload.reads is not None  # or nothing were on disk
        return offload.reads.room(num_on_disk, first * self.block_size, (end - first) * self.block_size)

    def settle(self) -> None:
        self._num_wanted = 0  # who waited for them may be gone
        for block, held, is_there in self.offload.settle():
            prefix = held.prefix
            del self._loading[prefix.serial]
            if not is_there or prefix.hash in self._by_hash:  # or another request has computed it meanwhile
                self.pool.drop(block, None)
                continue
            entry = Entry(
                prefix.hash, prefix.token_bytes, prefix.parent, prefix.cache_salt, prefix.adapter_digest,
                prefix.serial, block,
            )  # fmt: skip
            self._insert(entry)
            self._is_worth_a_copy[block] = True
            self.pool.drop(block, entry.cache_salt)

    def queue_transfers(self) -> None:
        self._retire_ahead()
        self.offload.queue()

    def flush(self) -> None:
        """What the device has, in pieces, then what is in host memory only: of both what was used last first."""
        self.offload.end()
        self._settle_all()
        blocks = [block for block in self.pool.used_last_first() if self._is_worth_a_copy[block]]
        count = 0
        for first in range(0, len(blocks) if self.offload.disk is not None else 0, FLUSHED):
            count += self._flush_blocks(blocks[first : first + FLUSHED])
        count += self.offload.flush()
        if count:
            logger.info("%d KV blocks written to disk before the end", count)

    def _flush_blocks(self, blocks: Sequence[int]) -> int:
        entries = [(block, entry) for block in blocks if (entry := self._by_block[block]) is not None]
        for block, entry in entries:
            if not self.offload.keep(entry, block):
                self._settle_all()  # then there is room again
                self.offload.keep(entry, block)
        self._settle_all()
        return self.offload.flush([entry.hash for _, entry in entries])

    def _settle_all(self) -> None:
        """Waits for copies to the host."""
        self.offload.queue()
        self.settle()
        while self.offload.is_storing:
            time.sleep(STORING_INTERVAL)
            self.settle()

    def offload_stats(self) -> OffloadStats:
        return self.offload.stats()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        super().check_integrity(requests)
        self.offload.check_integrity()

    def _load(self, found: Found, fetched: Fetched) -> bool:
        """Whether any block is on its way. None that is on the device already is given up for it."""
        for entry in found.on_device:
            self.pool.share(entry.block, entry.cache_salt)
        has_begun = False
        for index, held in found.in_host:
            block = self._take()
            if block is None:
                break
            self._loading[held.prefix.serial] = block
            self.offload.load(held, block)
            fetched.from_host = index + 1
            has_begun = True
        for entry in reversed(found.on_device):
            self.pool.drop(entry.block, entry.cache_salt)
        return has_begun

    def _retire_ahead(self) -> None:
        """Copies what would be given up soon, while there is time: a long prompt takes very many blocks at once."""
        for _ in range(MAX_RETIRED):
            if self.pool.num_ready >= max(self._ahead, self._num_wanted):
                return
            found = self.pool.next_to_retire()
            if found is None:
                return
            block, owner = found
            entry = self._by_block[block]
            if entry is not None and self._is_worth_a_copy[block] and not self.offload.keep(entry, block):
                return
            self.pool.retire(block, owner)

    def _give_up(self, block: int) -> None:
        entry = self._by_block[block]
        if entry is not None and self._is_worth_a_copy[block] and not self.offload.keep(entry, block):
            self.offload.num_skipped += 1
        super()._give_up(block)

    def _forget(self, block: int) -> None:
        self._is_worth_a_copy[block] = False
        super()._forget(block)

    def _serial(self, block_hash: bytes, token_bytes: bytes, parent: int, request: Request) -> int:
        return self.offload.serial(block_hash, token_bytes, parent, request)

    def _own_blocks(self) -> list[int]:
        return list(self._loading.values())
