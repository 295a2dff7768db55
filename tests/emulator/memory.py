"""Tensors whose last byte is the last before a page that nobody may touch: an access beyond them ends the launch."""

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16  # where tensors begin; what they lack to a multiple of it lies between their end and the page
_FACTORIES = {
    torch: ("empty", "empty_like", "zeros", "zeros_like", "full"),
    Tensor: ("new_empty", "new_zeros", "new_full"),
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(x: Tensor) -> Tensor:
    """A copy with the shape and strides of x and whatever else its storage holds, between two such pages."""
    storage = x.untyped_storage()
    size = storage.nbytes()
    if size == 0 or x.is_meta:
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
    return whole[:0].view(x.dtype).set_(whole.untyped_storage(), x.storage_offset(), x.shape, x.stride())


class GuardedAllocations(TorchFunctionMode):
    """Inside, every tensor that torch makes is guarded, and on the CPU whatever device is asked for; views, and what is
    written in place, stay what they are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [_on_cpu(x) for x in args]
        named = {name: _on_cpu(x) for name, x in (kwargs or {}).items()}
        made = function(*given, **named)
        if not isinstance(made, Tensor) or made.is_meta or made.requires_grad:
            return made
        place = made.untyped_storage().data_ptr()
        others = _tensors((*given, *named.values()))
        return made if any(place == x.untyped_storage().data_ptr() for x in others) else guarded(made)


@contextmanager
def guarded_factories() -> Iterator[None]:
    """The same of what makes tensors of nothing, inside of operators too, where no mode reaches."""
    with ExitStack() as stack:
        for owner, names in _FACTORIES.items():
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _guarding(getattr(owner, name))))
        yield


def _guarding(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(real)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return guarded(real(*map(_on_cpu, args), **{name: _on_cpu(x) for name, x in kwargs.items()}))

    return made


def _on_cpu(x: Any) -> Any:
    is_gpu = (isinstance(x, torch.device) and x.type == "cuda") or (isinstance(x, str) and x.startswith("cuda"))
    return torch.device("cpu") if is_gpu else x


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
