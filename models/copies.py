"""Small arrays between host and device without waiting. Knows nothing of what they mean."""

import numpy as np
import torch
from torch import Tensor

#: Pinned arrays of each power of two of bytes that torch may have at hand: those of steps on their way, and more. From
#: one byte on (a flag of one row): a step that wanted those asked the driver beside nine other processes.
_SMALLEST, _LARGEST, _OF_EACH = 1, 256 << 10, 32


def reserve_pinned(device: torch.device) -> None:
    """Pinned memory for the small arrays of a GPU's steps (16 MiB), which torch keeps for them from now on. Where it
    has none left, it asks the driver, which waits for all that the GPU was told to do."""
    if device.type != "cuda":
        return
    sizes = [_SMALLEST << i for i in range((_LARGEST // _SMALLEST).bit_length())]
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(_OF_EACH)]
    del held


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy in the order of the current stream. On a CPU the array itself: it must not change while it is used."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, complete when the current stream comes to here: record an event and wait for it."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
