"""Launches flash_decode_sm90 or flash_decode. Assumes the problem was checked by dispatch.

The grid depends on the device and on shapes, never on lengths, so a captured launch stays right when lengths change.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attention_backend.heuristics.decode import (
    DECODE_MIN_TILES,
    FEWEST_ROWS,
    HOPPER_DECODE_MIN_TILES,
    DecodeConfig,
    HopperDecodeConfig,
    hopper_page_rows,
)
from attention_backend.jit import Kernel, load
from attention_backend.kernels import device, workspace
from attention_backend.kernels.decode_params import DecodeParams
from attention_backend.kernels.decode_variants import copies_whole_rows, decode_variant, hopper_decode_variant
from attention_backend.kernels.params import contiguous, fill_tensors, pointer, score_params, sequence_params
from attention_backend.kernels.rows import is_expanded
from attention_backend.kernels.tensor_map import tensor_map, whole_row_tensor_map
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs

FP8 = torch.float8_e4m3fn
_MOST_PARTS = 65_535  # blocks along the second dimension of a grid


def forward(args: AttentionArgs, *, tma: bool = True, blocks: int | None = None) -> tuple[Tensor, Tensor]:
    """Attention of few query rows on CUDA. Returns out `args.out_shape` and lse `args.lse_shape` (float32).

    `tma`: whether the Hopper kernel serves where it can. It is the faster one up to some 100 MB of keys and values, and
    as fast beyond. `blocks`: at most so many of the Hopper kernel, if not fewer than key heads, so that the next one
    may run beside it; by default what fills the device. Raises UnsupportedError for float8 keys and values on a GPU
    before sm_89.
    """
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    if args.k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    return _launch(args, out, lse, hopper=tma and serves_hopper(args), blocks=blocks)


def serves_hopper(args: AttentionArgs) -> bool:
    """Whether the TMA can bring the keys, 16 or more of a page at a time, and no key among them has to be left out.

    Its maps count pairs of float8 elements.
    """
    if device.arch(args.q.device.index) != "sm_90a" or args.key_mask is not None:
        return False
    if args.paged and hopper_page_rows(args.k.shape[1]) is None:
        return False
    if is_expanded(args.k) or is_expanded(args.v):
        return False
    return args.k.dtype != FP8 or all(s % 2 == 0 for x in (args.k, args.v) for s in x.stride()[:-1])


@dataclass(frozen=True, slots=True)
class _Plan:
    """What of a launch follows from sizes."""

    kernel: Kernel
    parts: int  # of the keys of every head, each a block's of every row block
    row_blocks: int
    threads: int
    smem_bytes: int
    min_tiles: int
    partial_rows: int
    value_width: int  # of partial results
    copied_keys: int  # of one copy of the TMA; 0: there is none
    whole_rows: bool  # as the TMA copies them


@lru_cache(maxsize=1024)
def _plan(
    options: Options,
    index: int,
    hopper: bool,
    fp8_kv: bool,
    page_size: int,
    batch: int,
    num_kv_heads: int,
    group_rows: int,
    num_splits: int,
    seqlen_k: int,
    blocks: int | None,
) -> _Plan:
    """`page_size`: 0 for dense keys. `seqlen_k` matters to `num_splits` only."""
    config: DecodeConfig | HopperDecodeConfig
    copied_keys = 0
    if hopper:
        variant, config, copied_keys = hopper_decode_variant(options, group_rows, page_size, fp8_kv=fp8_kv)
        min_tiles = HOPPER_DECODE_MIN_TILES
    else:
        variant, config = decode_variant(options, device.arch(index), group_rows, fp8_kv=fp8_kv)
        min_tiles = DECODE_MIN_TILES
    most = device.num_sms(index) * config.blocks_per_sm if blocks is None else blocks
    parts = max(1, most // num_kv_heads)  # of the keys of every head
    if num_splits > 0:
        tiles = max(1, -(-seqlen_k // config.keys))
        min_tiles = -(-tiles // num_splits)
        parts = min(-(-batch * tiles // min_tiles), _MOST_PARTS)
    return _Plan(
        kernel=load(variant, index),
        parts=parts,
        row_blocks=-(-group_rows // config.rows),
        threads=config.threads,
        smem_bytes=config.smem_bytes(*options.tiles, batch, 1 if fp8_kv else options.dtype.itemsize),
        min_tiles=min_tiles,
        partial_rows=num_kv_heads * (parts + batch) * group_rows,
        value_width=options.tiles[1],
        copied_keys=copied_keys,
        whole_rows=hopper and copies_whole_rows(options, fp8_kv),
    )


def most_counters(args: AttentionArgs) -> int:
    """Of the stream's, that a launch uses."""
    group_rows = args.num_heads // args.num_kv_heads * args.seqlen_q
    return args.batch * args.num_kv_heads * -(-group_rows // FEWEST_ROWS)


def _launch(
    args: AttentionArgs, out: Tensor, lse: Tensor, *, hopper: bool, blocks: int | None
) -> tuple[Tensor, Tensor]:
    q, k, v, batch, kv_heads = args.q, args.k, args.v, args.batch, args.num_kv_heads
    options, fp8_kv, group_rows = Options.of(args), k.dtype == FP8, args.num_heads // kv_heads * args.seqlen_q
    sequence = sequence_params(args)
    page_size, split_keys = sequence.page_size, sequence.seqlen_k if args.num_splits else 0
    plan = _plan(
        options, q.device.index, hopper, fp8_kv, page_size, batch, kv_heads, group_rows, args.num_splits, split_keys,
        blocks,
    )  # fmt: skip
    partial_out = q.new_empty(plan.partial_rows * plan.value_width, dtype=torch.float32)
    partial_lse = q.new_empty(plan.partial_rows, dtype=torch.float32)
    counters = workspace.counters(q.device, batch * kv_heads * plan.row_blocks)

    params = DecodeParams(sequence=sequence, score=score_params(args))
    sinks = fill_tensors(params, args, out, lse)
    params.partial_out, params.partial_lse = partial_out.data_ptr(), partial_lse.data_ptr()
    params.counters = counters.data_ptr()
    scales = contiguous(args.k_scale), contiguous(args.v_scale)
    params.k_scale, params.v_scale = map(pointer, scales)
    params.batch, params.group_rows, params.min_tiles = batch, group_rows, plan.min_tiles
    params.group_inverse = -(-(1 << 16) // params.group)
    parameters: tuple[ctypes.Structure, ...] = (params,)
    if hopper:
        if fp8_kv:  # two bytes are one element of a map, whatever they mean
            k, v = k.view(q.dtype), v.view(q.dtype)
        mapped = whole_row_tensor_map if plan.whole_rows else tensor_map
        parameters = (mapped(k, plan.copied_keys), mapped(v, plan.copied_keys), params)
    plan.kernel(
        (kv_heads, plan.parts, plan.row_blocks),
        (plan.threads, 1, 1),
        parameters,
        plan.smem_bytes,
        early=hopper and blocks is None and torch.cuda.is_current_stream_capturing(),
    )
    del sinks, scales  # kept alive until the launch was queued; the allocator is ordered by stream after that
    return out, lse
