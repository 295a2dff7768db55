"""Lengths, page numbers and where sequences lie, on the CPU: what is not there is refused; what nobody reads may be
anything."""

from typing import Any

import pytest
import torch

from attention_backend import (
    PrefixGroups,
    cascade_attention,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    shared_prefix_attention,
)
from attention_backend.host_checks import check_lengths

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
    with pytest.raises(ValueError, match=f"cache_batch_idx names row {PAGES}, but there are {PAGES} rows"):
        flash_attn_with_kvcache(queries(), k, v, cache_seqlens=lengths(5, 7), cache_batch_idx=lengths(0, PAGES))


def test_there_may_be_room_for_more_keys_than_an_int32_counts() -> None:
    check_lengths("lengths", lengths(5, 7), 1 << 40)
    check_lengths("lengths", lengths(), 0)
    with pytest.raises(ValueError, match="from 0 to 6, what the cache holds, got 5 to 7"):
        check_lengths("lengths", lengths(5, 7), 6)


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


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 5, 3), "must ascend from 0 to 6 at most, got 0, 5, 3"),
        ((-1, 2, 6), "must ascend from 0 to 6 at most, got -1, 2, 6"),
        ((0, 2, 7), "must ascend from 0 to 6 at most, got 0, 2, 7"),
        ((0, 1, 6), "has a sequence of 5, more than max_seqlen_{name}, 4"),
    ],
)
def test_sequences_lie_one_after_another(name: str, starts: tuple[int, ...], message: str) -> None:
    cu_seqlens = {"cu_seqlens_q": lengths(0, 2, 6), "cu_seqlens_k": lengths(0, 2, 6)}
    x = torch.randn(6, HEADS, DIM)
    flash_attn_varlen_func(x, x, x, **cu_seqlens, max_seqlen_q=4, max_seqlen_k=4)
    cu_seqlens[f"cu_seqlens_{name}"] = lengths(*starts)
    with pytest.raises(ValueError, match=f"^cu_seqlens_{name} {message.format(name=name)}"):
        flash_attn_varlen_func(x, x, x, **cu_seqlens, max_seqlen_q=4, max_seqlen_k=4)


def test_rows_may_follow_the_last_sequence() -> None:
    x = torch.randn(6, HEADS, DIM)
    out = flash_attn_varlen_func(x, x, x, lengths(0, 0, 3), lengths(0, 2, 5), 3, 1 << 40)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out[3:], torch.zeros(3, HEADS, DIM))


PREFIX = PrefixGroups(table([0, 1]), lengths(20))
GROUPS = PrefixGroups(table([0], [1]), lengths(9, 9), cu_rows=lengths(0, 3, 6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefixes": [PrefixGroups(table([0, 99]), lengths(20))]}, "the block_table of a prefix names page 99, but"),
        ({"prefixes": [PrefixGroups(table([0, 1]), lengths(33))]}, "the lens of a prefix must be from 0 to 32, what"),
        (
            {"prefixes": [PrefixGroups(GROUPS.block_table, GROUPS.lens, lengths(0, 3, 7))]},
            "the cu_rows of a prefix must",
        ),
        (
            {"prefixes": [PrefixGroups(GROUPS.block_table, GROUPS.lens, GROUPS.cu_rows, 2)]},
            "the cu_rows of a prefix has",
        ),
        ({"suffix_block_table": table([2], [-3])}, "suffix_block_table names page -3, but there are 8 pages"),
        ({"suffix_lens": lengths(5, 17)}, "suffix_lens must be from 0 to 16, what the cache holds, got 5 to 17"),
    ],
)
def test_shared_pages_are_there_too(changes: dict[str, Any], message: str) -> None:
    k, v = cache()
    call = {"prefixes": [PREFIX, GROUPS], "suffix_block_table": table([2], [3]), "suffix_lens": lengths(5, 7)}
    cascade_attention(queries(), k, v, **call)
    with pytest.raises(ValueError, match=f"^{message}"):
        cascade_attention(queries(), k, v, **call | changes)


def test_a_shared_prefix_is_there() -> None:
    k, v = cache()
    call = {"suffix_block_table": table([2], [3]), "suffix_lens": lengths(5, 7)}
    with pytest.raises(ValueError, match="names page 99"):
        shared_prefix_attention(queries(), k, v, prefix_block_table=lengths(0, 99), prefix_len=20, **call)


def test_ragged_rows_of_requests_that_share_pages() -> None:
    k, v = cache()
    call: dict[str, Any] = {"suffix_block_table": table([2], [3]), "suffix_lens": lengths(5, 7), "max_seqlen_q": 4}
    q = torch.randn(6, HEADS, DIM)
    cascade_attention(q, k, v, [PREFIX], cu_seqlens_q=lengths(0, 4, 6), **call)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q has a sequence of 5, more than max_seqlen_q, 4"):
        cascade_attention(q, k, v, [PREFIX], cu_seqlens_q=lengths(0, 5, 6), **call)


def test_what_vmap_runs_over_is_not_looked_at() -> None:
    k, v = cache()
    k, v, q, several = k[:2], v[:2], queries(), torch.stack([lengths(5, 16), lengths(0, 7)])
    outs = torch.func.vmap(lambda some: flash_attn_with_kvcache(q, k, v, cache_seqlens=some))(several)
    for out, some in zip(outs, several, strict=True):
        assert torch.equal(out, flash_attn_with_kvcache(q, k, v, cache_seqlens=some))
    x, starts = torch.randn(6, HEADS, DIM), torch.stack([lengths(0, 2, 6), lengths(0, 3, 6)])
    outs = torch.func.vmap(lambda some: flash_attn_varlen_func(x, x, x, some, some, 4, 4))(starts)
    for out, some in zip(outs, starts, strict=True):
        assert torch.equal(out, flash_attn_varlen_func(x, x, x, some, some, 4, 4))
