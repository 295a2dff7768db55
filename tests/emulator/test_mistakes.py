"""The emulator finds the mistakes that it is for, each in a kernel that is right without it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention_backend.jit.spec import KernelVariant

from .compile import EmulatorError
from .device import EmulatedKernel, Settings
from .memory import guarded

COUNT, THREADS = 64, 384
(
    NONE, BEYOND_TENSOR, BEYOND_SHARED, MISSED_BARRIER, NO_BARRIER, EARLY_READ, NO_BYTES, MISALIGNED, MISSED_SHUFFLE,
    TOO_MANY_REGISTERS,
) = range(10)  # mistakes.cuh  # fmt: skip
(
    NO_BARRIER_THERE, MISALIGNED_STORE, MISALIGNED_COPY, BEYOND_SHARED_THERE, NO_BLOCK, BARRIER_HERE, OTHER_BARRIER,
    TOO_MANY_BYTES, NO_BYTES_EXPECTED, NO_WAIT, BLOCK_LEAVES, SOURCE_LEAVES, SOURCE_CHANGES,
) = range(1, 14)  # exchange.cuh  # fmt: skip
ZEROS_UNWRITTEN, SUMS_UNWRITTEN, SUMS_UNREAD, SUMS_AGAIN, RESULT_UNREAD = range(1, 6)  # sums.cuh
SEEDS = range(6)


class MistakeParams(ctypes.Structure):
    """mistakes.cuh"""

    _fields_ = (("from", ctypes.c_void_p), ("to", ctypes.c_void_p), ("count", ctypes.c_int), ("mistake", ctypes.c_int))


class ExchangeParams(ctypes.Structure):
    """exchange.cuh"""

    _fields_ = (("from", ctypes.c_void_p), ("to", ctypes.c_void_p), ("mistake", ctypes.c_int))


class SumsParams(ctypes.Structure):
    """sums.cuh"""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("from", "sums", "to", "told")), ("mistake", ctypes.c_int))


def turned(mistake: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What the kernel wrote, and what it should have written."""
    source, target = guarded(torch.arange(COUNT).float()), guarded(torch.zeros(COUNT))
    kernel = EmulatedKernel(KernelVariant("mistakes", "sm_90a"), Settings(seed=seed), Path(__file__).parent)
    params = MistakeParams(source.data_ptr(), target.data_ptr(), COUNT, mistake)
    kernel((1, 1, 1), (THREADS, 1, 1), params, 4 * COUNT)
    return target, source.flip(0)


def exchanged(mistake: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What blocks received of each other in two rounds, and what they should have."""
    rounds, threads, words = 2, 32, 9
    source = guarded(torch.arange(1, 1 + rounds * 2 * threads * words, dtype=torch.int32).view(rounds, 2, -1))
    target = guarded(torch.zeros_like(source))
    variant = KernelVariant("exchange", "sm_90a", (("CLUSTER", 2),))
    kernel = EmulatedKernel(variant, Settings(seed=seed), Path(__file__).parent)
    params = ExchangeParams(source.data_ptr(), target.data_ptr(), mistake)
    kernel((2, 1, 1), (threads, 1, 1), params, 4 * (4 + words) * threads)
    sent = source.flip(1)
    sent[:, 1, threads // 2 * words :] = 0  # block 0 sends half
    return target, sent


def summed(mistake: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What each of three blocks took for the sum of what all had, and that sum."""
    source = guarded(torch.arange(3 * COUNT).view(3, COUNT).float())
    sums, target, told = guarded(torch.full((COUNT,), 7.0)), guarded(torch.zeros(3, COUNT)), torch.zeros(1).int()
    kernel = EmulatedKernel(KernelVariant("sums", "sm_90a"), Settings(seed=seed), Path(__file__).parent)
    params = SumsParams(*(x.data_ptr() for x in (source, sums, target, told)), mistake)
    kernel((3, 1, 1), (COUNT, 1, 1), params, 4 * COUNT, cooperative=True)
    return target, source.sum(0).expand(3, -1)


def report(mistake: int, seed: int) -> str:
    """What the emulator says of it."""
    try:
        exchanged(mistake, seed)
    except EmulatorError as error:
        return str(error)
    return ""


def test_a_kernel_without_a_mistake_is_right() -> None:
    for seed in SEEDS:
        assert torch.equal(*turned(NONE, seed))
        assert torch.equal(*exchanged(NONE, seed))
        assert torch.equal(*summed(NONE, seed))


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (BEYOND_TENSOR, "memory that is nobody's"),
        (BEYOND_SHARED, "shared memory"),
        (MISSED_BARRIER, "all wait for each other.*barrier 1"),
        (NO_BYTES, "all wait for each other.*an mbarrier"),
        (MISALIGNED, "misaligned"),
        (MISSED_SHUFFLE, "all wait for each other.*a shuffle"),
        (TOO_MANY_REGISTERS, "a block of 64512 registers is asked for"),
    ],
)
def test_a_mistake_ends_the_launch(mistake: int, found: str) -> None:
    with pytest.raises(EmulatorError, match=found):
        turned(mistake)
    assert torch.equal(*turned(NONE))  # the next launch knows nothing of it


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (MISALIGNED_STORE, "a misaligned store"),
        (MISALIGNED_COPY, "a misaligned bulk copy"),
        (BEYOND_SHARED_THERE, "shared memory"),
        (NO_BLOCK, "of no block"),
        (BARRIER_HERE, "an mbarrier of another"),
        (OTHER_BARRIER, "all wait for each other.*an mbarrier"),
        (TOO_MANY_BYTES, "all wait for each other.*an mbarrier"),
        (BLOCK_LEAVES, "has ended|before copies to it have landed"),
    ],
)
def test_a_mistake_between_blocks_ends_the_launch(mistake: int, found: str) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=found):
            exchanged(mistake, seed)
    assert torch.equal(*exchanged(NONE))


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (NO_BARRIER_THERE, "that was not made"),
        (NO_BYTES_EXPECTED, "bytes that nobody expected"),
        (NO_WAIT, "before copies to it have landed"),
        (SOURCE_LEAVES, "before copies from it have read"),
    ],
)
def test_a_race_between_blocks_ends_the_launch_in_some_order(mistake: int, found: str) -> None:
    assert any(found in report(mistake, seed) for seed in range(20))


def test_a_thread_does_not_end_while_its_copies_read() -> None:
    with pytest.raises(EmulatorError, match="ends while its bulk copies read shared memory"):
        summed(RESULT_UNREAD)
    assert torch.equal(*summed(NONE))


@pytest.mark.parametrize(
    ("transfer", "mistake"),
    [
        (turned, NO_BARRIER),
        (turned, EARLY_READ),
        (exchanged, SOURCE_CHANGES),
        (summed, ZEROS_UNWRITTEN),
        (summed, SUMS_UNWRITTEN),
        (summed, SUMS_UNREAD),
        (summed, SUMS_AGAIN),
    ],
)
def test_a_race_gives_wrong_numbers(transfer: Callable[[int, int], tuple[Tensor, Tensor]], mistake: int) -> None:
    assert not all(torch.equal(*transfer(mistake, seed)) for seed in SEEDS)
