"""What a forward or backward that fails leaves behind: nothing that the next one would meet. Knows no model."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from models.host import available_memory_bytes
from models.training.errors import OutOfMemoryError

#: What says so without torch's own error: torch of a CPU; CUDA, its driver and its libraries of a GPU, where torch's
#: allocator had no part in it (a context, a kernel that is loaded, a library's handle).
_SIGNS = (
    "DefaultCPUAllocator: can't allocate",
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


@contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Around forwards and backwards. What says that a device has no memory left becomes OutOfMemoryError(advice), and
    what torch has kept of it goes back: others may want it."""
    try:
        yield
    except Exception as error:
        _drop_frames(error)
        if is_out_of_memory(error):
            _give_back()
            raise OutOfMemoryError(advice) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


def room_for_training(device: torch.device, spare: int = 0) -> int | None:
    """Bytes of the device's memory that this process could have, but for `spare`: what is free, and what it holds. Of a
    host, what is free. None: not even that can be asked for want of memory."""
    if device.type != "cuda":
        return available_memory_bytes()
    try:
        free: int = torch.cuda.mem_get_info(device)[0]
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise
    return max(0, free + torch.cuda.memory_reserved(device) - spare)


def leave_spare(device: torch.device, spare: int) -> None:
    """From now on this process takes no more of a GPU than is free now, but for `spare` bytes."""
    if device.type != "cuda" or not spare:
        return
    free, total = torch.cuda.mem_get_info(device)
    most = max(0, free + torch.cuda.memory_reserved(device) - spare)
    torch.cuda.set_per_process_memory_fraction(most / total, device.index)


def _give_back() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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
