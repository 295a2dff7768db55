"""What the Hopper forward is launched with, field by field as in parts/hopper_params.cuh. Knows layouts only."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from attention_backend.kernels.dropout_params import DropoutParams
from attention_backend.kernels.params import ForwardParams

if TYPE_CHECKING:
    from attention_backend.block_sparsity import BlockSparsity


class WorkParams(ctypes.Structure):
    """How the work is shared out."""

    _fields_ = (
        ("counters", c_void_p),
        ("out_split", c_int64),
        ("lse_split", c_int64),
        *((name, c_int) for name in ("batch", "heads", "pack", "tile_rows")),
        *((name, c_int) for name in ("num_splits", "key_heads", "heads_per_key", "key_bytes", "chosen", "reserved")),
    )


class SparseParams(ctypes.Structure):
    """Lists of blocks."""

    _fields_ = (
        *((name, c_void_p) for name in ("counts", "blocks", "bit_rows", "bits")),
        *((name, c_int) for name in ("blocks_row", "bit_rows_row", "batch", "head")),
    )


class HopperParams(ctypes.Structure):
    """The kernel's one structure beside its tensor maps."""

    _fields_ = (
        ("forward", ForwardParams),
        ("work", WorkParams),
        ("sparse", SparseParams),
        ("dropout", DropoutParams),
        *((name, c_void_p) for name in ("k_scale", "v_scale")),
    )


def sparse_params(sparsity: BlockSparsity) -> SparseParams:
    batch, heads, rows, _ = sparsity.counts.shape
    return SparseParams(
        sparsity.counts.data_ptr(),
        sparsity.blocks.data_ptr(),
        sparsity.bit_rows.data_ptr(),
        sparsity.bits.data_ptr(),
        sparsity.blocks.shape[3],
        sparsity.bit_rows.shape[3],
        heads * rows if batch > 1 else 0,
        rows if heads > 1 else 0,
    )
