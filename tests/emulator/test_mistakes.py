"""The emulator finds the mistakes that it is for, each in a kernel that is right without it."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention_backend.jit.spec import KernelVariant

from .compile import EmulatorError
from .device import EmulatedKernel, Settings
from .memory import guarded

COUNT = 64
NONE, BEYOND_TENSOR, BEYOND_SHARED, MISSED_BARRIER, NO_BARRIER, EARLY_READ, NO_BYTES, MISALIGNED, MISSED_SHUFFLE = (
    range(9)
)


class MistakeParams(ctypes.Structure):
    """mistakes.cuh"""

    _fields_ = (("from", ctypes.c_void_p), ("to", ctypes.c_void_p), ("count", ctypes.c_int), ("mistake", ctypes.c_int))


def turned(mistake: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What the kernel wrote, and what it should have written."""
    source, target = guarded(torch.arange(COUNT).float()), guarded(torch.zeros(COUNT))
    kernel = EmulatedKernel(KernelVariant("mistakes", "sm_90a"), Settings(seed=seed), Path(__file__).parent)
    params = MistakeParams(source.data_ptr(), target.data_ptr(), COUNT, mistake)
    kernel((1, 1, 1), (COUNT, 1, 1), params, 4 * COUNT)
    return target, source.flip(0)


def test_a_kernel_without_a_mistake_is_right() -> None:
    for seed in range(6):
        assert torch.equal(*turned(NONE, seed))


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (BEYOND_TENSOR, "memory that is nobody's"),
        (BEYOND_SHARED, "shared memory"),
        (MISSED_BARRIER, "all wait for each other.*barrier 0"),
        (NO_BYTES, "all wait for each other.*an mbarrier"),
        (MISALIGNED, "misaligned"),
        (MISSED_SHUFFLE, "all wait for each other.*a shuffle"),
    ],
)
def test_a_mistake_ends_the_launch(mistake: int, found: str) -> None:
    with pytest.raises(EmulatorError, match=found):
        turned(mistake)
    assert torch.equal(*turned(NONE))  # the next launch knows nothing of it


@pytest.mark.parametrize("mistake", [NO_BARRIER, EARLY_READ])
def test_a_race_gives_wrong_numbers(mistake: int) -> None:
    assert not all(torch.equal(*turned(mistake, seed)) for seed in range(6))
