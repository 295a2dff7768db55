"""The parameter structures of the generic backward kernels, field by field as in the .cuh files. Knows layouts only."""

import ctypes
from ctypes import c_int, c_int64, c_void_p


class RowTermsParams(ctypes.Structure):
    """flash_bwd_preprocess.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("cu_seqlens_q", "out", "grad_out", "lse", "grad_lse")),
        *((name, c_void_p) for name in ("lse2", "delta", "zeroed")),
        *((name, c_int64) for name in ("out_batch", "out_row", "out_head")),
        *((name, c_int64) for name in ("grad_out_batch", "grad_out_row", "grad_out_head")),
        *((name, c_int64) for name in ("lse_batch", "lse_head", "padded_rows")),
        *((name, c_int) for name in ("seqlen_q", "batch", "head_dim_v", "zeroed_width")),
    )
