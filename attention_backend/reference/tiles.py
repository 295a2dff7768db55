"""One tile of scores: some rows of a group against a block of its keys. Shared by forward and backward.

Shapes: n sequences, G = num_heads / num_kv_heads, R rows, C keys of the block. Scores are
`[n, P, num_kv_heads, G, R, C]` with P = 1 always: a gather puts the pages of a head one after another.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_backend.problem import AttentionArgs
from attention_backend.reference import dropout
from attention_backend.reference.groups import Group

#: Rows of a tile; with it a tile of 9 heads and 2048 keys is 4.5 MiB of float32.
TILE_ROWS = 64
_TILE_ELEMENTS = 1 << 20  # scores of a tile: what a core's cache can still help with
_BLOCK_ELEMENTS = 1 << 22  # elements of k and v in a block, which decode copies out of pages
_MIN_TILE_KEYS = 64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores, sums and lse are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_keys(group: Group, num_rows: int) -> int:
    """Keys of a block, a whole number of pages."""
    n, _, num_heads, _ = group.q.shape
    width = group.k.shape[2] * (group.k.shape[3] + group.v.shape[3])
    fitting = min(_TILE_ELEMENTS // (n * num_heads * num_rows), _BLOCK_ELEMENTS // (n * width))
    keys = max(_MIN_TILE_KEYS, fitting)
    if group.pages is None:
        return keys
    return max(1, keys // group.k.shape[1]) * group.k.shape[1]


def key_range(group: Group, rows: slice) -> tuple[int, int, int]:
    """(start, stop, step) of the key blocks that any of these rows can see; start lies on a page."""
    step = tile_keys(group, rows.stop - rows.start)
    start, stop = int(group.low[:, rows].min()), int(group.high[:, rows].max())
    if group.pages is not None:
        start -= start % group.k.shape[1]
    return start, min(stop, group.num_keys), step


def head_rows(x: Tensor, num_kv_heads: int) -> Tensor:
    """`[n, R, num_heads, D]` -> `[n, 1, num_kv_heads, G * R, D]`, rows of a key head together."""
    n, rows, heads, dim = x.shape
    x = x.unflatten(2, (num_kv_heads, heads // num_kv_heads))
    return x.permute(0, 2, 3, 1, 4).reshape(n, 1, num_kv_heads, heads // num_kv_heads * rows, dim)


def from_head_rows(x: Tensor, rows: int) -> Tensor:
    """`[n, num_kv_heads, G * R, D]` -> `[n, R, num_heads, D]`"""
    n, num_kv_heads, _, dim = x.shape
    return x.view(n, num_kv_heads, -1, rows, dim).permute(0, 3, 1, 2, 4).reshape(n, rows, -1, dim)


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys [start, stop) of every sequence of a group."""

    start: int
    k: Tensor  # [n, P, num_kv_heads, C, head_dim]
    v: Tensor  # [n, P, num_kv_heads, C, head_dim_v]

    @property
    def stop(self) -> int:
        return self.start + self.k.shape[1] * self.k.shape[3]

    def index(self) -> Tensor:
        """Key positions, `[1, P, 1, 1, 1, C]`."""
        pages, keys = self.k.shape[1], self.k.shape[3]
        return torch.arange(self.start, self.stop, device=self.k.device).view(1, pages, 1, 1, 1, keys)


