"""Launches gated_activation: act(gate) * up. Assumes that shapes were checked."""

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.jit import Kernel, load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device
from attention_backend.kernels.rows import VECTOR, check_rows, element_define

#: ACTIVATION of the kernel.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_THREADS = 128


class GatedParams(ctypes.Structure):
    """gated_activation.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("gate", "up", "out")),
        *((name, c_int64) for name in ("gate_row", "up_row")),
        *((name, c_int) for name in ("width", "row_blocks")),
    )


def refuses(width: int) -> str | None:
    """Why rows of this width have no kernel; None: they have one."""
    return f"a gated activation of {width} elements: rows are multiples of {VECTOR}" if width % VECTOR else None


@cache
def variant(dtype: torch.dtype, activation: str, arch: str) -> KernelVariant:
    defines = (element_define(dtype), ("ACTIVATION", ACTIVATIONS[activation]))
    return KernelVariant("gated_activation", arch, defines, hot=True)


def covering_set(main: torch.dtype, other: torch.dtype, arch: str) -> Iterator[KernelVariant]:
    for activation in ACTIVATIONS:
        yield variant(main, activation, arch)
    yield variant(other, "silu", arch)


def gated_activation(gate: Tensor, up: Tensor, activation: str, *, early: bool = False) -> Tensor:
    """gate, up `[rows, width]` -> `[rows, width]`, contiguous. `early`: may start before the previous kernel has ended.

    Raises UnsupportedError for rows that are not 16-byte aligned.
    """
    check_rows(gate=gate, up=up)
    rows, width = gate.shape
    out = gate.new_empty(rows, width)
    if rows:
        p = GatedParams(gate=gate.data_ptr(), up=up.data_ptr(), out=out.data_ptr())
        p.gate_row, p.up_row, p.width = gate.stride(0), up.stride(0), width
        p.row_blocks = -(-width // (_THREADS * VECTOR))
        kernel = _kernel(gate.dtype, activation, gate.device.index)
        kernel((rows * p.row_blocks, 1, 1), (_THREADS, 1, 1), p, early=early)
    return out


@cache
def _kernel(dtype: torch.dtype, activation: str, index: int) -> Kernel:
    return load(variant(dtype, activation, device.arch(index)), index)
