"""Launches flash_merge: softmax states of the same query rows, each over other keys, become one.

Knows nothing of keys. Assumes that shapes were checked.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.jit import load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device

#: States beyond these are stacked into one set.
MAX_SETS = 8
_HEAD_DIM_TILES = (32, 64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_THREADS = 128
_VECTOR = 8  # elements of a lane
_PLACES = ("batch", "row", "head")


class StateSet(ctypes.Structure):
    """flash_merge.cuh"""

    _fields_ = (
        ("out", c_void_p),
        ("lse", c_void_p),
        *((f"{name}_{place}", c_int64) for name in ("out", "lse") for place in ("state", *_PLACES)),
        *((name, c_int) for name in ("count", "seqlen", "in_float", "reserved")),
    )


class MergeParams(ctypes.Structure):
    """flash_merge.cuh"""

    _fields_ = (
        ("sets", StateSet * MAX_SETS),
        *((name, c_void_p) for name in ("sinks", "out", "lse")),
        *((f"{name}_{place}", c_int64) for name in ("out", "lse") for place in _PLACES),
        ("num_pairs", c_int64),
        *((name, c_int) for name in ("num_sets", "seqlen", "num_heads", "head_dim")),
    )


@cache
def merge_variant(dtype: torch.dtype, head_dim: int, arch: str) -> KernelVariant:
    element = ("FP32", 1) if dtype == torch.float32 else ("BF16", int(dtype == torch.bfloat16))
    return KernelVariant("flash_merge", arch, (element, ("HEAD_DIM", _tile(head_dim))), hot=True)


def merge(
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    sinks: Tensor | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes the merged state to out and lse. A state that saw nothing has lse -inf, and its out is not read.

    partial_out float32 `[S, ...]`, partial_lse float32 `[S, ...]` with natural logs, S any number; `extra` is one more
    state, (out in the dtype of `out`, lse). An out is `[rows, num_heads, head_dim]` or `[batch, seqlen, num_heads,
    head_dim]`, an lse `[num_heads, rows]` or `[batch, num_heads, seqlen]`, each as it likes.
    """
    sets = [state_set(partial_out, partial_lse)] if partial_out.shape[0] else []
    if extra is not None:
        sets.append(state_set(extra[0].unsqueeze(0), extra[1].unsqueeze(0)))
    launch(sets, out, lse, sinks)


def merge_states(
    states: Sequence[tuple[Tensor, Tensor]],
    out: Tensor,
    lse: Tensor,
    *,
    partials: Sequence[tuple[Tensor, Tensor]] = (),
    sinks: Tensor | None = None,
) -> None:
    """As `merge`, of any number of single states in the dtype of `out`, and of partial results of several passes."""
    room = MAX_SETS - len(partials)
    single, rest = (states, ()) if len(states) <= room else (states[: room - 1], states[room - 1 :])
    sets = [state_set(o, s) for o, s in partials if o.shape[0]]
    sets += [state_set(o.unsqueeze(0), s.unsqueeze(0)) for o, s in single]
    if rest:
        stacked = torch.stack([o for o, _ in rest]), torch.stack([s for _, s in rest])
        sets.append(state_set(*stacked))
    launch(sets, out, lse, sinks)


def state_set(outs: Tensor, lses: Tensor) -> StateSet:
    """States that differ in their first index only. The tensors must outlive the launch."""
    vector = _VECTOR if outs.dtype != torch.float32 else _VECTOR // 2
    odd = any(s % vector for s, n in zip(outs.stride()[:-1], outs.shape[:-1], strict=True) if n > 1)
    if (
        odd
        or outs.data_ptr() % 16
        or outs.stride(-1) != 1
        or outs.shape[-1] not in range(0, _HEAD_DIM_TILES[-1] + 1, _VECTOR)
    ):
        raise UnsupportedError(
            f"a state of shape {tuple(outs.shape)}, strides {outs.stride()}: rows are merged 16 bytes at a time: they "
            f"must be contiguous, aligned, and of a multiple of {_VECTOR} elements up to {_HEAD_DIM_TILES[-1]}"
        )
    if outs.dtype not in _DTYPES:
        raise UnsupportedError(f"states are merged in bfloat16, float16 and float32 on a GPU, not in {outs.dtype}")
    p = StateSet(out=outs.data_ptr(), lse=lses.data_ptr(), count=outs.shape[0])
    p.out_state, p.lse_state = outs.stride(0), lses.stride(0)
    p.in_float = int(outs.dtype == torch.float32)
    p.seqlen = _place(p, outs[0], lses[0])
    return p


def launch(sets: Sequence[StateSet], out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    if out.numel() == 0:
        lse.fill_(-torch.inf)
        return
    assert len(sets) <= MAX_SETS
    target = state_set(out.unsqueeze(0), lse.unsqueeze(0))
    p = MergeParams(out=target.out, lse=target.lse, num_pairs=lse.numel(), num_sets=len(sets), seqlen=target.seqlen)
    for at, one in enumerate(sets):
        p.sets[at] = one
    for name in ("out", "lse"):
        for place in _PLACES:
            setattr(p, f"{name}_{place}", getattr(target, f"{name}_{place}"))
    floats = None if sinks is None else sinks.to(torch.float32).contiguous()
    p.sinks = None if floats is None else floats.data_ptr()
    p.num_heads, p.head_dim = out.shape[-2], out.shape[-1]
    index = out.device.index
    block_pairs = _THREADS * _VECTOR // _tile(out.shape[-1])
    kernel = load(merge_variant(out.dtype, out.shape[-1], device.arch(index)), index)
    kernel((-(-lse.numel() // block_pairs), 1, 1), (_THREADS, 1, 1), p)
    del floats  # kept alive until the launch was queued; the allocator is ordered by stream after that


def _tile(head_dim: int) -> int:
    return next(tile for tile in _HEAD_DIM_TILES if tile >= head_dim)


def _place(p: StateSet, out: Tensor, lse: Tensor) -> int:
    """Sets the strides of rows, which are counted as the log-sum-exps lie: row = batch * seqlen + i. Returns seqlen."""
    if lse.dim() == 3:
        p.lse_batch, p.lse_head, p.lse_row = lse.stride()
    else:
        p.lse_head, p.lse_row = lse.stride()
    seqlen = lse.shape[-1]
    if out.dim() == 4 and lse.dim() == 3 and out.shape[1] == seqlen:
        p.out_batch, p.out_row, p.out_head = out.stride()[:3]
    else:
        p.out_row, p.out_head = out.view(-1, *out.shape[-2:]).stride()[:2]
        p.out_batch = seqlen * p.out_row
    return seqlen
