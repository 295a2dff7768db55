"""Launches flash_decode_sm90 or flash_decode. Assumes the problem was checked by dispatch.

The grid depends on the device and on shapes, never on lengths, so a captured launch stays right when lengths change.
"""

import torch
from torch import Tensor

from attention_backend.heuristics.decode import (
    DECODE_MIN_TILES,
    HOPPER_DECODE_MIN_TILES,
    DecodeConfig,
    HopperDecodeConfig,
    hopper_page_rows,
)
from attention_backend.jit import load
from attention_backend.kernels import device, workspace
from attention_backend.kernels.decode_params import DecodeParams
from attention_backend.kernels.decode_variants import copies_whole_rows, decode_variant, hopper_decode_variant
from attention_backend.kernels.params import fill_tensors, pointer, score_params, sequence_params
from attention_backend.kernels.tensor_map import TensorMap, tensor_map, whole_row_tensor_map
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs

FP8 = torch.float8_e4m3fn


def forward(args: AttentionArgs, *, tma: bool = True) -> tuple[Tensor, Tensor]:
    """Attention of few query rows on CUDA. Returns out `args.out_shape` and lse `args.lse_shape` (float32).

    `tma`: whether the Hopper kernel serves where it can. It is the faster one up to some 100 MB of keys and values, and
    as fast beyond. Raises UnsupportedError for float8 keys and values on a GPU before sm_89.
    """
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    if args.k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    return _launch(args, out, lse, hopper=tma and serves_hopper(args))


def serves_hopper(args: AttentionArgs) -> bool:
    """Whether the TMA can bring the keys, 16 or more of a page at a time, and no key among them has to be left out.

    Its maps count pairs of float8 elements.
    """
    return (
        device.arch(args.q.device.index) == "sm_90a"
        and args.key_mask is None
        and (not args.paged or hopper_page_rows(args.k.shape[1]) is not None)
        and all(s > 0 or n == 1 for x in (args.k, args.v) for s, n in zip(x.stride(), x.shape, strict=True))
        and (args.k.dtype != FP8 or all(s % 2 == 0 for x in (args.k, args.v) for s in x.stride()[:-1]))
    )


def _launch(args: AttentionArgs, out: Tensor, lse: Tensor, *, hopper: bool) -> tuple[Tensor, Tensor]:
    index = args.q.device.index
    options, fp8_kv = Options.of(args), args.k.dtype == FP8
    group_rows = args.num_heads // args.num_kv_heads * args.seqlen_q
    config: DecodeConfig | HopperDecodeConfig
    maps: tuple[TensorMap, ...] = ()
    if hopper:
        page_size = args.k.shape[1] if args.paged else 0
        variant, config, key_rows = hopper_decode_variant(options, group_rows, page_size, fp8_kv=fp8_kv)
        min_tiles = HOPPER_DECODE_MIN_TILES
        # Two bytes are one element of a map, whatever they mean.
        mapped = whole_row_tensor_map if copies_whole_rows(options, fp8_kv) else tensor_map
        maps = tuple(mapped(x.view(args.dtype) if fp8_kv else x, key_rows) for x in (args.k, args.v))
    else:
        variant, config = decode_variant(options, device.arch(index), group_rows, fp8_kv=fp8_kv)
        min_tiles = DECODE_MIN_TILES

    sequence = sequence_params(args)
    pairs, row_blocks = args.batch * args.num_kv_heads, -(-group_rows // config.rows)
    parts = max(1, device.num_sms(index) * config.blocks_per_sm // args.num_kv_heads)  # of the keys of every head
    if args.num_splits > 0:
        tiles = max(1, -(-sequence.seqlen_k // config.keys))
        min_tiles = -(-tiles // args.num_splits)
        parts = -(-args.batch * tiles // min_tiles)
    blocks = parts * args.num_kv_heads
    slots = blocks + pairs
    partial_out = torch.empty(slots * group_rows * options.tiles[1], dtype=torch.float32, device=args.q.device)
    partial_lse = torch.empty(slots * group_rows, dtype=torch.float32, device=args.q.device)
    counters = workspace.counters(args.q.device, pairs * row_blocks)

    params = DecodeParams(sequence=sequence, score=score_params(args))
    sinks = fill_tensors(params, args, out, lse)
    params.partial_out, params.partial_lse = partial_out.data_ptr(), partial_lse.data_ptr()
    params.counters = counters.data_ptr()
    params.k_scale, params.v_scale = pointer(args.k_scale), pointer(args.v_scale)
    params.batch, params.num_kv_heads = args.batch, args.num_kv_heads
    params.group_rows, params.min_tiles = group_rows, min_tiles
    smem = config.smem_bytes(*options.tiles, args.batch, args.k.element_size())
    early = hopper and torch.cuda.is_current_stream_capturing()
    load(variant, index)((blocks, row_blocks, 1), (config.threads, 1, 1), (*maps, params), smem, early=early)
    del sinks  # kept alive until the launch was queued; the allocator is ordered by stream after that
    return out, lse
