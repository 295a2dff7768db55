"""Launches flash_decode_sm90 or flash_decode. Assumes the problem was checked by dispatch.

The grid depends on the device and on shapes, never on lengths, so a captured launch stays right when lengths change.
"""

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
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
from attention_backend.kernels.decode_variants import decode_variant, hopper_decode_variant
from attention_backend.kernels.params import fill_tensors, pointer, score_params, sequence_params
from attention_backend.kernels.tensor_map import TensorMap, tensor_map
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs

FP8 = torch.float8_e4m3fn
_FP8_WIDTH = 16  # columns of the 16 bytes that are copied at once


def forward(args: AttentionArgs, *, tma: bool = True) -> tuple[Tensor, Tensor]:
    """Attention of few query rows on CUDA. Returns out `args.out_shape` and lse `args.lse_shape` (float32).

    `tma=False` takes the kernel of all GPUs even where the Hopper one serves. Raises UnsupportedError for float8 keys
    and values on a GPU before sm_89, or of odd strides.
    """
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    if args.k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if args.k.dtype == FP8:
        _check_fp8(args)
    return _launch(args, out, lse, hopper=tma and serves_hopper(args))


def serves_hopper(args: AttentionArgs) -> bool:
    """Whether the TMA can bring the keys, 16 or more of a page at a time, and no key among them has to be left out."""
    return (
        device.arch(args.q.device.index) == "sm_90a"
        and args.key_mask is None
        and (not args.paged or hopper_page_rows(args.k.shape[1]) is not None)
        and all(s > 0 or n == 1 for x in (args.k, args.v) for s, n in zip(x.stride(), x.shape, strict=True))
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
        min_tiles, pieces = HOPPER_DECODE_MIN_TILES, config.pieces
        # Two bytes are one element of a map, whatever they mean.
        maps = tuple(tensor_map(x.view(args.dtype) if fp8_kv else x, key_rows) for x in (args.k, args.v))
    else:
        variant, config = decode_variant(options, device.arch(index), group_rows, fp8_kv=fp8_kv)
        min_tiles, pieces = DECODE_MIN_TILES, 0

    sequence = sequence_params(args)
    pairs, row_blocks = args.batch * args.num_kv_heads, -(-group_rows // config.rows)
    blocks = device.num_sms(index) * config.blocks_per_sm
    if args.num_splits > 0:
        tiles = max(1, -(-sequence.seqlen_k // config.keys))
        min_tiles = -(-tiles // args.num_splits)
        blocks, pieces = -(-pairs * tiles // min_tiles), 0
    slots = blocks * (1 + pieces) + pairs
    partial_out = torch.empty(slots * group_rows * options.tiles[1], dtype=torch.float32, device=args.q.device)
    partial_lse = torch.empty(slots * group_rows, dtype=torch.float32, device=args.q.device)
    counters = workspace.counters(args.q.device, (pairs + 1) * row_blocks)

    params = DecodeParams(sequence=sequence, score=score_params(args))
    sinks = fill_tensors(params, args, out, lse)
    params.partial_out, params.partial_lse = partial_out.data_ptr(), partial_lse.data_ptr()
    params.counters = counters.data_ptr()
    params.k_scale, params.v_scale = pointer(args.k_scale), pointer(args.v_scale)
    params.batch, params.num_kv_heads = args.batch, args.num_kv_heads
    params.group_rows, params.min_tiles, params.most_pieces = group_rows, min_tiles, blocks * pieces
    smem = config.smem_bytes(*options.tiles, args.batch, args.k.element_size())
    load(variant, index)((blocks, row_blocks, 1), (config.threads, 1, 1), (*maps, params), smem)
    del sinks  # kept alive until the launch was queued; the allocator is ordered by stream after that
    return out, lse


def _check_fp8(args: AttentionArgs) -> None:
    for name, x in (("k", args.k), ("v", args.v)):
        odd = any(s % _FP8_WIDTH for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
        if odd or x.shape[-1] % _FP8_WIDTH or x.data_ptr() % _FP8_WIDTH:
            raise UnsupportedError(
                f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: {FP8} rows are copied 16 bytes at a time: "
                f"head_dim, strides and the address must be multiples of {_FP8_WIDTH}"
            )
