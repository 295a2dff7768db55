"""Lengths and page numbers on the CPU: what is not there is refused; what nobody reads may be anything."""

import pytest
import torch

from attention_backend import flash_attn_varlen_func, flash_attn_with_kvcache

PAGES, PAGE, HEADS, DIM = 8, 16, 2, 32


def cache() -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, PAGES, PAGE, HEADS, DIM).unbind()
    return k, v


def queries() -> torch.Tensor:
    return torch.randn(2, 3, HEADS, DIM)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("page", [-1, PAGES, 100])
def test_a_page_that_is_not_there_is_refused_where_it_holds_keys(page: int) -> None:
    k, v = cache()
    with pytest.raises(ValueError, match=f"names page {page}, but there are {PAGES} pages"):
        flash_attn_with_kvcache(queries(), k, v, cache_seqlens=lengths(5, 20), block_table=table([0, -7], [1, page]))
    out = flash_attn_with_kvcache(queries(), k, v, cache_seqlens=lengths(5, 16), block_table=table([0, -7], [1, page]))
    assert isinstance(out, torch.Tensor)
    assert not out.isnan().any()


@pytest.mark.parametrize("wrong", [-1, 2 * PAGE + 1])
def test_lengths_that_the_table_does_not_hold_are_refused(wrong: int) -> None:
    k, v = cache()
    with pytest.raises(ValueError, match=f"cache_seqlens must be from 0 to {2 * PAGE}"):
        flash_attn_with_kvcache(queries(), k, v, cache_seqlens=lengths(5, wrong), block_table=table([0, 1], [2, 3]))


def test_lengths_and_rows_of_a_dense_cache() -> None:
    k, v = cache()
    with pytest.raises(ValueError, match=f"cache_seqlens must be from 0 to {PAGE}"):
        flash_attn_with_kvcache(queries(), k, v, cache_seqlens=lengths(5, PAGE + 1))
    with pytest.raises(ValueError, match=f"names page {PAGES}"):
        flash_attn_with_kvcache(queries(), k, v, cache_seqlens=lengths(5, 7), cache_batch_idx=lengths(0, PAGES))


def test_nothing_is_stored_before_a_page_is_found_missing() -> None:
    k, v = cache()
    before, new = k.clone(), torch.randn(2, 2, HEADS, DIM)
    with pytest.raises(ValueError, match="names page 99"):
        flash_attn_with_kvcache(
            queries(), k, v, new, new, cache_seqlens=lengths(20, 3), block_table=table([99, 1], [2, 3])
        )
    assert torch.equal(k, before)


def test_pages_of_varlen_queries() -> None:
    k, v = cache()
    q, cu_q = torch.randn(6, HEADS, DIM), lengths(0, 3, 6)
    with pytest.raises(ValueError, match="names page 101"):
        flash_attn_varlen_func(q, k, v, cu_q, lengths(0, 20, 30), 3, 20, block_table=table([0, 101], [2, 3]))
    with pytest.raises(ValueError, match=f"the number of keys must be from 0 to {2 * PAGE}"):
        flash_attn_varlen_func(q, k, v, cu_q, lengths(0, 50, 60), 3, 50, block_table=table([0, 1], [2, 3]))
