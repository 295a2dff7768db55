"""Launches flash_fwd_sm80 (16-bit) and flash_fwd_f32, the forward kernels. Assumes a problem that dispatch checked."""

import torch
from torch import Tensor

from attention_backend.jit import load
from attention_backend.kernels import device
from attention_backend.kernels.dropout_params import dropout_params
from attention_backend.kernels.params import ForwardParams, fill_tensors, score_params, sequence_params
from attention_backend.kernels.variants import Options, f32_variant, forward_variant
from attention_backend.problem import AttentionArgs


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Attention on CUDA. Returns out `args.out_shape` and lse `args.lse_shape` (float32)."""
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    params = ForwardParams(sequence=sequence_params(args), score=score_params(args))
    sinks = fill_tensors(params, args, out, lse)
    index = args.q.device.index
    options = Options.of(args)
    of_dtype = f32_variant if args.dtype == torch.float32 else forward_variant
    variant, config = of_dtype(options, device.arch(index))
    kernel, given = load(variant, index), (params, dropout_params(args)) if options.dropout else params
    grid = (-(-args.seqlen_q // config.block_m), args.num_heads, args.batch)
    kernel(grid, (config.threads, 1, 1), given, config.smem_bytes(*options.tiles))
    del sinks  # kept alive until the launch was queued; the allocator is ordered by stream after that
    return out, lse
