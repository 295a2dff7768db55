"""Checks of values that the host can look at for free: lengths and page numbers on the CPU, where a wrong one would be
read from other pages. On a GPU nobody looks. Knows no kernel."""

import torch
from torch import Tensor

from attention_backend.operators import readable


def check_lengths(name: str, lengths: Tensor, capacity: int) -> None:
    """Raises ValueError for keys that the cache cannot hold."""
    if readable(lengths) and bool(((lengths < 0) | (lengths > capacity)).any()):
        found = f"{int(lengths.min())} to {int(lengths.max())}"
        raise ValueError(f"{name} must be from 0 to {capacity}, what the cache holds, got {found}")


def check_page_numbers(block_table: Tensor, lengths: Tensor, cache: Tensor) -> None:
    """`cache`: `[num_blocks, page_size, ...]`. Raises ValueError for a page that is not there and holds keys of
    `lengths` `[batch]`; what stands in the table behind them is nobody's concern."""
    if not (readable(block_table) and readable(lengths)):
        return
    num_blocks, page_size = cache.shape[:2]
    holds_keys = torch.arange(block_table.shape[1]) * page_size < lengths.unsqueeze(1)
    wrong = holds_keys & ((block_table < 0) | (block_table >= num_blocks))
    if bool(wrong.any()):
        raise ValueError(f"block_table names page {int(block_table[wrong][0])}, but there are {num_blocks} pages")


def check_cached(lengths: Tensor, k: Tensor | None, k_cache: Tensor, block_table: Tensor | None) -> None:
    """Of `flash_attn_with_kvcache`: `lengths` before the new keys k, whose places are looked at as they are stored."""
    if k is None:
        check_lengths("cache_seqlens", lengths, k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]))
    if block_table is not None:
        check_page_numbers(block_table, lengths if k is None else lengths + k.shape[1], k_cache)
