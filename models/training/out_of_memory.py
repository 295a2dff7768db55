"""What a forward or backward that fails leaves behind: nothing that the next one would meet. Knows no model."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from models.host import available_memory_bytes
from models.training.errors import OutOfMemoryError


@contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Around forwards and backwards. torch.OutOfMemoryError becomes OutOfMemoryError(advice), and so does what torch
    says of a CPU, which is a RuntimeError."""
    try:
        yield
    except Exception as error:
        _drop_frames(error)
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error):
            raise OutOfMemoryError(advice) from error
        raise


def room_for_training(device: torch.device) -> int:
    """Bytes of the device's memory that this process could have: what is free, and what it holds. Of a host, what is
    free."""
    if device.type != "cuda":
        return available_memory_bytes()
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device)


def _drop_frames(error: BaseException) -> None:
    """Whoever keeps the exception keeps its frames, and they keep the graph and its activations.

    And more: in torch before https://github.com/pytorch/pytorch/pull/184018 (2.11, say) a checkpointed layer whose
    forward fails leaves its saved-tensor hooks and its dispatch mode in force until its frame goes. Every tensor that
    the next forward saves would count as that layer's, and what is entered meanwhile would be left in the wrong order.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)  # but those that still run
            chain += [one.__cause__, one.__context__]
