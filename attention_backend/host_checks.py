"""Checks of values that the host can look at for free: lengths, page numbers and where sequences lie, on the CPU, where
a wrong one would be read from other pages and rows. On a GPU nobody looks. Knows no kernel."""

import torch
from torch import Tensor

from attention_backend.operators import readable
from attention_backend.problem import AttentionArgs


def check_lengths(name: str, lengths: Tensor, capacity: int) -> None:
    """Raises ValueError for keys that the cache cannot hold."""
    if not readable(lengths) or lengths.numel() == 0:
        return
    least, most = map(int, lengths.aminmax())  # torch would cut `capacity` down to an int32
    if least < 0 or most > capacity:
        raise ValueError(f"{name} must be from 0 to {capacity}, what the cache holds, got {least} to {most}")


def check_page_numbers(name: str, block_table: Tensor, lengths: Tensor, cache: Tensor, *, page: str = "page") -> None:
    """`cache`: `[num_blocks, page_size, ...]`. Raises ValueError for a page that is not there and holds keys of
    `lengths` `[batch]`; what stands in the table behind them is nobody's concern. `page`: what the caller calls it."""
    if not (readable(block_table) and readable(lengths)):
        return
    num_blocks, page_size = cache.shape[:2]
    holds_keys = torch.arange(block_table.shape[1]) * page_size < lengths.unsqueeze(1)
    wrong = holds_keys & ((block_table < 0) | (block_table >= num_blocks))
    if bool(wrong.any()):
        raise ValueError(f"{name} names {page} {int(block_table[wrong][0])}, but there are {num_blocks} {page}s")


def check_starts(name: str, starts: Tensor, rows: int, max_name: str, longest: int) -> None:
    """`starts` `[batch + 1]`. Raises ValueError unless the sequences follow each other within `rows`, none of them of
    more than `longest`, which `max_name` says."""
    if not readable(starts):
        return
    least, most = map(int, starts.diff().aminmax()) if starts.numel() > 1 else (0, 0)
    if least < 0 or int(starts[0]) < 0 or int(starts[-1]) > rows:
        found = ", ".join(map(str, starts[:8].tolist())) + (", ..." if starts.numel() > 8 else "")
        raise ValueError(f"{name} must ascend from 0 to {rows} at most, got {found}")
    if most > longest:
        raise ValueError(f"{name} has a sequence of {most}, more than {max_name}, {longest}")


def check_varlen(args: AttentionArgs) -> None:
    """Of a problem that `check_args` has passed: where its sequences lie."""
    for name, starts, x, longest in (
        ("q", args.cu_seqlens_q, args.q, args.max_seqlen_q),
        ("k", args.cu_seqlens_k, args.k, args.max_seqlen_k),
    ):
        if starts is not None:
            check_starts(f"cu_seqlens_{name}", starts, x.shape[0], f"max_seqlen_{name}", longest)


def check_pages(name: str, block_table: Tensor, lengths_name: str, lengths: Tensor, cache: Tensor) -> None:
    """Of a table `[batch, max_blocks]` and its `lengths` `[batch]`."""
    check_lengths(lengths_name, lengths, block_table.shape[1] * cache.shape[1])
    check_page_numbers(name, block_table, lengths, cache)


def check_cached(
    lengths: Tensor, k: Tensor | None, k_cache: Tensor, block_table: Tensor | None, batch_idx: Tensor | None
) -> None:
    """Of `flash_attn_with_kvcache`: `lengths` before the new keys k, whose places are looked at as they are stored.
    `block_table`: also of whole rows of the cache, which `batch_idx` picked."""
    if k is None:
        check_lengths("cache_seqlens", lengths, k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]))
    if block_table is not None:
        name, page = ("block_table", "page") if batch_idx is None else ("cache_batch_idx", "row")
        check_page_numbers(name, block_table, lengths if k is None else lengths + k.shape[1], k_cache, page=page)
