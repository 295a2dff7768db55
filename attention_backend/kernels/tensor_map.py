"""Tensor maps: what the TMA needs to know of a tensor, encoded by the driver. Knows no kernel."""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

_BFLOAT16, _FLOAT16 = 9, 6  # CUtensorMapDataType
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_BOX_COLUMNS = 64  # elements: the 128 bytes of a swizzled row
_BYTES = 128
_ALIGNMENT = 64


class TensorMapError(RuntimeError):
    """The driver refused to encode a tensor map."""


class TensorMap(ctypes.Structure):
    """A CUtensorMap, passed to kernels by value."""

    _fields_ = (("opaque", ctypes.c_char * _BYTES),)


def tensor_map(x: Tensor, rows: int) -> TensorMap:
    """The map of x `[batch, rows, heads, width]` or `[rows, heads, width]` for copies of `rows` x 64 elements.

    Coordinates are (column, row, head, batch). Raises TensorMapError for layouts that the TMA cannot read.
    """
    shape = x.shape if x.dim() == 4 else (1, *x.shape)
    strides = x.stride() if x.dim() == 4 else (x.shape[0] * x.stride(0), *x.stride())
    return _encode(x.dtype, x.data_ptr(), tuple(shape), strides, rows)


@lru_cache(maxsize=4096)
def _encode(dtype: torch.dtype, address: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> TensorMap:
    batch, length, heads, width = shape
    # A dimension of one element may have any stride; the driver wants a plain one.
    steps = [2 * (s if n > 1 else width) for s, n in zip(strides[:3], shape[:3], strict=True)]
    sizes = (ctypes.c_uint64 * 4)(width, length, heads, batch)
    pitches = (ctypes.c_uint64 * 3)(steps[1], steps[2], steps[0])
    box = (ctypes.c_uint32 * 4)(_BOX_COLUMNS, rows, 1, 1)
    ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    space = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    aligned = ctypes.addressof(space) + (-ctypes.addressof(space)) % _ALIGNMENT
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _BFLOAT16 if dtype == torch.bfloat16 else _FLOAT16,
        4,
        ctypes.c_void_p(address),
        sizes,
        pitches,
        box,
        ones,
        0,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        0,
    )
    if code != 0:
        raise TensorMapError(f"CUDA error {code} for a tensor of shape {shape}, strides {strides}, in boxes of {rows}")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, _BYTES))


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
