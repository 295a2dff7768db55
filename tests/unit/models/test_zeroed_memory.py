"""Memory is there before it is used, reads as zeros, and goes back when nobody holds it."""

import gc
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from models import zeroed_memory
from models.host import HostMemoryError
from models.zeroed_memory import ZeroedMemory

MIB = 1 << 20
PAGEMAP = Path("/proc/self/pagemap")
needs_pagemap = pytest.mark.skipif(not PAGEMAP.is_file(), reason="the kernel does not say which pages are there")


def resident(memory: ZeroedMemory) -> int:
    """How many of its bytes are there or swapped out, by the page table: other tests' memory is not counted."""
    begin = np.frombuffer(memory._memory, np.uint8).ctypes.data
    with PAGEMAP.open("rb") as pagemap:
        pagemap.seek(begin // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(len(memory._memory) // mmap.PAGESIZE * 8), np.uint64)
    return int(np.count_nonzero(entries >> 62)) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_are_zeros_and_apart(dtype: torch.dtype) -> None:
    shapes = [(3, 5, 7), (1,), (2, 64)]
    tensors = ZeroedMemory(MIB).take(shapes, dtype)
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    for number, tensor in enumerate(tensors):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.float().any()
        tensor.fill_(number + 1)
    assert [tensor.float().unique().tolist() for tensor in tensors] == [[1.0], [2.0], [3.0]]


def test_so_many_as_there_is_room_for() -> None:
    shapes = [(256, 1024)] * 3  # 1 MiB each
    assert len(ZeroedMemory(3 * MIB).take(shapes, torch.float32)) == 3
    assert len(ZeroedMemory(3 * MIB - 1).take(shapes, torch.float32)) == 2
    assert ZeroedMemory(MIB - 1).take(shapes, torch.float32) == []


@needs_pagemap
@pytest.mark.parametrize("cpus", [1, 2, 16])
def test_pages_are_there_before_anybody_writes_and_gone_with_the_tensors(
    monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    monkeypatch.setattr(zeroed_memory, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(zeroed_memory, "SLICE", 8 * MIB)
    memory = ZeroedMemory(64 * MIB)
    tensors = memory.take([(32 * MIB,), (32 * MIB,)], torch.uint8)
    assert resident(memory) == 64 * MIB
    mapping = weakref.ref(memory._memory)
    del memory
    assert mapping() is not None
    del tensors
    gc.collect()
    assert mapping() is None


@needs_pagemap
def test_what_nobody_takes_goes_back() -> None:
    memory = ZeroedMemory(64 * MIB)
    for thread in memory._threads:
        thread.join()
    assert memory.touched == 64 * MIB
    assert resident(memory) == 64 * MIB
    (tensor,) = memory.take([(3, MIB), (62, MIB)], torch.uint8)
    assert resident(memory) == 3 * MIB
    assert not tensor.any()


def test_no_more_is_touched_than_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroed_memory, "SLICE", MIB)
    memory = ZeroedMemory(4096 * MIB)
    (tensor,) = memory.take([(MIB,)], torch.uint8)
    assert memory.touched < 2048 * MIB
    assert not tensor.any()


def test_what_the_kernel_refuses_is_said_in_words() -> None:
    with pytest.raises(HostMemoryError, match=r"4294967296\.00 GiB of host memory cannot be had: "):
        ZeroedMemory(1 << 62)
