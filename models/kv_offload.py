"""KV blocks to host memory and back, beside the steps. Knows no requests, and not what is in a block.

On a GPU: a block leaves through a buffer on the device, filled on the stream of the steps (so that it is what it was
before the next step), and crosses the bus on a stream of its own. It comes back on another one, behind the steps
launched so far (they may still write into blocks that were freed meanwhile). No step ever waits for the bus, and none
fails for it: a copy that finds no memory is not made."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from attention_backend.page_copy import PageCopy
from models.host import HostMemoryError, available_memory_bytes
from models.kv_pool import KVCaches
from models.transfers import FinishedTransfers, Transfers

logger = logging.getLogger(__name__)

_SLAB_BYTES = 1 << 30  # host memory is allocated so: torch rounds pinned memory up to powers of two
_BUFFER_BYTES = 128 << 20  # on the device, a piece of a transfer: large enough for the bus, small enough to have five
_MAX_BUFFER_BLOCKS = 64
_STORE_BUFFERS = 4


def buffer_bytes(block_bytes: int) -> int:
    """What the buffers take of the device's memory."""
    return (_STORE_BUFFERS + 1) * _buffer_blocks(block_bytes) * block_bytes


def _buffer_blocks(block_bytes: int) -> int:
    return max(1, min(_MAX_BUFFER_BLOCKS, _BUFFER_BYTES // block_bytes))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a transfer on its way: slots of a store, or blocks of a load."""

    numbers: Sequence[int]
    arrived: torch.cuda.Event
    buffer: int | None  # of the store buffers


class KVOffload:
    """Host slots of one block each, numbered from 0, for the pages of `kv_caches`."""

    def __init__(self, kv_caches: KVCaches, num_bytes: int) -> None:
        """Takes up to `num_bytes` of host memory, pinned for a GPU. Raises HostMemoryError when that is no block, or
        more than there is."""
        self._pages = PageCopy([array for pages in kv_caches for array in (pages.k, pages.v)])
        self.block_bytes = self._pages.row_bytes
        self.num_slots = num_bytes // self.block_bytes
        free = available_memory_bytes()
        if self.num_slots < 1 or num_bytes > free:
            raise HostMemoryError(
                f"{num_bytes / 2**30:.2f} GiB of host memory cannot be had for KV blocks: one has "
                f"{self.block_bytes / 2**20:.2f} MiB, and {free / 2**30:.2f} GiB are free"
            )
        self._slots_per_slab = max(1, _SLAB_BYTES // self.block_bytes)
        self._on_gpu = self._pages.device.type == "cuda"
        self._slabs = [
            torch.empty(min(self._slots_per_slab, self.num_slots - first), self.block_bytes, dtype=torch.uint8,
                        pin_memory=self._on_gpu)
            for first in range(0, self.num_slots, self._slots_per_slab)
        ]  # fmt: skip
        self._done_stores: list[int] = []  # on a CPU, where they are done at once
        self._done_loads: list[int] = []
        self._failed_stores: list[int] = []
        self._failed_loads: list[int] = []
        self._has_failed = False
        if self._on_gpu:
            self._set_up_streams()

    def _set_up_streams(self) -> None:
        device, blocks = self._pages.device, _buffer_blocks(self.block_bytes)
        shape = (blocks, self.block_bytes)
        self._store_buffers = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(_STORE_BUFFERS)]
        self._free_buffers = list(range(_STORE_BUFFERS))
        self._load_buffer = torch.empty(shape, dtype=torch.uint8, device=device)
        self._storing, self._loading = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stores: list[_Piece] = []  # in the order of their stream
        self._loads: list[_Piece] = []
        ids = torch.zeros(1, dtype=torch.int32, device=device)  # the dummy page, so that both kernels are there
        self._pages.gather(ids, self._load_buffer[:1])
        self._pages.scatter(self._load_buffer[:1], ids)

    def slot_bytes(self, slot: int) -> memoryview:
        """The memory of a slot: to be read after its store has finished, written before its load is queued."""
        slab, row = divmod(slot, self._slots_per_slab)
        return self._slabs[slab][row].numpy().data

    def store_room(self) -> int:
        """Blocks that the next transfer may store."""
        return len(self._free_buffers) * _buffer_blocks(self.block_bytes) if self._on_gpu else self.num_slots

    def queue(self, transfers: Transfers) -> None:
        """From the thread that launches steps, on their stream. Raises ValueError for more stores than store_room()."""
        if len(transfers.stores) > self.store_room():
            raise ValueError(f"{len(transfers.stores)} stores, but room for {self.store_room()}")
        # Neighbours in host memory cross the bus as one piece.
        stores = sorted(transfers.stores, key=lambda pair: pair[1])
        loads = sorted(transfers.loads)
        if self._on_gpu:
            self._queue_stores(stores)
            self._queue_loads(loads)
            return
        for block, slot in stores:
            if (ids := self._device_ids([block])) is None:
                self._failed_stores.append(slot)
                continue
            self._pages.gather(ids, self._rows(slot, 1))
            self._done_stores.append(slot)
        for slot, block in loads:
            if (ids := self._device_ids([block])) is None:
                self._failed_loads.append(block)
                continue
            self._pages.scatter(self._rows(slot, 1), ids)
            self._done_loads.append(block)

    def finished(self) -> FinishedTransfers:
        if self._on_gpu:
            for piece in _take_arrived(self._stores):
                self._done_stores += piece.numbers
                if piece.buffer is not None:
                    self._free_buffers.append(piece.buffer)
            for piece in _take_arrived(self._loads):
                self._done_loads += piece.numbers
        done = FinishedTransfers(self._done_stores, self._done_loads, self._failed_stores, self._failed_loads)
        self._done_stores, self._done_loads, self._failed_stores, self._failed_loads = [], [], [], []
        return done

    def _queue_stores(self, stores: Sequence[tuple[int, int]]) -> None:
        for part in _parts(stores, _buffer_blocks(self.block_bytes)):
            slots = [slot for _, slot in part]
            if (ids := self._device_ids([block for block, _ in part])) is None:
                self._failed_stores += slots
                continue
            number = self._free_buffers.pop()
            rows = self._store_buffers[number][: len(part)]
            self._pages.gather(ids, rows)
            gathered = torch.cuda.Event()
            gathered.record()
            with torch.cuda.stream(self._storing):
                self._storing.wait_event(gathered)
                for row, slot, count in self._runs(slots):
                    self._rows(slot, count).copy_(rows[row : row + count], non_blocking=True)
                self._stores.append(_Piece(slots, _recorded(), number))

    def _queue_loads(self, loads: Sequence[tuple[int, int]]) -> None:
        if not loads:
            return
        launched = _recorded()
        with torch.cuda.stream(self._loading):
            for part in _parts(loads, self._load_buffer.shape[0]):
                blocks = [block for _, block in part]
                if (ids := self._device_ids(blocks)) is None:
                    self._failed_loads += blocks
                    continue
                rows = self._load_buffer[: len(part)]
                for row, slot, count in self._runs([slot for slot, _ in part]):
                    rows[row : row + count].copy_(self._rows(slot, count), non_blocking=True)
                self._loading.wait_event(launched)
                self._pages.scatter(rows, ids)
                self._loads.append(_Piece(blocks, _recorded(), None))

    def _device_ids(self, blocks: Sequence[int]) -> Tensor | None:
        """All that a copy allocates, so before it has begun. None: there is no memory."""
        try:
            ids = _ids(blocks)
            return ids.pin_memory().to(self._pages.device, non_blocking=True) if self._on_gpu else ids
        except (RuntimeError, MemoryError) as error:
            # Pinned memory that cannot be had is an error of CUDA like any other, but for its words.
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "out of memory" not in str(error):
                raise
            if not self._has_failed:
                self._has_failed = True
                logger.warning("KV blocks are not copied, since there is no memory for it: %s", type(error).__name__)
            return None

    def _rows(self, slot: int, count: int) -> Tensor:
        slab, row = divmod(slot, self._slots_per_slab)
        return self._slabs[slab][row : row + count]

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(row, slot, count) of neighbours in one slab; `slots` ascend."""
        start = 0
        for end in range(1, len(slots) + 1):
            goes_on = end < len(slots) and slots[end] == slots[end - 1] + 1 and slots[end] % self._slots_per_slab
            if not goes_on:
                yield start, slots[start], end - start
                start = end


def _ids(blocks: Sequence[int]) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int32)


def _recorded() -> torch.cuda.Event:
    """What has been queued on the current stream so far."""
    event = torch.cuda.Event()
    event.record()
    return event


def _take_arrived(pieces: list[_Piece]) -> list[_Piece]:
    """Those at the beginning of the line that have arrived are taken from it."""
    count = 0
    while count < len(pieces) and pieces[count].arrived.query():
        count += 1
    arrived = pieces[:count]
    del pieces[:count]
    return arrived


def _parts(pairs: Sequence[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    remaining = iter(pairs)
    while part := list(islice(remaining, size)):
        yield part
