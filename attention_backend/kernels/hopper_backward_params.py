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
        *((name, c_void_p) for name in ("dq", "counters", "turns", "cleared", "dk", "dv")),
        *((f"{name}_{place}", c_int64) for name in ("dk", "dv") for place in ("batch", "row", "head", "part")),
        ("padded_rows", c_int64),
        *((name, c_int) for name in ("head_dim", "head_dim_v", "group", "parts")),
        *((name, c_int) for name in ("kv_heads", "batch", "key_tiles", "section")),
    )


class RowsOfDqParams(ctypes.Structure):
    """flash_bwd_postprocess_sm90.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("cu_seqlens_q", "sums", "dq")),
        *((f"dq_{place}", c_int64) for place in ("batch", "row", "head")),
        ("padded_rows", c_int64),
        *((name, c_int) for name in ("seqlen_q", "head_dim")),
        ("scale", c_float),
        ("heads", c_int),
    )
