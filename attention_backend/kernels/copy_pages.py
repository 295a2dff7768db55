"""Launches copy_pages: blocks of the KV cache to rows of a buffer, and back. Assumes that shapes were checked."""

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

from torch import Tensor

from attention_backend.jit import load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device

_THREADS = 256


class CopyPagesParams(ctypes.Structure):
    """copy_pages.cuh"""

    _fields_ = (("arrays", c_void_p), ("blocks", c_void_p), ("rows", c_void_p), ("row_bytes", c_int64))


@cache
def copy_pages_variant(arch: str, *, to_pages: bool) -> KernelVariant:
    return KernelVariant("copy_pages", arch, (("TO_PAGES", int(to_pages)),), hot=True)


def copy_pages(arrays: Tensor, blocks: Tensor, rows: Tensor, *, to_pages: bool) -> None:
    """`arrays` int64 `[n, 4]`: address, bytes from page to page, bytes of a page, its offset in a row; blocks int32
    `[m]`; rows uint8 `[m, row_bytes]`. All of these sizes are multiples of 16 bytes."""
    if not blocks.shape[0]:
        return
    p = CopyPagesParams()
    p.arrays, p.blocks, p.rows, p.row_bytes = arrays.data_ptr(), blocks.data_ptr(), rows.data_ptr(), rows.stride(0)
    index = rows.device.index
    kernel = load(copy_pages_variant(device.arch(index), to_pages=to_pages), index)
    kernel((arrays.shape[0], blocks.shape[0], 1), (_THREADS, 1, 1), p)
