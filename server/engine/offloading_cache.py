"""A KV cache whose given up blocks go on living in host memory and on disk. Knows no tensors and no scheduling.

What a waiting request has there comes back before the request is admitted, into blocks that belong to the cache until
they have arrived; then they are hits like any others. So nothing that runs ever waits for a copy, requests with a
common prefix share one, and a copy that fails leaves a prompt to be computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.kv_cache import Entry, KVCache
from server.engine.offload import Held, Offload
from server.engine.offload_stats import OffloadStats
from server.engine.request import Request

AHEAD = 8  # 1 / AHEAD of the device's blocks is kept ready to be given up: blank, or in host memory already
MAX_RETIRED = 256  # blocks looked at in one step, to be copied before they are given up


@dataclass(slots=True)
class _Fetched:
    """How far into a prompt blocks were asked for: each once only, so that its request never waits for ever."""

    from_disk: int = 0
    from_host: int = 0

    @property
    def has_begun(self) -> bool:
        return self.from_disk > 0 or self.from_host > 0


class OffloadingKVCache(KVCache):
    def __init__(self, num_blocks: int, block_size: int, offload: Offload) -> None:
        super().__init__(num_blocks, block_size)
        self.offload = offload
        self._ahead = max(1, self.pool.num_usable // AHEAD)
        self._is_worth_a_copy = bytearray(num_blocks)  # by block: it was hit, or is of a long request
        self._loading: dict[int, int] = {}  # serial number of a prefix on its way here -> its block, which we hold
        self._fetched: dict[str, _Fetched] = {}  # by request

    def allocate(self, request: Request, num_blocks: int, hits: Sequence[Entry] = ()) -> None:
        self._fetched.pop(request.request_id, None)
        for entry in hits:
            self._is_worth_a_copy[entry.block] = True
        super().allocate(request, num_blocks, hits)

    def release(self, request: Request) -> None:
        self._fetched.pop(request.request_id, None)
        if request.num_registered >= self.offload.min_blocks:
            for block in request.block_ids[: request.num_registered]:
                self._is_worth_a_copy[block] = True
        super().release(request)

    def withdraw(self, request: Request) -> None:
        super().withdraw(request)
        for block_hash, _ in request.block_hashes:
            self.offload.forget(block_hash)

    def fetch(self, request: Request, hits: Sequence[Entry]) -> int:
        offload = self.offload
        usable = (len(request.token_ids) - 1) // self.block_size
        fetched = self._fetched.get(request.request_id)
        if fetched is None:
            fetched = self._fetched[request.request_id] = _Fetched()
            offload.num_queried += usable - len(hits)
        on_device, in_host = list(hits), list[tuple[int, Held]]()
        coming, is_waiting, is_behind_gap = 0, False, False
        parent = hits[-1].serial if hits else 0
        for index in range(len(hits), usable):
            block_hash, token_bytes = request.block_hashes[index]
            entry = self._find(block_hash, token_bytes, parent, request)
            if entry is not None:  # on the device, after some that are not
                on_device.append(entry)
                parent = entry.serial
                continue
            may_read = index >= fetched.from_disk
            held = offload.find(block_hash, token_bytes, parent, request, may_read=may_read)
            if held is None:
                break
            parent = held.prefix.serial
            if held.is_arriving:
                fetched.from_disk = max(fetched.from_disk, index + 1)
                is_waiting = is_behind_gap = True
            elif parent in self._loading:
                is_waiting = True
            elif is_behind_gap:  # in order, so that one number says what was asked for
                pass
            elif index >= fetched.from_host:
                offload.pin(held)
                in_host.append((index, held))
            else:
                break
            coming += 1
        if is_waiting or fetched.has_begun or coming >= offload.min_blocks:
            is_waiting |= self._load(on_device, in_host, fetched)
        for _, held in reversed(in_host):
            offload.unpin(held)
        return coming if is_waiting else 0

    def settle(self) -> None:
        for block, held in self.offload.settle():
            prefix = held.prefix
            del self._loading[prefix.serial]
            if held.is_forgotten or prefix.hash in self._by_hash:  # or another request has computed it meanwhile
                self.pool.drop(block, None)
                continue
            entry = Entry(
                prefix.hash, prefix.token_bytes, prefix.parent, prefix.cache_salt, prefix.adapter_digest,
                prefix.serial, block,
            )  # fmt: skip
            self._by_hash[entry.hash] = entry
            self._by_block[block] = entry
            self._is_worth_a_copy[block] = True
            self.pool.drop(block, entry.cache_salt)

    def queue_transfers(self) -> None:
        self._retire_ahead()
        self.offload.queue()

    def offload_stats(self) -> OffloadStats:
        return self.offload.stats()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        super().check_integrity(requests)
        self.offload.check_integrity()

    def _load(self, on_device: Sequence[Entry], in_host: Sequence[tuple[int, Held]], fetched: _Fetched) -> bool:
        """Whether any block is on its way. `on_device` is not to be given up for it."""
        for entry in on_device:
            self.pool.share(entry.block, entry.cache_salt)
        has_begun = False
        for index, held in in_host:
            block = self._take()
            if block is None:
                break
            self._loading[held.prefix.serial] = block
            self.offload.load(held, block)
            fetched.from_host = index + 1
            has_begun = True
        for entry in reversed(on_device):
            self.pool.drop(entry.block, entry.cache_salt)
        return has_begun

    def _retire_ahead(self) -> None:
        """Copies what would be given up soon, while there is time: a long prompt takes very many blocks at once."""
        for _ in range(MAX_RETIRED):
            if self.pool.num_ready >= self._ahead:
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
