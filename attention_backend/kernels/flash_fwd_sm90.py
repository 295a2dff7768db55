"""Launches flash_fwd_sm90, the Hopper forward. Assumes that dispatch checked the problem."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_backend.heuristics.sm90 import (
    BY_HEADS,
    BY_ROWS,
    CLUSTER,
    LONG,
    HopperPlan,
    HopperSizes,
    hopper_plan,
    is_tall,
    owns_keys,
    who_shares_keys,
)
from attention_backend.heuristics.sm90_chunks import Tiles, chunk_form
from attention_backend.jit import Kernel, load
from attention_backend.kernels import device, flash_merge, workspace
from attention_backend.kernels.dropout_params import dropout_params
from attention_backend.kernels.hopper_params import HopperParams, sparse_params
from attention_backend.kernels.hopper_variants import (
    HopperLayout,
    HopperOptions,
    can_be_tall,
    can_own_keys,
    can_share_keys,
    hopper_layout,
    hopper_variant,
)
from attention_backend.kernels.params import contiguous, fill_tensors, pointer, score_params, sequence_params
from attention_backend.kernels.tensor_map import TensorMap, packed_tensor_map, tensor_map, wide_tensor_map
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs

if TYPE_CHECKING:
    from attention_backend.block_sparsity import BlockSparsity

_COUNTERS = 2  # of the line of work


def forward(
    args: AttentionArgs,
    sparsity: BlockSparsity | None = None,
    own: bool | None = None,
    cluster: str | None = None,
    tall: bool | None = None,
    pack: bool | None = None,
    beside: Callable[[], int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention on a Hopper GPU. Returns out `args.out_shape` and lse `args.lse_shape` (float32).

    With `sparsity` (dense queries and keys, no other mask) a block of rows sees the blocks of keys on its list.
    `own`: whether each warpgroup leaves out keys that none of its own rows sees. `cluster`: whose blocks load keys for
    each other: BY_ROWS, BY_HEADS (of an even number for each key head) or ALONE (nobody's). `tall`: whether tiles have
    192 rows instead of 128, all of which take each step together. `pack`: whether a tile holds the rows of all query
    heads of a key head. By default where that is faster; raises ValueError where it cannot be.
    `beside` launches a kernel that lets the next one start, and returns how many of the stream's counters that uses:
    this one runs beside it, on the multiprocessors that it leaves, and ends after it.
    """
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    if _no_keys(args):
        return out.zero_(), lse.fill_(-torch.inf)
    which, plan = _plan(args, sparsity is not None, args.num_splits, own, cluster, tall, pack)
    if plan.num_splits == 1:
        _launch(args, which, plan, out, lse, sparsity, beside)
    else:
        flash_merge.merge(*_partials(args, which, plan, beside), out, lse, sinks=args.sinks)
    return out, lse


def forward_partials(args: AttentionArgs, num_splits: int = 0) -> tuple[Tensor, Tensor]:
    """The results over `num_splits` parts of every row's keys, sinks left out: float32
    `[num_splits, rows, num_heads, head_dim_v]` and lse `[num_splits, *args.lse_shape]`; rows count all sequences.

    `num_splits` 0: as many as may fill the device, which chooses how many of them there are: the lse of the others is
    -inf.
    """
    if args.q.numel() == 0:
        return _room_for_partials(args, max(1, num_splits))
    which, plan = _plan(args, False, num_splits, own=False, partial=True)
    return _partials(args, which, plan)


def _no_keys(args: AttentionArgs) -> bool:
    return args.k.numel() == 0 or (args.block_table is not None and args.block_table.numel() == 0)


