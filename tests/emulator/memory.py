"""Tensors whose last byte is the last before a page that nobody may touch: an access beyond them ends the launch."""

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16  # where tensors begin; what they lack to a multiple of it lies between their end and the page
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(x: Tensor) -> Tensor:
    """A copy with the shape and strides of x and whatever else its storage holds, between two such pages."""
    storage = x.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return x
    rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
    pages = -(-rounded // _PAGE)
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for place in (begin, begin + (pages + 1) * _PAGE):
        if _libc.mprotect(place, _PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    first = (pages + 1) * _PAGE - rounded
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first)
    whole.untyped_storage().copy_(storage)
    return torch.empty(0, dtype=x.dtype).set_(whole.untyped_storage(), x.storage_offset(), x.shape, x.stride())


class GuardedAllocations(TorchFunctionMode):
    """Inside, every tensor that torch makes is guarded; views, and what is written in place, stay what they are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        made = function(*args, **(kwargs or {}))
        if not isinstance(made, Tensor) or made.device.type != "cpu" or made.requires_grad:
            return made
        place = made.untyped_storage().data_ptr()
        return made if any(place == x.untyped_storage().data_ptr() for x in _tensors(given)) else guarded(made)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
