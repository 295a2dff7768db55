"""Argument checks of the public functions, from shapes and dtypes alone: they never read a tensor's values.

Raises ValueError for shapes, devices and numbers, TypeError for types and dtypes, UnsupportedError where autograd would
ask for a gradient that nobody computes. Knows no kernel.
"""

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.no_gradients import is_asked_for
from attention_backend.problem import DESC_COLUMNS, UNBOUNDED, AttentionArgs

#: Keys and values may have it, with a scale per head, whatever dtype the queries have.
FP8 = torch.float8_e4m3fn
#: What has no gradient on any path, and what to do instead.
NOT_DIFFERENTIABLE = {
    "alibi_slopes": "detach the slopes, or hand in -slope * |p - j| as a bias, which has one",
    "softmax_scale": "detach it, or multiply q by it and pass softmax_scale=1",
    "softcap": "detach it",
    "k_scale": "float8 keys are for inference, call it under torch.no_grad()",
    "v_scale": "float8 values are for inference, call it under torch.no_grad()",
}

#: The normal numbers of float32, which twice a softcap is among, too.
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / 2

#: Of `AttentionArgs`: what is a tensor, where it is given.
_TENSORS = (
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "mask_desc", "key_mask", "bias"),
    *("alibi_slopes", "sinks", "dropout_seed", "k_scale", "v_scale"),
)
#: And what is an int, beside lengths; what is a number.
_INTS = ("window_left", "window_right", "chunk_size", "num_splits")
_NUMBERS = ("softmax_scale", "softcap", "dropout_p")


def check_args(args: AttentionArgs) -> None:
    """Refuses an `AttentionArgs` that does not describe a problem, or whose gradients would be lost."""
    _check_types(args)
    q, k, v = args.q, args.k, args.v
    q_dim = 3 if args.cu_seqlens_q is not None else 4
    k_dim = 3 if args.cu_seqlens_k is not None else 4
    layouts = {3: "[total, heads, dim]", 4: "[batch, seqlen, heads, dim]"}
    scaled = k.dtype == v.dtype == FP8
    for name, x, dim in (("q", q, q_dim), ("k", k, k_dim), ("v", v, k_dim)):
        if x.dim() != dim:
            raise ValueError(f"{name} must be {layouts[dim]} here, got shape {tuple(x.shape)}")
        if x.dtype != q.dtype and not scaled:
            raise TypeError(f"q, k and v must have one dtype, got q {q.dtype} and {name} {x.dtype}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, got strides {x.stride()}")
    if not q.dtype.is_floating_point:
        raise TypeError(f"q, k and v must be floating point, got {q.dtype}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must agree but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {q.shape[-2]} and {k.shape[-2]}")
    if args.cu_seqlens_q is not None and (args.cu_seqlens_q.dim() != 1 or args.batch < 0):
        raise ValueError(f"cu_seqlens_q must have shape [batch + 1], got {tuple(args.cu_seqlens_q.shape)}")
    if args.batch == 0 and q_dim == 3 and q.shape[0] > 0:
        raise ValueError(f"cu_seqlens_q names no sequence, and q has {q.shape[0]} rows")
    if k_dim == 4 and args.block_table is None and args.batch != k.shape[0]:
        raise ValueError(f"q and k must have the same batch, got {args.batch} and {k.shape[0]}")
    _check_numbers(args)
    _check_lengths(args)
    _check_scores(args)
    _check_dropout(args)
    _check_scales(args, scaled)
    for name in NOT_DIFFERENTIABLE:
        check_differentiable(name, getattr(args, name))


def check_differentiable(name: str, x: object) -> None:
    """Raises UnsupportedError if autograd would ask for the gradient of `x`, one of NOT_DIFFERENTIABLE."""
    if is_asked_for(x):
        what = "attention is differentiable in q, k, v, bias and sinks"
        raise UnsupportedError(f"{name} has no gradient, {what}: {NOT_DIFFERENTIABLE[name]}")


def check_window(name: str, value: int) -> None:
    if value < UNBOUNDED:
        raise ValueError(f"{name} must be -1 (no bound) or at least 0, got {value}")


def check_window_size(window_size: object, name: str = "window_size") -> None:
    """FlashAttention's: (left, right)."""
    pair = window_size if isinstance(window_size, tuple | list) else ()
    if len(pair) != 2 or not all(_is_int(bound) for bound in pair):
        raise TypeError(f"{name} must be two ints (left, right), -1 for no bound, got {window_size!r}")


def check_factors(softmax_scale: float, softcap: float = 0.0) -> None:
    """Of scores. Beyond float32, in which kernels have them, they would be 0 or infinite, and scores NaN."""
    if not _SMALLEST <= softmax_scale <= _LARGEST:
        raise ValueError(f"softmax_scale must be from {_SMALLEST:.3g} to {_LARGEST:.3g}, got {softmax_scale}")
    if softcap and not _SMALLEST <= softcap <= _LARGEST:
        raise ValueError(f"softcap must be 0, or from {_SMALLEST:.3g} to {_LARGEST:.3g}, got {softcap}")


def check_int(name: str, value: object) -> None:
    if not _is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r}")


def check_number(name: str, value: object) -> None:
    """Also one that is handed in as a tensor."""
    if isinstance(value, Tensor):
        fits = value.numel() == 1
    else:
        # In this order: torch.compile knows no hasattr of its own numbers.
        fits = isinstance(value, int | float) or hasattr(value, "__float__")
    if not fits:
        raise TypeError(f"{name} must be a number, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) or (hasattr(value, "__index__") and not isinstance(value, Tensor))


def check_is_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {x!r}")


def check_whole_numbers(name: str, x: Tensor) -> None:
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must be whole numbers, got {x.dtype}")


def check_sinks(sinks: Tensor, num_heads: int, device: torch.device) -> None:
    check_is_tensor("sinks", sinks)
    _check_floating("sinks", sinks)
    check_tensor("sinks", sinks, sinks.dtype, (num_heads,), device)


def check_tensor(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], device: torch.device) -> None:
    """`None` in the shape is any size."""
    check_is_tensor(name, x)
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    wrong = x.dim() != len(shape) or any(w is not None and s != w for s, w in zip(x.shape, shape, strict=True))
    if wrong:
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {tuple(x.shape)}")
    check_device(name, x, device)


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, q is on {device}")


