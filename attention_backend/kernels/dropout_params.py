"""What a kernel with dropout is launched with. Knows the layout only."""

import ctypes

from attention_backend.problem import AttentionArgs


class DropoutParams(ctypes.Structure):
    """parts/dropout.cuh"""

    _fields_ = (("seed", ctypes.c_void_p), ("threshold", ctypes.c_uint), ("scale", ctypes.c_float))


def dropout_params(args: AttentionArgs) -> DropoutParams:
    """Of a problem with dropout, whose seed must outlive the launch."""
    assert args.dropout_seed is not None
    return DropoutParams(args.dropout_seed.data_ptr(), args.dropout_threshold, args.dropout_scale)
