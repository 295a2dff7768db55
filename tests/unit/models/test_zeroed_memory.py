"""Memory is there before it is used, reads as zeros, and goes back when nobody holds it."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from models import zeroed_memory
from models.host import HostMemoryError
from models.zeroed_memory import ZeroedMemory

MIB = 1 << 20
STATM = Path("/proc/self/statm")
needs_proc = pytest.mark.skipif(not STATM.is_file(), reason="the kernel does not say what is resident")


def resident() -> int:
    """Bytes of this process's anonymous memory that are there; what other tests left is gone before it is asked."""
    gc.collect()
    pages, shared = map(int, STATM.read_text().split()[1:3])
    return (pages - shared) * mmap.PAGESIZE


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


@needs_proc
@pytest.mark.parametrize("cpus", [1, 2, 16])
def test_pages_are_there_before_anybody_writes_and_gone_with_the_tensors(
    monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    monkeypatch.setattr(zeroed_memory, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(zeroed_memory, "SLICE", 8 * MIB)
    before = resident()
    tensors = ZeroedMemory(64 * MIB).take([(32 * MIB,), (32 * MIB,)], torch.uint8)
    assert resident() - before > 60 * MIB
    del tensors
    gc.collect()
    assert resident() - before < 8 * MIB


@needs_proc
def test_what_nobody_takes_goes_back() -> None:
    before = resident()
    memory = ZeroedMemory(64 * MIB)
    for thread in memory._threads:
        thread.join()
    assert memory.touched == 64 * MIB
    assert resident() - before > 60 * MIB
    (tensor,) = memory.take([(3, MIB), (62, MIB)], torch.uint8)
    assert resident() - before < 8 * MIB
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
