"""Launches flash_fwd_sm90, the Hopper forward. Assumes that dispatch checked the problem."""

import torch
from torch import Tensor

from attention_backend.jit import load
from attention_backend.kernels.params import ForwardParams, fill_tensors, score_params, sequence_params
from attention_backend.kernels.tensor_map import tensor_map
from attention_backend.kernels.variants import Options, hopper_variant
from attention_backend.problem import UNBOUNDED, AttentionArgs


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Attention on a Hopper GPU. Returns out `args.out_shape` and lse `args.lse_shape` (float32)."""
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    if args.k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    params = ForwardParams(sequence=sequence_params(args), score=score_params(args))
    sinks = fill_tensors(params, args, out, lse)
    full = args.mask_desc is None and args.window_left == args.window_right == UNBOUNDED and args.chunk_size == 0
    variant, config, key_rows = hopper_variant(Options.of(args), full, args.k.shape[1] if args.paged else 0)
    maps = tensor_map(args.q, config.block_m), tensor_map(args.k, key_rows), tensor_map(args.v, key_rows)
    grid = (-(-args.seqlen_q // config.block_m), args.num_heads, args.batch)
    kernel = load(variant, args.q.device.index)
    kernel(grid, (config.threads, 1, 1), (*maps, params), config.smem_bytes(args.head_dim))
    del sinks  # kept alive until the launch was queued; the allocator is ordered by stream after that
    return out, lse
