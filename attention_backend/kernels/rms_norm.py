"""Launches rms_norm: RMSNorm of rows, after adding the residual if there is one. Assumes that shapes were checked."""

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.jit import Kernel, load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device
from attention_backend.kernels.rows import VECTOR, check_rows, element_define

_MAX_THREADS = 512
_VECTORS = (1, 2, 4, 8)  # of a thread


class RmsNormParams(ctypes.Structure):
    """rms_norm.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "residual", "weight", "out", "sum")),
        *((name, c_int64) for name in ("x_row", "residual_row")),
        ("width", c_int),
        ("eps", c_float),
    )


def refuses(width: int) -> str | None:
    """Why rows of this width have no kernel; None: they have one."""
    most = _VECTORS[-1] * _MAX_THREADS * VECTOR
    if width % VECTOR or width > most:
        return f"rows of {width} elements: RMSNorm takes multiples of {VECTOR} up to {most}"
    return None


@cache
def variant(dtype: torch.dtype, width: int, arch: str, *, add: bool, unit_offset: bool) -> tuple[KernelVariant, int]:
    """The kernel, and its threads. Raises UnsupportedError."""
    chunks = width // VECTOR
    vectors = next((v for v in _VECTORS if chunks <= v * _MAX_THREADS), None)
    if vectors is None:
        raise UnsupportedError(
            f"rows of {width} elements: RMSNorm takes {_VECTORS[-1] * _MAX_THREADS * VECTOR} at most"
        )
    threads = -(-chunks // (32 * vectors)) * 32
    defines = (
        element_define(dtype),
        ("ADD", int(add)),
        ("UNIT_OFFSET", int(unit_offset)),
        ("VECTORS", vectors),
    )
    return KernelVariant("rms_norm", arch, defines, hot=True), threads


def covering_set(main: torch.dtype, other: torch.dtype, arch: str) -> Iterator[KernelVariant]:
    for width in (4096, 8192, 16384):
        for add in (False, True):
            yield variant(main, width, arch, add=add, unit_offset=False)[0]
    for add in (False, True):
        yield variant(other, 4096, arch, add=add, unit_offset=False)[0]
        yield variant(main, 4096, arch, add=add, unit_offset=True)[0]
    yield variant(main, 32768, arch, add=True, unit_offset=True)[0]


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, unit_offset: bool, early: bool = False
) -> tuple[Tensor, Tensor]:
    """x and residual `[rows, width]`, weight `[width]` -> (normed, x + residual), contiguous; the sum is x without a
    residual. `early`: may start before the previous kernel has ended, and reads the weight then.

    Raises UnsupportedError for rows that are not 16-byte aligned.
    """
    if residual is None:
        check_rows(x=x, weight=weight)
    else:
        check_rows(x=x, residual=residual, weight=weight)
    rows, width = x.shape
    out = x.new_empty(rows, width)
    total = x if residual is None else x.new_empty(rows, width)
    if rows:
        p = RmsNormParams(x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(), x_row=x.stride(0))
        p.width, p.eps = width, eps
        if residual is not None:
            p.residual, p.residual_row, p.sum = residual.data_ptr(), residual.stride(0), total.data_ptr()
        kernel, threads = _kernel(x.dtype, width, x.device.index, residual is not None, unit_offset)
        kernel((rows, 1, 1), (threads, 1, 1), p, early=early)
    return out, total


@cache
def _kernel(dtype: torch.dtype, width: int, index: int, add: bool, unit_offset: bool) -> tuple[Kernel, int]:
    """The kernel on a device, and its threads."""
    chosen, threads = variant(dtype, width, device.arch(index), add=add, unit_offset=unit_offset)
    return load(chosen, index), threads
