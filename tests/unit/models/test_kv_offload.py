"""Blocks go to host slots and come back bit for bit, whatever order, slab or stream they take."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from attention_backend.metadata import KVPages
from models import kv_offload
from models.host import HostMemoryError
from models.kv_offload import KVOffload, buffer_bytes
from models.kv_pool import KVCaches
from models.transfers import Transfers

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
BLOCK_BYTES = 2 * (2 * 16 * 8 + 2 * 16 * 4) * 4


def caches(device: torch.device, num_blocks: int = 40) -> KVCaches:
    """Two layers whose values have half the width of their keys."""
    g = torch.Generator().manual_seed(0)
    return [
        KVPages(
            torch.randn(num_blocks, 2, 16, 8, generator=g).to(device),
            torch.randn(num_blocks, 2, 16, 4, generator=g).to(device),
        )
        for _ in range(2)
    ]


def content(layers: KVCaches, block: int) -> list[Tensor]:
    return [array[block].cpu().clone() for layer in layers for array in (layer.k, layer.v)]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def settle(offload: KVOffload) -> tuple[list[int], list[int]]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    done = offload.finished()
    return sorted(done.stored_slots), sorted(done.loaded_blocks)


@pytest.fixture
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots to a slab, four blocks to a buffer."""
    monkeypatch.setattr(kv_offload, "_SLAB_BYTES", 3 * BLOCK_BYTES + 5)
    monkeypatch.setattr(kv_offload, "_BUFFER_BYTES", 4 * BLOCK_BYTES)


@pytest.mark.usefixtures("_small_slabs")
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_was_stored_comes_back_into_other_blocks(device: torch.device) -> None:
    layers = caches(device)
    offload = KVOffload(layers, 20 * BLOCK_BYTES)
    assert (offload.block_bytes, offload.num_slots) == (BLOCK_BYTES, 20)
    slots = (19, 3, 4, 5, 6, 7, 0, 2, 1, 8, 15, 9, 11, 10, 18, 12)
    pairs = list(enumerate(slots, start=1))  # (block, slot)
    before = {block: content(layers, block) for block, _ in pairs}
    offload.queue(Transfers(stores=pairs))
    for layer in layers:  # the next step writes over them
        for array in (layer.k, layer.v):
            array[1:17] = 0
    assert settle(offload) == (sorted(slot for _, slot in pairs), [])
    offload.queue(Transfers(loads=[(slot, block + 20) for block, slot in pairs]))
    assert settle(offload) == ([], [block + 20 for block, _ in pairs])
    for block, _ in pairs:
        assert same(content(layers, block + 20), before[block])
        assert not any(array.any() for array in content(layers, block))
    assert settle(offload) == ([], [])


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_block_is_stored_before_it_is_loaded_anew(device: torch.device) -> None:
    layers = caches(device)
    offload = KVOffload(layers, 4 * BLOCK_BYTES)
    old, new = content(layers, 1), content(layers, 2)
    offload.queue(Transfers(stores=[(2, 0)]))
    settle(offload)
    offload.queue(Transfers(stores=[(1, 1)], loads=[(0, 1)]))
    assert settle(offload) == ([1], [1])
    assert same(content(layers, 1), new)
    offload.queue(Transfers(loads=[(1, 3)]))
    settle(offload)
    assert same(content(layers, 3), old)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_bytes_of_a_slot_are_the_memory_itself(device: torch.device) -> None:
    layers = caches(device)
    offload = KVOffload(layers, 4 * BLOCK_BYTES)
    offload.queue(Transfers(stores=[(5, 2)]))
    settle(offload)
    stored = bytes(offload.slot_bytes(2))
    assert stored == b"".join(array.numpy().tobytes() for array in content(layers, 5))
    offload.slot_bytes(3)[:] = stored
    offload.queue(Transfers(loads=[(3, 6)]))
    settle(offload)
    assert same(content(layers, 6), content(layers, 5))


@pytest.mark.usefixtures("_small_slabs")
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory"), MemoryError()]
)
def test_copies_that_find_no_memory_are_told_and_others_made(
    error: Exception, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = caches(device)
    offload = KVOffload(layers, 20 * BLOCK_BYTES)
    make = kv_offload._ids
    room = offload.store_room()

    def fails_for_block_5(blocks: Sequence[int]) -> Tensor:
        if 5 in blocks:
            raise error
        return make(blocks)

    monkeypatch.setattr(kv_offload, "_ids", fails_for_block_5)
    before = {block: content(layers, block) for block in (1, 5)}
    offload.queue(Transfers(stores=[(1, 10), (5, 15)]))
    if device.type == "cuda":
        torch.cuda.synchronize()
    done = offload.finished()
    failed = {10, 15} if device.type == "cuda" else {15}  # there in one piece
    assert set(done.failed_slots) == failed
    assert set(done.stored_slots) == {10, 15} - failed
    assert offload.store_room() == room
    monkeypatch.setattr(kv_offload, "_ids", make)
    offload.queue(Transfers(stores=[(1, 10), (5, 15)]))
    assert settle(offload)[0] == [10, 15]
    monkeypatch.setattr(kv_offload, "_ids", fails_for_block_5)
    offload.queue(Transfers(loads=[(10, 5)]))
    assert offload.finished().failed_blocks == [5]
    offload.queue(Transfers(loads=[(15, 6)]))
    assert settle(offload) == ([], [6])
    assert same(content(layers, 6), before[5])
    assert same(content(layers, 5), before[5])


def test_other_errors_of_a_copy_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_blocks: Sequence[int]) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    offload = KVOffload(caches(CPU), 4 * BLOCK_BYTES)
    monkeypatch.setattr(kv_offload, "_ids", fails)
    with pytest.raises(RuntimeError, match="illegal"):
        offload.queue(Transfers(stores=[(1, 0)]))


@pytest.mark.gpu
@pytest.mark.usefixtures("_small_slabs")
def test_there_is_room_again_when_stores_have_arrived() -> None:
    offload = KVOffload(caches(torch.device("cuda")), 40 * BLOCK_BYTES)
    assert offload.store_room() == 16
    offload.queue(Transfers(stores=[(block, block) for block in range(1, 6)]))
    assert offload.store_room() == 8
    with pytest.raises(ValueError, match="room for 8"):
        offload.queue(Transfers(stores=[(block, block) for block in range(10, 19)]))
    settle(offload)
    assert offload.store_room() == 16


def test_memory_that_is_not_there_is_refused() -> None:
    layers = caches(CPU)
    with pytest.raises(HostMemoryError, match="are free"):
        KVOffload(layers, 1 << 60)
    with pytest.raises(HostMemoryError):
        KVOffload(layers, BLOCK_BYTES - 1)


def test_buffers_hold_whole_blocks_and_no_more_than_asked() -> None:
    assert buffer_bytes(8 << 20) == 5 * (128 << 20)
    assert buffer_bytes(1 << 30) == 5 << 30
    assert buffer_bytes(1 << 10) == 5 * (64 << 10)
