"""What the Hopper backward is launched with, field by field as in the .cuh files. Knows layouts only."""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

from attention_backend.kernels.dropout_params import DropoutParams
from attention_backend.kernels.params import ScoreParams, SequenceParams


class BackwardParams(ctypes.Structure):
    """parts/backward_hopper_params.cuh"""

    _fields_ = (
        ("sequence", SequenceParams),
        ("score", ScoreParams),
        ("dropout", DropoutParams),
        *((name, c_void_p) for name in ("sums", "counters", "turns", "progress", "dq", "dk", "dv")),
        *((f"{name}_{place}", c_int64) for name in ("dk", "dv") for place in ("batch", "row", "head", "part")),
        *((name, c_int64) for name in ("dq_batch", "dq_row", "dq_head", "padded_rows", "sums_head")),
        *((name, c_int) for name in ("head_dim", "head_dim_v", "group", "parts")),
        *((name, c_int) for name in ("kv_heads", "batch", "key_tiles", "section", "held_units", "lag")),
        *((name, c_int) for name in ("unit_heads", "share_chunks")),
    )


class RowsOfDqParams(ctypes.Structure):
    """flash_bwd_postprocess_sm90.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("cu_seqlens_q", "sums", "dq")),
        *((name, c_int64) for name in ("dq_batch", "dq_row", "dq_head", "sums_head")),
        *((name, c_int) for name in ("held_heads", "first_head", "seqlen_q", "head_dim")),
        ("scale", c_float),
        ("heads", c_int),
    )
