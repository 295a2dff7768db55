"""The parameter structures of the decode kernels, field by field as in the .cuh files."""

import ctypes
from ctypes import c_int, c_int64, c_void_p

from attention_backend.kernels.params import STRIDES, TENSORS, ScoreParams, SequenceParams


class DecodeParams(ctypes.Structure):
    """parts/decode_params.cuh"""

    _fields_ = (
        ("sequence", SequenceParams),
        ("score", ScoreParams),
        *((name, c_void_p) for name in (*TENSORS, "partial_out", "partial_lse", "counters", "k_scale", "v_scale")),
        *((name, c_int64) for name in STRIDES),
        *((name, c_int) for name in ("batch", "head_dim", "head_dim_v")),
        *((name, c_int) for name in ("group", "group_rows", "min_tiles", "group_inverse")),
    )


class StoreParams(ctypes.Structure):
    """kv_cache_store.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "q_out", "k_cache", "v_cache")),
        *((name, c_void_p) for name in ("slot_mapping", "q_positions", "k_positions", "cos", "sin")),
        *((name, c_void_p) for name in ("k_scale", "v_scale")),
        *((name, c_int64) for name in ("q_row", "q_head", "q_out_row", "q_out_head")),
        *((name, c_int64) for name in ("k_row", "k_head", "v_row", "v_head")),
        *((name, c_int64) for name in ("k_page", "k_slot", "k_cache_head", "v_page", "v_slot", "v_cache_head")),
        ("cos_row", c_int64),
        *((name, c_int) for name in ("num_heads", "num_kv_heads", "head_dim", "head_dim_v")),
        *((name, c_int) for name in ("rotary_dim", "rotary_rows", "num_queries", "num_tokens")),
        *((name, c_int) for name in ("page_size", "reserved")),
    )
