"""How much of a host's memory the pages take, and when they may begin to."""

from pathlib import Path

import pytest
import torch

from models import cpu_pool
from models.cpu_pool import POOL_BYTES, begin_pool, check_room, cpu_pool_bytes
from models.host import HostMemoryError
from models.zeroed_memory import ZeroedMemory

MIB = 1 << 20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that this host says are free."""
    monkeypatch.setattr(cpu_pool, "available_memory_bytes", lambda: 400 * MIB)
    return 400 * MIB


def weights(folder: Path, size: int) -> Path:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return folder


def test_a_pool_is_modest_unless_asked_for() -> None:
    assert 0 < cpu_pool_bytes(None) <= POOL_BYTES
    assert cpu_pool_bytes(123) == 123


def test_what_is_the_pools_already_counts_as_free(free: int) -> None:
    memory = ZeroedMemory(8 * MIB)
    memory.take([(8 * MIB,)], torch.uint8)
    assert cpu_pool_bytes(None) == free // 4
    assert cpu_pool_bytes(None, memory) == (free + 8 * MIB) // 4
    check_room(free + 8 * MIB, memory)


def test_no_more_than_a_modest_pool_however_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pool, "available_memory_bytes", lambda: 1 << 40)
    assert cpu_pool_bytes(None) == POOL_BYTES


def test_it_begins_with_a_share_of_what_the_weights_leave(free: int, tmp_path: Path) -> None:
    memory = begin_pool(weights(tmp_path, free // 8), None)
    assert memory is not None
    assert memory._size == free // 8


@pytest.mark.parametrize("asked", [None, 400 << 20])
def test_it_does_not_begin_before_weights_that_may_need_the_memory(
    free: int, tmp_path: Path, asked: int | None
) -> None:
    assert begin_pool(weights(tmp_path, free // 4), asked) is None


def test_it_begins_with_what_was_asked_for_if_that_is_there(free: int, tmp_path: Path) -> None:
    memory = begin_pool(weights(tmp_path, 0), 8 * MIB)
    assert memory is not None
    assert memory._size == 8 * MIB
    assert begin_pool(tmp_path, free + 1) is None


def test_a_pool_that_is_not_there_is_refused_in_words(free: int) -> None:
    check_room(free)
    with pytest.raises(HostMemoryError, match=r"would take 1\.00 GiB of memory, and 0\.39 GiB are free: give it less"):
        check_room(1 << 30)
