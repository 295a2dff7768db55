"""Launches flash_decode and flash_combine. Assumes the problem was checked by dispatch.

The grid depends on the device and on shapes, never on lengths, so a captured launch stays right when lengths change.
"""

import torch
from torch import Tensor

from attention_backend.heuristics.decode import DECODE_MIN_TILES
from attention_backend.jit import load
from attention_backend.kernels import device
from attention_backend.kernels.decode_params import CombineParams, DecodeParams
from attention_backend.kernels.decode_variants import combine_variant, decode_variant
from attention_backend.kernels.params import fill_tensors, score_params, sequence_params
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs

_COMBINE_ROWS = 8  # rows of a flash_combine block


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Attention of few query rows on CUDA. Returns out `args.out_shape` and lse `args.lse_shape` (float32)."""
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    index = args.q.device.index
    arch = device.arch(index)
    options = Options.of(args)
    group_rows = args.num_heads // args.num_kv_heads * args.seqlen_q
    variant, config = decode_variant(options, arch, group_rows)
    pairs = args.batch * args.num_kv_heads

    sequence = sequence_params(args)
    blocks, min_tiles = device.num_sms(index) * config.blocks_per_sm, DECODE_MIN_TILES
    if args.num_splits > 0:
        tiles = max(1, -(-sequence.seqlen_k // config.keys))
        min_tiles = -(-tiles // args.num_splits)
        blocks = -(-pairs * tiles // min_tiles)
    slots = blocks + pairs
    partial_out = torch.empty(slots * group_rows * args.head_dim_v, dtype=torch.float32, device=args.q.device)
    partial_lse = torch.empty(slots * group_rows, dtype=torch.float32, device=args.q.device)
    segments = torch.empty(2 * pairs, dtype=torch.int32, device=args.q.device)

    params = DecodeParams(sequence=sequence, score=score_params(args))
    sinks = fill_tensors(params, args, out, lse)
    params.partial_out, params.partial_lse = partial_out.data_ptr(), partial_lse.data_ptr()
    params.segments = segments.data_ptr()
    params.batch, params.num_kv_heads = args.batch, args.num_kv_heads
    params.group_rows, params.min_tiles = group_rows, min_tiles
    row_blocks = -(-group_rows // config.rows)
    smem = config.smem_bytes(*options.tiles, batch=args.batch)
    load(variant, index)((blocks, row_blocks, 1), (config.threads, 1, 1), params, smem)

    combine = CombineParams(sequence=sequence)
    combine.partial_out, combine.partial_lse = params.partial_out, params.partial_lse
    combine.segments, combine.sinks, combine.out, combine.lse = params.segments, params.sinks, params.out, params.lse
    combine.out_batch, combine.out_row, combine.out_head = params.out_batch, params.out_row, params.out_head
    combine.lse_batch, combine.lse_head = params.lse_batch, params.lse_head
    combine.num_kv_heads, combine.group = args.num_kv_heads, params.group
    combine.group_rows, combine.head_dim_v = group_rows, args.head_dim_v
    grid = (pairs, -(-group_rows // _COMBINE_ROWS), 1)
    load(combine_variant(args.dtype, arch), index)(grid, (32 * _COMBINE_ROWS, 1, 1), combine, 0)
    del sinks  # kept alive until the launches were queued; the allocator is ordered by stream after that
    return out, lse
