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
from attention_backend.jit import Kernel, load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device
from attention_backend.kernels.params import pointer
from attention_backend.kernels.rows import begins_vectors

#: States beyond these are stacked into one set.
MAX_SETS = 8
_HEAD_DIM_TILES = (32, 64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_THREADS = 128
_VECTOR = 8  # elements of a lane
_HEAD_DIMS = range(0, _HEAD_DIM_TILES[-1] + 1, _VECTOR)
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
        sets.append(one_state(*extra))
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
    sets += [one_state(o, s) for o, s in single]
    if rest:
        stacked = torch.stack([o for o, _ in rest]), torch.stack([s for _, s in rest])
        sets.append(state_set(*stacked))
    launch(sets, out, lse, sinks)


def state_set(outs: Tensor, lses: Tensor) -> StateSet:
    """States that differ in their first index only. The tensors must outlive the launch."""
    return _described(outs, lses, 1)


def one_state(out: Tensor, lse: Tensor) -> StateSet:
    """As `state_set`, of a single state."""
    return _described(out, lse, 0)


def _described(out: Tensor, lse: Tensor, front: int) -> StateSet:
    """`front`: dimensions in front of a state's own.

    Rows are counted as the log-sum-exps lie: row = batch * seqlen + i.
    Raises UnsupportedError for states that the kernel cannot read or write.
    """
    _check(out)
    strides, lse_strides, seqlen = out.stride(), lse.stride(), lse.shape[-1]
    p = StateSet(out=out.data_ptr(), lse=lse.data_ptr(), count=1, seqlen=seqlen, in_float=out.dtype == torch.float32)
    if front:
        p.count, p.out_state, p.lse_state = out.shape[0], strides[0], lse_strides[0]
    p.lse_head, p.lse_row = lse_strides[-2:]
    of_batches = len(lse_strides) - front == 3
    if of_batches:
        p.lse_batch = lse_strides[-3]
    if len(strides) - front == 4:
        if of_batches and out.shape[-3] == seqlen:
            p.out_batch, p.out_row, p.out_head, _ = strides[front:]
            return p
        one = out[0] if front else out
        strides = one.view(-1, *one.shape[-2:]).stride()
    p.out_row, p.out_head = strides[-3:-1]
    p.out_batch = seqlen * p.out_row
    return p


def _check(out: Tensor) -> None:
    vector = _VECTOR if out.dtype != torch.float32 else _VECTOR // 2
    if not begins_vectors(out, vector) or out.stride(-1) != 1 or out.shape[-1] not in _HEAD_DIMS:
        raise UnsupportedError(
            f"a state of shape {tuple(out.shape)}, strides {out.stride()}: rows are merged 16 bytes at a time: they "
            f"must be contiguous, aligned, and of a multiple of {_VECTOR} elements up to {_HEAD_DIM_TILES[-1]}"
        )
    if out.dtype not in _DTYPES:
        raise UnsupportedError(f"states are merged in bfloat16, float16 and float32 on a GPU, not in {out.dtype}")


def launch(sets: Sequence[StateSet], out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    pairs = lse.numel()
    if out.numel() == 0:
        lse.fill_(-torch.inf)
        return
    assert len(sets) <= MAX_SETS
    target = one_state(out, lse)
    p = MergeParams(out=target.out, lse=target.lse, num_pairs=pairs, num_sets=len(sets), seqlen=target.seqlen)
    room = p.sets
    for at, one in enumerate(sets):
        room[at] = one
    p.out_batch, p.out_row, p.out_head = target.out_batch, target.out_row, target.out_head
    p.lse_batch, p.lse_row, p.lse_head = target.lse_batch, target.lse_row, target.lse_head
    floats = None if sinks is None else sinks.to(torch.float32).contiguous()
    p.sinks = pointer(floats)
    _, p.num_heads, p.head_dim = out.shape[-3:]
    kernel, block_pairs = _kernel(out.dtype, p.head_dim, out.device.index)
    kernel((-(-pairs // block_pairs), 1, 1), (_THREADS, 1, 1), p)
    del floats  # kept alive until the launch was queued; the allocator is ordered by stream after that


@cache
def _kernel(dtype: torch.dtype, head_dim: int, index: int) -> tuple[Kernel, int]:
    """The kernel on a device, and the rows of heads that a block merges."""
    kernel = load(merge_variant(dtype, head_dim, device.arch(index)), index)
    return kernel, _THREADS * _VECTOR // _tile(head_dim)


def _tile(head_dim: int) -> int:
    return next(tile for tile in _HEAD_DIM_TILES if tile >= head_dim)
