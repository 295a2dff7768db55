"""The parameter structures of the generic backward kernels, field by field as in the .cuh files. Knows layouts only."""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

from torch import Tensor

from attention_backend.kernels.params import ScoreParams, SequenceParams


class RowTermsParams(ctypes.Structure):
    """flash_bwd_preprocess.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("cu_seqlens_q", "out", "grad_out", "lse", "grad_lse")),
        *((name, c_void_p) for name in ("lse2", "delta", "zeroed", "counters")),
        *((name, c_int64) for name in ("out_batch", "out_row", "out_head")),
        *((name, c_int64) for name in ("grad_out_batch", "grad_out_row", "grad_out_head")),
        *(
            (name, c_int64)
            for name in ("lse_batch", "lse_head", "padded_rows", "zeroed_batch", "zeroed_head", "zeroed_heads")
        ),
        *((name, c_int) for name in ("seqlen_q", "batch", "head_dim_v", "zeroed_width", "num_counters", "num_heads")),
    )


_BACKWARD_STRIDES = (
    *("q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head"),
    *("grad_out_batch", "grad_out_row", "grad_out_head"),
    *("dk_batch", "dk_row", "dk_head", "dk_part", "dv_batch", "dv_row", "dv_head", "dv_part"),
)


class BackwardParams(ctypes.Structure):
    """parts/backward_sm80_tiles.cuh"""

    _fields_ = (
        ("sequence", SequenceParams),
        ("score", ScoreParams),
        *((name, c_void_p) for name in ("q", "k", "v", "grad_out", "lse2", "delta", "dq_sums", "dk", "dv")),
        *((name, c_void_p) for name in ("dk_parts", "dv_parts", "turns")),
        *((name, c_int64) for name in _BACKWARD_STRIDES),
        ("padded_rows", c_int64),
        *((name, c_int) for name in ("head_dim", "head_dim_v", "group", "parts", "kv_heads", "lines")),
    )


class QueryGradientParams(ctypes.Structure):
    """flash_bwd_postprocess.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("cu_seqlens_q", "dq_sums", "dq")),
        *((name, c_int64) for name in ("dq_batch", "dq_row", "dq_head", "padded_rows")),
        ("scale", c_float),
        *((name, c_int) for name in ("seqlen_q", "head_dim", "reserved")),
    )


def set_strides(p: ctypes.Structure, name: str, x: Tensor) -> None:
    """`<name>_row`, `<name>_head` and, of a dense tensor, `<name>_batch`."""
    setattr(p, f"{name}_row", x.stride(-3))
    setattr(p, f"{name}_head", x.stride(-2))
    if x.dim() == 4:
        setattr(p, f"{name}_batch", x.stride(0))
