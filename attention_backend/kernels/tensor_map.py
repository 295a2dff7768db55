"""Tensor maps: what the TMA needs to know of a tensor, encoded by the driver. Knows no kernel."""

import ctypes
from functools import lru_cache, partial

import torch
from torch import Tensor

from attention_backend.jit import driver as drivers

_DATA_TYPES = {
    torch.bfloat16: 9,
    torch.float16: 6,
    torch.float32: 7,
    torch.uint32: 2,
    torch.uint64: 4,
    torch.float8_e4m3fn: 0,  # bytes
}  # CUtensorMapDataType
_TOGETHER = 2  # 16-bit elements that are counted as one
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3
_L2_PROMOTION_128B = 2  # 256 bytes read pages at 0.92 of the speed (docs/log.md, 2026-11-26, second part)
_BOX_COLUMNS = 64  # elements: the 128 bytes of a swizzled row
_BYTES = 128
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
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
    (batch, length, heads, width), (by_batch, by_row, by_head, _) = _layout(x)
    sizes, steps = (width, length, heads, batch), (by_row, by_head, by_batch)
    return _encode(x.dtype, x.data_ptr(), sizes, steps, (_BOX_COLUMNS, rows, 1, 1))


def wide_tensor_map(x: Tensor, rows: int, columns: int) -> TensorMap:
    """As `tensor_map`, for copies of `rows` x `columns` (up to 256) elements that lie without gaps in shared memory."""
    (batch, length, heads, width), (by_batch, by_row, by_head, _) = _layout(x)
    sizes, steps = (width, length, heads, batch), (by_row, by_head, by_batch)
    return _encode(x.dtype, x.data_ptr(), sizes, steps, (columns, rows, 1, 1), _NO_SWIZZLE)


def whole_row_tensor_map(x: Tensor, rows: int) -> TensorMap:
    """As `tensor_map`, for copies of `rows` whole rows; the width is a multiple of 64.

    Coordinates are (column, slab of 64 columns, row, head, batch); in shared memory a row's slabs follow each other.
    """
    (batch, length, heads, width), (by_batch, by_row, by_head, _) = _layout(x)
    slabs = width // _BOX_COLUMNS
    sizes, steps = (_BOX_COLUMNS, slabs, length, heads, batch), (_BOX_COLUMNS, by_row, by_head, by_batch)
    return _encode(x.dtype, x.data_ptr(), sizes, steps, (_BOX_COLUMNS, slabs, rows, 1, 1))


def packed_tensor_map(x: Tensor, group: int, rows: int) -> TensorMap:
    """As `tensor_map`, for copies of `rows` rows of `group` neighbouring heads: row by row, head by head.

    Coordinates are (column, head of the group, row, group of heads, batch).
    """
    (batch, length, heads, width), (by_batch, by_row, by_head, _) = _layout(x)
    sizes, steps = (width, group, length, heads // group, batch), (by_head, by_row, group * by_head, by_batch)
    return _encode(x.dtype, x.data_ptr(), sizes, steps, (_BOX_COLUMNS, group, rows, 1, 1))


def plain_tensor_map(x: Tensor, columns: int) -> TensorMap:
    """The map of x `[rows, width]` for copies of `columns` (up to 256) neighbours of a row, as they lie.

    Coordinates are (column, row).
    """
    rows, width = x.shape
    return _encode(x.dtype, x.data_ptr(), (width, rows), (x.stride(0),), (columns, 1), _NO_SWIZZLE)


def packed_columns_map(x: Tensor, columns: int, rows: int) -> TensorMap:
    """The map of x `[rows, width]`, 16-bit, for copies of `rows` rows and `columns` (up to 512) columns, as they lie.

    A box has 256 elements of a row at most, so the map counts two columns as one. Coordinates are (element, row).
    """
    height, width = x.shape
    sizes, steps = (width // _TOGETHER, height), (x.stride(0) // _TOGETHER,)
    return _encode(torch.uint32, x.data_ptr(), sizes, steps, (columns // _TOGETHER, rows), _NO_SWIZZLE)


def _layout(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of four dimensions."""
    shape, strides = x.shape, x.stride()
    if len(shape) == 4:
        return shape, strides
    return (1, *shape), (shape[0] * strides[0], *strides)


@lru_cache(maxsize=4096)
def _encode(
    dtype: torch.dtype,
    address: int,
    sizes: tuple[int, ...],
    steps: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = _SWIZZLE_128B,
) -> TensorMap:
    """`steps`: elements between neighbours along every dimension but the first."""
    rank, element = len(sizes), dtype.itemsize
    # A dimension of one element may have any stride; the driver wants a plain one.
    pitches = [element * (s if n > 1 else sizes[0]) for s, n in zip(steps, sizes[1:], strict=True)]
    space = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    aligned = ctypes.addressof(space) + (-ctypes.addressof(space)) % _ALIGNMENT
    encode = partial(
        drivers.library().cuTensorMapEncodeTiled,
        ctypes.c_void_p(aligned),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*pitches),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0,
        swizzle,
        _L2_PROMOTION_128B,
        0,
    )
    code = encode()
    if code == _NO_CONTEXT:  # a thread that never called CUDA, as one of autograd's whose backward begins here
        drivers.driver().set_context(drivers.driver().primary_context(torch.cuda.current_device()))
        code = encode()
    if code != 0:
        raise TensorMapError(f"CUDA error {code} for a tensor of sizes {sizes}, steps {steps}, in boxes of {box}")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, _BYTES))