def _partials(
    args: AttentionArgs, which: HopperOptions, plan: HopperPlan, beside: Callable[[], int] | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = _room_for_partials(args, plan.num_splits)
    if out.numel() == 0 or _no_keys(args):
        return out, lse.fill_(-torch.inf)
    _launch(args, which, plan, out.view(plan.num_splits, *args.out_shape), lse, None, beside)
    return out, lse


def _room_for_partials(args: AttentionArgs, num_splits: int) -> tuple[Tensor, Tensor]:
    out = args.q.new_empty((num_splits, args.q.shape[:-2].numel(), *args.out_shape[-2:]), dtype=torch.float32)
    return out, args.q.new_empty((num_splits, *args.lse_shape), dtype=torch.float32)


def _plan(
    args: AttentionArgs,
    sparse: bool,
    num_splits: int,
    own: bool | None = None,
    cluster: str | None = None,
    tall: bool | None = None,
    pack: bool | None = None,
    partial: bool = False,
) -> tuple[HopperOptions, HopperPlan]:
    """How the problem is run; `num_splits` 0: as many as fill the device. `partial`: see HopperSizes."""
    options = Options.of(args)
    seqlen_k = args.max_seqlen_k if args.paged or args.cu_seqlens_k is not None else args.k.shape[1]
    causal = args.window_right == 0
    which = HopperOptions(
        options,
        seqlen_k >= LONG and not partial,  # wider tiles are no gain to passes over what rows share
        args.k.shape[1] if args.paged else 0,
        sparse,
        fp8=args.k.dtype != args.dtype,
        left_bounds=args.left_bounds,
    )
    group = args.num_heads // args.num_kv_heads
    sizes = HopperSizes(
        args.seqlen_q,
        seqlen_k,
        args.batch,
        args.num_heads,
        group,
        device.num_sms(args.q.device.index),
        packable=not (sparse or options.alibi or options.bias or options.dropout),
        num_splits=1 if sparse or options.dropout else num_splits,
        total_rows=None if args.cu_seqlens_q is None else args.q.shape[0],
        partial=partial,
        causal=causal,
        window=args.window_left if causal and args.window_left >= 0 else None,
    )
    if can_be_tall(which):
        layout = hopper_layout(which)
        which = which._replace(tall=is_tall(layout.tiles, layout.config, sizes) if tall is None else tall)
    elif tall:
        raise ValueError(f"no tile of 192 rows serves {which}")
    config = hopper_layout(which).config
    if pack and (own or cluster == BY_HEADS or not (sizes.packable and 1 < group <= config.block_m)):
        raise ValueError(f"no tile holds the rows of {group} query heads of a key head, {own=}, {cluster=}, {options}")
    plan = hopper_plan(config, sizes, pack=pack)
    # Through a window rows see few keys; what a descriptor says is not known here.
    bounded = args.window_left >= 0 or args.window_right > 0 or args.chunk_size > 0 or args.mask_desc is not None
    if {own, cluster, tall, pack} == {None} and not bounded and (pairs := _in_pairs(which, sizes)):
        return pairs
    apart = not plan.pack and plan.num_splits == 1
    owning = which._replace(own=True, long=False, tall=False)
    can_own = can_own_keys(owning)
    if cluster is None and own is None and apart and not bounded and can_share_keys(which):
        cluster = who_shares_keys(hopper_layout(which).tiles[0], config.block_m, sizes, can_own=can_own)
    if cluster:
        if cluster == BY_HEADS and group % CLUSTER:
            raise ValueError(f"no pairs of heads load keys for each other where a key head has {group} query heads")
        which = which._replace(cluster=cluster)
        if pack:
            return which, hopper_plan(hopper_layout(which).config, sizes, pack=True)
        return which, HopperPlan(pack=False, tile_rows=config.block_m, num_splits=1)
    if own is None:
        own = tall is None and apart and can_own and owns_keys(hopper_layout(which).tiles, sizes, tall=which.tall)
    if not own:
        return which, plan
    if not can_own:
        raise ValueError(f"no warpgroup leaves out keys of its own with {owning}")
    return owning, HopperPlan(pack=False, tile_rows=hopper_layout(owning).config.block_m, num_splits=1)


def _in_pairs(which: HopperOptions, sizes: HopperSizes) -> tuple[HopperOptions, HopperPlan] | None:
    """Pairs of packed tiles that load keys for each other, where those are faster. Not where rows see keys from some
    key on, as behind those that requests share: that would take kernels of its own, for few steps."""
    if which.left_bounds or not can_share_keys(which):
        return None
    paired = which._replace(cluster=BY_ROWS)
    heights = (False, True) if can_be_tall(paired) else (False,)
    pairs = tuple(Tiles(tall, hopper_layout(paired._replace(tall=tall)).config) for tall in heights)
    layout = hopper_layout(which)
    form = chunk_form(layout.tiles[0], Tiles(which.tall, layout.config), pairs, sizes)
    return None if form is None else (paired._replace(tall=form.tall), form.plan)


def _launch(
    args: AttentionArgs,
    which: HopperOptions,
    plan: HopperPlan,
    out: Tensor,
    lse: Tensor,
    sparsity: BlockSparsity | None,
    beside: Callable[[], int] | None = None,
) -> None:
    """Into out and lse, or with one more dimension in front, of parts of the keys."""
    split, index = out.dim() > args.q.dim(), args.q.device.index
    kernel, layout, smem_bytes = _compiled(which, plan.pack, split, index)
    params = HopperParams()
    forward, work = params.forward, params.work
    forward.sequence, forward.score = sequence_params(args), score_params(args)
    sinks = fill_tensors(forward, args, out, lse)
    group, key_heads = forward.group, args.num_kv_heads
    if split:
        forward.sinks = None  # once, where the parts are merged
        work.out_split, work.lse_split = out.stride(0), lse.stride(0)
    work.pack, work.heads_per_key = (group, 1) if plan.pack else (1, group)
    work.batch, work.key_heads, work.heads = args.batch, key_heads, key_heads * work.heads_per_key
    work.tile_rows, work.num_splits, work.chosen = plan.tile_rows, plan.num_splits, plan.chosen
    work.key_bytes = args.k.itemsize * (forward.head_dim + forward.head_dim_v)
    scales = contiguous(args.k_scale), contiguous(args.v_scale)
    params.k_scale, params.v_scale = map(pointer, scales)
    if sparsity is not None:
        params.sparse = sparse_params(sparsity)
    if which.options.dropout:
        params.dropout = dropout_params(args)
    if plan.pack:
        queries = packed_tensor_map(args.q, group, plan.tile_rows // group)
    else:
        queries = tensor_map(args.q, layout.config.block_m)
    tiles = -(-args.seqlen_q * work.pack // plan.tile_rows) * work.heads * work.batch * plan.num_splits
    cluster = layout.config.cluster
    key_maps = _key_maps(args, layout)
    # Nothing is allocated between the two launches, as it might be memory that the first one still uses; but counters
    # are, where there were too few: what clears them waits for that one, and this kernel then follows.
    taken = 0 if beside is None else beside()
    counters = workspace.counters(args.q.device, taken + _COUNTERS)
    work.counters = counters.data_ptr() + 4 * taken
    kernel(
        (min(-(-tiles // cluster), device.num_sms(index) // cluster) * cluster, 1, 1),
        (layout.config.threads, 1, 1),
        (queries, *key_maps, params),
        smem_bytes,
        early=beside is not None,
    )
    del sinks, counters, scales  # kept alive until the launch was queued; the allocator is ordered by stream after that


def _key_maps(args: AttentionArgs, layout: HopperLayout) -> tuple[TensorMap, TensorMap]:
    rows, (tile, tile_v) = layout.copied_rows, layout.tiles
    if layout.config.raw_stages:
        return wide_tensor_map(args.k, rows, tile), wide_tensor_map(args.v, rows, tile_v)
    return tensor_map(args.k, rows), tensor_map(args.v, rows)


@cache
def _compiled(which: HopperOptions, pack: bool, split: bool, index: int) -> tuple[Kernel, HopperLayout, int]:
    """The kernel on a device, and its bytes of shared memory."""
    layout = hopper_layout(which)
    return load(hopper_variant(which, pack=pack, split=split), index), layout, layout.config.smem_bytes(*layout.tiles)