def _check_types(args: AttentionArgs) -> None:
    for name, given in (("q", args.q), ("k", args.k), ("v", args.v)):
        check_is_tensor(name, given)
    for name in _TENSORS:
        x = getattr(args, name)
        if x is not None:
            check_is_tensor(name, x)


def _check_numbers(args: AttentionArgs) -> None:
    for name in _INTS:
        check_int(name, getattr(args, name))
    for name, longest in (("max_seqlen_q", args.max_seqlen_q), ("max_seqlen_k", args.max_seqlen_k)):
        if not isinstance(longest, Tensor):  # of one number, which torch makes an int of
            check_int(name, longest)
    for name in _NUMBERS:
        check_number(name, getattr(args, name))
    check_window("window_left", args.window_left)
    check_window("window_right", args.window_right)
    check_factors(args.softmax_scale, args.softcap)
    for name, value in (("chunk_size", args.chunk_size), ("num_splits", args.num_splits)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")


def _check_lengths(args: AttentionArgs) -> None:
    device, batch = args.q.device, args.batch
    check_device("k", args.k, device)
    check_device("v", args.v, device)
    if args.block_table is not None:
        if args.cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k says where keys lie in [total_k, ...]; with block_table pass seqused_k")
        check_tensor("block_table", args.block_table, torch.int32, (batch, None), device)
        if args.k.shape[1] == 0:
            raise ValueError(f"block_table needs pages of a token at least, got caches {tuple(args.k.shape)}")
        if args.seqused_k is None and args.mask_desc is None:
            raise ValueError("block_table needs seqused_k: how many keys each sequence has")
    for name, lengths in (("cu_seqlens_q", args.cu_seqlens_q), ("cu_seqlens_k", args.cu_seqlens_k)):
        if lengths is not None:
            check_tensor(name, lengths, torch.int32, (batch + 1,), device)
    for name, starts, x, longest in (
        ("q", args.cu_seqlens_q, args.q, args.max_seqlen_q),
        ("k", args.cu_seqlens_k, args.k, args.max_seqlen_k),
    ):
        if starts is not None and x.shape[0] > 0 and longest < 1:
            raise ValueError(f"cu_seqlens_{name} needs max_seqlen_{name}, the longest sequence, got {longest}")
    for name, lengths in (("seqused_k", args.seqused_k), ("leftpad_k", args.leftpad_k)):
        if lengths is not None:
            check_tensor(name, lengths, torch.int32, (batch,), device)
    if args.mask_desc is not None:
        check_tensor("mask_desc", args.mask_desc, torch.int32, (batch, DESC_COLUMNS), device)


def _check_scores(args: AttentionArgs) -> None:
    device, batch = args.q.device, args.batch
    if args.key_mask is not None:
        dense = args.k.dim() == 4 and args.block_table is None
        check_tensor("key_mask", args.key_mask, torch.bool, (batch, args.k.shape[1] if dense else None), device)
        keys = args.max_seqlen_k if args.block_table is None else args.block_table.shape[1] * args.k.shape[1]
        if not dense and args.key_mask.shape[1] < keys:
            raise ValueError(f"key_mask must be as wide as a sequence can be, {keys}, got {args.key_mask.shape[1]}")
    if args.alibi_slopes is not None:
        shape: tuple[int, ...] = (args.num_heads,) if args.alibi_slopes.dim() == 1 else (batch, args.num_heads)
        check_tensor("alibi_slopes", args.alibi_slopes, torch.float32, shape, device)
    if args.sinks is not None:
        check_sinks(args.sinks, args.num_heads, device)
    if args.bias is not None:
        if args.cu_seqlens_q is not None or args.cu_seqlens_k is not None or args.block_table is not None:
            raise ValueError("bias is for dense q, k and v only: varlen and paged keys have no rectangle to add it to")
        _check_floating("bias", args.bias)
        full = (batch, args.num_heads, args.q.shape[1], args.k.shape[1])
        shape = tuple(args.bias.shape)
        fits = len(shape) == 4 and shape[3] == full[3] and all(s in (1, f) for s, f in zip(shape, full, strict=True))
        if not fits:
            raise ValueError(f"bias must be [1 or {full[0]}, 1 or {full[1]}, 1 or {full[2]}, {full[3]}], got {shape}")
        check_device("bias", args.bias, device)


def _check_dropout(args: AttentionArgs) -> None:
    if not 0 <= args.dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {args.dropout_p}")
    if args.dropout_seed is not None:
        check_tensor("dropout_seed", args.dropout_seed, torch.int64, (2,), args.q.device)
    elif args.dropout_p:
        raise ValueError("dropout_p needs dropout_seed: int64 [2], the seed and offset of its random numbers")


def _check_scales(args: AttentionArgs, scaled: bool) -> None:
    for name, scale, x in (("k", args.k_scale, args.k), ("v", args.v_scale, args.v)):
        if (scale is not None) != scaled:
            raise ValueError(f"{name}_scale goes with {FP8} k and v, and they with it: {name} is {x.dtype}")
        if scale is not None:
            check_tensor(f"{name}_scale", scale, torch.float32, (args.num_kv_heads,), args.q.device)


def _check_floating(name: str, x: Tensor) -> None:
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
