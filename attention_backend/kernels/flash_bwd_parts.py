"""dK and dV where several blocks share a key head's query heads: a float32 part each, then flash_bwd_sum_parts."""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.jit import load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device
from attention_backend.kernels.rows import VECTOR, element_define
from attention_backend.problem import AttentionArgs

_THREADS = 256
_TENSORS = 2  # dK and dV


class SumPartsParams(ctypes.Structure):
    """flash_bwd_sum_parts.cuh"""

    _fields_ = (
        *((name, c_void_p * _TENSORS) for name in ("parts", "totals")),
        ("vectors", c_int64 * _TENSORS),
        *((name, c_int) for name in ("count", "reserved")),
    )


@cache
def sum_parts_variant(dtype: torch.dtype, arch: str) -> KernelVariant:
    return KernelVariant("flash_bwd_sum_parts", arch, (element_define(dtype),), hot=True)


def tapered(args: AttentionArgs) -> bool:
    """Whether later keys are seen by fewer rows, as far as the host knows: a causal mask without a window."""
    return args.mask_desc is not None or (args.window_right >= 0 and args.window_left < 0)


def new_parts(total: Tensor, parts: int, *, zeroed: bool) -> Tensor:
    """float32 `[parts, *total.shape]`; zeros where some keys belong to no block (`zeroed`)."""
    new = torch.Tensor.new_zeros if zeroed else torch.Tensor.new_empty
    return new(total, (parts, *total.shape), dtype=torch.float32)


def sum_parts(parts: tuple[Tensor, Tensor], totals: tuple[Tensor, Tensor]) -> None:
    """Each of `totals`, contiguous with a multiple of 8 elements, becomes the sum of its `parts` in their order."""
    p = SumPartsParams(count=parts[0].shape[0])
    for i, (part, total) in enumerate(zip(parts, totals, strict=True)):
        p.parts[i], p.totals[i], p.vectors[i] = part.data_ptr(), total.data_ptr(), total.numel() // VECTOR
    index = totals[0].device.index
    blocks = -(-max(p.vectors) // _THREADS)
    kernel = load(sum_parts_variant(totals[0].dtype, device.arch(index)), index)
    kernel((blocks, _TENSORS, 1), (_THREADS, 1, 1), p)
