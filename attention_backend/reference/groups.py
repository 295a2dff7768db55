"""Cuts a problem into groups of sequences that are computed as one batch, padded to the longest. Knows no scores."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.problem import DESC_STOP, AttentionArgs
from attention_backend.reference.visibility import row_intervals

#: Decode rows of very different lengths are not padded to one another: up to this length, then by powers of two.
_SHORT = 512
#: Scores of a group's smallest tile (one row per head and sequence, all keys up to _SHORT) stay under this.
_MAX_GROUP_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Group:
    """n sequences of one problem with the same number of rows.

    `q` is `[n, rows, num_heads, head_dim]`. Keys are either `k`, `v` `[n, keys, num_kv_heads, *]` or, when `pages` is
    given, the caches with the page of every block in `pages` `[n, blocks]`. Float8 ones are still to be scaled.
    """

    sequences: Tensor | slice  # which of the batch
    rows: slice | None  # varlen: which rows of total_q
    keys: slice | None  # varlen: which rows of total_k
    q: Tensor
    k: Tensor
    v: Tensor
    pages: Tensor | None
    num_keys: int
    low: Tensor  # [n, rows], see row_intervals
    high: Tensor
    position: Tensor

    def sequence_numbers(self, batch: int) -> Tensor:
        """int64 `[n]`"""
        numbers = torch.arange(batch, device=self.q.device)
        return numbers[self.sequences]

    def q_rows(self, x: Tensor) -> Tensor:
        """The group's part of a tensor shaped like q: `[n, rows, ...]`."""
        return x[self.sequences] if self.rows is None else x[self.rows].unsqueeze(0)

    def assign_q_rows(self, target: Tensor, value: Tensor) -> None:
        if self.rows is None:
            target[self.sequences] = value.to(target.dtype)
        else:
            target[self.rows] = value[0].to(target.dtype)

    def lse_rows(self, lse: Tensor) -> Tensor:
        """`[n, num_heads, rows]`"""
        return lse[self.sequences] if self.rows is None else lse[:, self.rows].unsqueeze(0)

    def assign_lse_rows(self, target: Tensor, value: Tensor) -> None:
        if self.rows is None:
            target[self.sequences] = value.to(target.dtype)
        else:
            target[:, self.rows] = value[0].to(target.dtype)


def groups(args: AttentionArgs) -> Iterator[Group]:
    """Every sequence with rows and heads once. Reads lengths on the host."""
    if args.cu_seqlens_q is None and args.cu_seqlens_k is None:
        for sequences, num_keys in _batches(args):
            yield _group(args, sequences, None, None, num_keys)
        return
    q_starts = None if args.cu_seqlens_q is None else args.cu_seqlens_q.tolist()
    k_starts = None if args.cu_seqlens_k is None else args.cu_seqlens_k.tolist()
    limits = _key_limits(args)
    for b in range(args.batch):
        rows = None if q_starts is None else slice(q_starts[b], q_starts[b + 1])
        keys = None if k_starts is None else slice(k_starts[b], k_starts[b + 1])
        num_keys = limits[b] if keys is None else min(limits[b], keys.stop - keys.start)
        if rows is None or rows.stop > rows.start:
            yield _group(args, slice(b, b + 1), rows, keys, num_keys)


def _group(
    args: AttentionArgs, sequences: Tensor | slice, rows: slice | None, keys: slice | None, num_keys: int
) -> Group:
    q = args.q[sequences] if rows is None else args.q[rows].unsqueeze(0)
    pages = None
    if args.block_table is not None:
        block_size = args.k.shape[1]
        k, v = args.k, args.v
        blocks = -(-num_keys // block_size)
        # Entries past a sequence's length mean nothing: any page will do, its slots are masked.
        pages = args.block_table[sequences, :blocks].long().clamp(0, max(args.k.shape[0] - 1, 0))
    elif keys is None:
        k, v = args.k[sequences], args.v[sequences]
        num_keys = args.k.shape[1]
    else:
        k, v = args.k[keys].unsqueeze(0), args.v[keys].unsqueeze(0)
        num_keys = keys.stop - keys.start
    low, high, position = row_intervals(args, sequences, q.shape[1], num_keys)
    return Group(sequences, rows, keys, q, k, v, pages, num_keys, low, high, position)


def _batches(args: AttentionArgs) -> Iterator[tuple[Tensor | slice, int]]:
    """Slices of the batch for rectangular problems; for pages, sequences of like length together."""
    batch, rows = args.batch, max(args.seqlen_q, 1)
    if args.block_table is None:
        size = max(1, _MAX_GROUP_ELEMENTS // max(1, args.num_heads * min(rows, 64) * min(args.k.shape[1], _SHORT)))
        for first in range(0, batch, size):
            yield slice(first, min(first + size, batch)), args.k.shape[1]
        return
    limits = _key_limits(args)
    size = max(1, _MAX_GROUP_ELEMENTS // max(1, args.num_heads * min(rows, 64) * _SHORT))
    if batch <= size and max(limits, default=0) <= _SHORT:
        yield slice(0, batch), max(limits, default=0)
        return
    buckets: dict[int, list[int]] = {}
    for b, limit in enumerate(limits):
        buckets.setdefault((max(limit, _SHORT) - 1).bit_length(), []).append(b)
    for members in buckets.values():
        for first in range(0, len(members), size):
            part = members[first : first + size]
            whole = len(part) == batch
            picked = slice(0, batch) if whole else torch.tensor(part, dtype=torch.int64, device=args.q.device)
            yield picked, max(limits[b] for b in part)


def _key_limits(args: AttentionArgs) -> list[int]:
    """How many key slots of each sequence can matter, by its length alone."""
    if args.block_table is not None:
        available = args.block_table.shape[1] * args.k.shape[1]
    else:
        available = args.k.shape[0] if args.cu_seqlens_k is not None else args.k.shape[1]
    if args.mask_desc is not None:
        stops = args.mask_desc[:, DESC_STOP].tolist()
    elif args.seqused_k is not None:
        stops = args.seqused_k.tolist()
    else:
        return [available] * args.batch
    return [max(0, min(int(stop), available)) for stop in stops]
