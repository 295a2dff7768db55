"""Block tables and the prefix cache: which blocks hold which tokens, and which of them a new prompt may reuse. Knows
no scheduling and no tensors.

A full block is found by a chained hash (parent's hash, token ids; the tenant's salt and the adapter's digest at the
root), so equal hashes mean equal prefixes of one model. Nothing rests on the hash alone: a hit also compares the token
ids, and that the entry was chained onto the very entry that matched before it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from server.engine.block_pool import BlockPool, IntegrityError
from server.engine.offload_stats import OffloadStats
from server.engine.prefixes import Prefix, hash_block, new_serial, root_hash
from server.engine.request import Request


@dataclass(frozen=True, slots=True)
class Entry(Prefix):
    """One full block in the cache."""

    block: int


class KVCache:
    """Owns the pool; requests carry their own block tables."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._by_hash: dict[bytes, Entry] = {}
        self._by_block: list[Entry | None] = [None] * num_blocks
        self._next: dict[int, Entry] = {}  # serial number of a prefix -> what last continued it: found without a hash

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[Entry]:
        """The longest cached prefix that it may have, in full blocks. Takes nothing. All of its blocks have their
        hashes then, for others may wait for what it computes."""
        if not self.enable_prefix_caching:
            return []
        usable = request.num_reusable // self.block_size
        hashes, hits = request.block_hashes, list[Entry]()
        parent = 0
        for index, token_bytes in enumerate(self._contents(request, 0, usable)):
            entry = self._next.get(parent)
            if entry is None or not entry.continues(parent, token_bytes, request):
                self._hash_blocks(request, index + 1)
                entry = self._find(hashes[index], token_bytes, parent, request)
                if entry is None:
                    break
                self._next[parent] = entry
            elif index == len(hashes):
                hashes.append(entry.hash)
            hits.append(entry)
            parent = entry.serial
        self._hash_blocks(request, (len(request.token_ids) - 1) // self.block_size)
        return hits

    def blocks_to_admit(self, num_blocks: int, hits: Sequence[Entry]) -> int:
        """Free blocks that a table of `num_blocks` with these hits takes away (idle hits are free blocks too)."""
        return num_blocks - len(hits) + sum(self.pool.is_idle(entry.block) for entry in hits)

    def allocate(self, request: Request, num_blocks: int, hits: Sequence[Entry] = ()) -> None:
        """Gives an empty request its table: the hits, then new blocks. The caller has checked that they are there."""
        for entry in hits:  # before any new block: taking one could evict a hit
            self.pool.share(entry.block, entry.cache_salt)
        request.block_ids = [entry.block for entry in hits]
        request.num_computed = request.num_filled = len(hits) * self.block_size
        request.num_registered = len(hits)
        request.chain = (hits[-1].hash, hits[-1].serial) if hits else (b"", 0)
        while len(request.block_ids) < num_blocks:
            if not self.grow(request):
                raise IntegrityError("allocate() without enough free blocks")

    def grow(self, request: Request) -> bool:
        """Appends one block; false when none is free."""
        block = self._take()
        if block is None:
            return False
        request.block_ids.append(block)
        return True

    def prepare(self, request: Request, hits: Sequence[Entry], num_blocks: int) -> bool:  # noqa: ARG002
        """Before allocate(): false when there is nothing to wait for, true when the request is to be looked at again in
        the next turn. Only for one that would fit, with these hits, now."""
        return False

    def settle(self) -> None:
        """Begins each turn of the scheduler."""

    def queue_transfers(self) -> None:
        """Ends each turn of the scheduler, before its step is launched."""

    def flush(self) -> None:
        """Before the end of the process, with nothing running."""

    def offload_stats(self) -> OffloadStats | None:
        """None: there is no slower memory."""
        return None

    def register(self, request: Request) -> None:
        """Offers the blocks that steps have filled which came back."""
        full = request.num_filled // self.block_size
        first = request.num_registered
        if full == first:
            return
        request.num_registered = full
        if not self.enable_prefix_caching:
            return
        self._hash_blocks(request, full)
        for index, token_bytes in enumerate(self._contents(request, first, full), first):
            parent = self._chain_serial(request)
            if parent is None:  # what it would be chained onto is gone
                return
            block_hash = request.block_hashes[index]
            entry = self._find(block_hash, token_bytes, parent, request)
            if entry is None:
                entry = self._enter(request.block_ids[index], block_hash, token_bytes, parent, request)
            request.chain = (entry.hash, entry.serial)

    def release(self, request: Request) -> None:
        """Drops the whole table, last block first: in the order of use, a prefix outlives what was built on it."""
        for block in reversed(request.block_ids):
            entry = self._by_block[block]
            self.pool.drop(block, None if entry is None else entry.cache_salt)
        request.block_ids = []
        request.num_computed = request.num_filled = 0
        request.num_registered = 0

    def withdraw(self, request: Request) -> None:
        """Before release(), for a request whose numbers went bad: nothing it read or wrote is found again, nor what it
        had before a preemption (a step that was in flight then may tell only now)."""
        for block_hash in request.block_hashes:
            self._drop(block_hash)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raises IntegrityError unless pool, tables and prefix cache agree. O(blocks): for idle times and tests."""
        self.pool.check([*(request.block_ids for request in requests), self._own_blocks()])
        idle = dict(self.pool.idle_blocks())
        for block, entry in enumerate(self._by_block):
            if entry is None:
                if block in idle:
                    raise IntegrityError(f"block {block} is idle without content")
                continue
            if entry.block != block or self._by_hash.get(entry.hash) is not entry:
                raise IntegrityError(f"block {block}: its entry is not in the prefix cache")
            if self.pool.is_idle(block) and idle.get(block) != entry.cache_salt:
                raise IntegrityError(f"block {block}: cached and free, but not under its owner")
        if len(self._by_hash) != sum(entry is not None for entry in self._by_block):
            raise IntegrityError("the prefix cache names blocks that do not know it")
        for parent, entry in self._next.items():
            if entry.parent != parent or self._by_block[entry.block] is not entry:
                raise IntegrityError(f"block {entry.block}: found after a prefix that it does not continue")

    def _find(self, block_hash: bytes, token_bytes: bytes, parent: int, request: Request) -> Entry | None:
        entry = self._by_hash.get(block_hash)
        return entry if entry is not None and entry.continues(parent, token_bytes, request) else None

    def _chain_serial(self, request: Request) -> int | None:
        """Serial number of the entry under the request's last registered block (its own or a twin's); 0 at the root."""
        block_hash, serial = request.chain
        if serial == 0:
            return 0
        entry = self._by_hash.get(block_hash)
        return serial if entry is not None and entry.serial == serial else None

    def _enter(self, block: int, block_hash: bytes, token_bytes: bytes, parent: int, request: Request) -> Entry:
        self._drop(block_hash)  # another content with this hash, or an orphan of an evicted parent
        salt, digest = request.cache_salt, request.adapter_digest
        serial = self._serial(block_hash, token_bytes, parent, request)
        entry = Entry(block_hash, token_bytes, parent, salt, digest, serial, block)
        self._insert(entry)
        return entry

    def _insert(self, entry: Entry) -> None:
        self._by_hash[entry.hash] = entry
        self._by_block[entry.block] = entry
        self._next[entry.parent] = entry

    def _serial(self, block_hash: bytes, token_bytes: bytes, parent: int, request: Request) -> int:  # noqa: ARG002
        """Of a prefix that is new here."""
        return new_serial()

    def _own_blocks(self) -> list[int]:
        """Blocks that belong to no request and are not free."""
        return []

    def _take(self) -> int | None:
        taken = self.pool.take()
        if taken is None:
            return None
        block, was_idle = taken
        if was_idle:
            self._give_up(block)
        return block

    def _give_up(self, block: int) -> None:
        """The block is about to get another content."""
        self._forget(block)

    def _drop(self, block_hash: bytes) -> None:
        """What is here under this hash, if anything, is not to be found again."""
        entry = self._by_hash.get(block_hash)
        if entry is not None:
            self._forget(entry.block)
            if self.pool.is_idle(entry.block):
                self.pool.blank(entry.block, entry.cache_salt)

    def _forget(self, block: int) -> None:
        entry = self._by_block[block]
        if entry is None:
            raise IntegrityError(f"block {block} was idle without content")
        self._by_block[block] = None
        del self._by_hash[entry.hash]
        if self._next.get(entry.parent) is entry:
            del self._next[entry.parent]

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Each block is hashed once in a request's life, at most."""
        hashes = request.block_hashes
        done = len(hashes)
        if done >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(request.cache_salt, request.adapter_digest)
        for token_bytes in self._contents(request, done, num_blocks):
            parent = hash_block(parent, token_bytes)
            hashes.append(parent)

    def _contents(self, request: Request, first: int, end: int) -> Iterator[bytes]:
        """The token ids of the request's blocks from `first` to `end - 1`, as 32-bit integers."""
        ids = request.token_ids[first * self.block_size : end * self.block_size]
        stride = self.block_size * ids.itemsize
        all_bytes = ids.tobytes()
        return (all_bytes[start : start + stride] for start in range(0, len(all_bytes), stride))