def key_block(args: AttentionArgs, group: Group, start: int, stop: int, dtype: torch.dtype) -> KeyBlock:
    """Pages are copied out, whole; dense keys are a view. Float8 ones get their true values."""
    if group.pages is None:
        k, v = (x[:, start:stop].transpose(1, 2).unsqueeze(1).to(dtype) for x in (group.k, group.v))
    else:
        block_size = group.k.shape[1]
        table = group.pages[:, start // block_size : -(-stop // block_size)]
        k, v = (_gather(x, table).unsqueeze(1).to(dtype) for x in (group.k, group.v))
    if args.k_scale is not None and args.v_scale is not None:
        k, v = (x * scale.to(dtype).view(-1, 1, 1) for x, scale in ((k, args.k_scale), (v, args.v_scale)))
    return KeyBlock(start, k, v)


def _gather(cache: Tensor, table: Tensor) -> Tensor:
    """cache `[num_blocks, block_size, heads, D]`, table `[n, pages]` -> `[n, heads, pages * block_size, D]`"""
    by_head = cache.transpose(1, 2)
    heads, dim = by_head.shape[1], by_head.shape[3]
    if by_head.is_contiguous():  # the engine's layout: a page of one head is one piece of memory, copied to its place
        pieces = table.unsqueeze(1) * heads + torch.arange(heads, device=table.device).view(1, -1, 1)
        gathered = by_head.flatten(0, 1).index_select(0, pieces.flatten())
        return gathered.view(table.shape[0], heads, -1, dim)
    return cache.index_select(0, table.flatten()).unflatten(0, table.shape).flatten(1, 2).transpose(1, 2)


def visible(args: AttentionArgs, group: Group, rows: slice, block: KeyBlock) -> Tensor | None:
    """bool `[n, P, 1, 1, R, C]`, or None when every row of the tile sees every key of the block."""
    low, high = group.low[:, rows], group.high[:, rows]
    mask: Tensor | None = None
    if int(low.max()) > block.start or int(high.min()) < block.stop:
        index = block.index()
        mask = (index >= low[:, None, None, None, :, None]) & (index < high[:, None, None, None, :, None])
    if args.key_mask is not None:
        keys = args.key_mask[group.sequences][:, block.start : block.stop]
        keys = F.pad(keys, (0, block.stop - block.start - keys.shape[1]))
        keys = keys.view(keys.shape[0], block.k.shape[1], 1, 1, 1, -1)
        mask = keys if mask is None else mask & keys
    return mask


def kept(args: AttentionArgs, group: Group, rows: slice, block: KeyBlock) -> Tensor | None:
    """bool `[n, P, num_kv_heads, G * R, C]`: the probabilities that dropout leaves; None without dropout."""
    if args.dropout_threshold == 0 or args.dropout_seed is None:
        return None
    sequences, keys = group.sequence_numbers(args.batch), slice(block.start, block.stop)
    mask = dropout.kept(args.dropout_seed, sequences, args.num_heads, rows, keys, args.dropout_threshold)
    return mask.unflatten(1, (1, args.num_kv_heads, -1)).flatten(3, 4)


@dataclass(frozen=True, slots=True)
class Scores:
    """Masked scores and, with softcap, the derivative of the cap (None without)."""

    scores: Tensor  # [n, P, num_kv_heads, G, R, C]
    cap_slope: Tensor | None


def scores(
    args: AttentionArgs, group: Group, rows: slice, q: Tensor, block: KeyBlock, mask: Tensor | None, *, slope: bool
) -> Scores:
    """q `[n, 1, num_kv_heads, G * R, D]`, scaled. `slope` asks for the derivative of the cap."""
    num_rows = rows.stop - rows.start
    s = torch.matmul(q, block.k.mT).unflatten(3, (-1, num_rows))
    cap_slope = None
    if args.softcap:
        s = torch.tanh(s / args.softcap)
        if slope:
            cap_slope = 1 - s * s
        s = s * args.softcap
    heads = (args.num_kv_heads, args.num_heads // args.num_kv_heads)
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes if args.alibi_slopes.dim() == 1 else args.alibi_slopes[group.sequences]
        slopes = slopes.to(s.dtype).view(-1, 1, *heads, 1, 1)
        distance = (group.position[:, None, None, None, rows, None] - block.index()).abs()
        s = s - slopes * distance.to(s.dtype)
    if args.bias is not None:
        s = s + bias_tile(args.bias, args, group, rows, block).to(s.dtype)
    if mask is not None:
        s = s.masked_fill_(~mask, -torch.inf)
    return Scores(s, cap_slope)


def bias_tile(bias: Tensor, args: AttentionArgs, group: Group, rows: slice, block: KeyBlock) -> Tensor:
    """The tile's part of `[1 or batch, 1 or num_heads, 1 or seqlen_q, seqlen_k]`, `[., 1, ., ., ., C]`, a view."""
    part = bias[group.sequences] if bias.shape[0] > 1 else bias
    part = part[:, :, rows if bias.shape[2] > 1 else slice(0, 1), block.start : block.stop]
    heads = (args.num_kv_heads, args.num_heads // args.num_kv_heads) if bias.shape[1] > 1 else (1, 1)
    return part.unflatten(1, heads).unsqueeze(1)
