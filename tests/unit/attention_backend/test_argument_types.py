"""Arguments of another type than the public functions take are refused by their names, before anything is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention_backend import (
    AttentionArgs,
    BlockSparsity,
    PrefixGroups,
    attention,
    block_patterns,
    block_sparse_attention,
    cascade_attention,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    linear_attention,
    merge_states,
    shared_prefix_attention,
)

Q, K = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)
TABLE, LENGTHS = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
MASK = torch.ones(1, 1, 3, 5, dtype=torch.bool)
SUFFIXES: dict[str, Any] = {"suffix_block_table": TABLE, "suffix_lens": LENGTHS}


def varlen(**changes: Any) -> Any:
    starts = {f"cu_seqlens_{n}": torch.tensor([0, x.shape[1]], dtype=torch.int32) for n, x in (("q", Q), ("k", K))}
    call: dict[str, Any] = {**starts, "max_seqlen_q": 3, "max_seqlen_k": 5, **changes}
    return flash_attn_varlen_func(Q[0], K[0] if "block_table" not in changes else K, K[0], **call)


def cached(**changes: Any) -> Any:
    return flash_attn_with_kvcache(Q, K.clone(), K.clone(), **changes)


def shared(**changes: Any) -> Any:
    call = {"prefix_block_table": TABLE[0], "prefix_len": 2, **SUFFIXES, **changes}
    return shared_prefix_attention(Q, K, K, **call)


def cascade(**changes: Any) -> Any:
    return cascade_attention(Q, K, K, [], **{**SUFFIXES, **changes})


@pytest.mark.parametrize(
    "size", [(64.0, 0), (2, 0.5), None, 5, (1, 2, 3), (1,), torch.tensor([1, 2]), "ab", (None, None)]
)
@pytest.mark.parametrize("function", [lambda **size: flash_attn_func(Q, K, K, **size), varlen, cached, shared, cascade])
def test_a_window_size_is_two_ints(function: Callable[..., Any], size: Any) -> None:
    with pytest.raises(TypeError, match=r"window_size must be two ints \(left, right\), -1 for no bound, got"):
        function(window_size=size)


def test_a_list_is_a_window_size_too() -> None:
    no_bounds, none = cached(window_size=[-1, -1]), cached()
    assert no_bounds.shape == none.shape
    assert shared(window_size=[-1, -1]).shape == Q.shape


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (lambda **x: flash_attn_func(Q, K, K, **x), "alibi_slopes", [0.5] * 4),
        (lambda **x: flash_attn_func(Q, K, K, **x), "sinks", 1.0),
        (varlen, "cu_seqlens_q", [0, 3]),
        (varlen, "cu_seqlens_k", [0, 5]),
        (lambda **x: varlen(block_table=TABLE[:1], **x), "cu_seqlens_q", [0, 3]),
        (lambda **x: varlen(block_table=TABLE[:1], **x), "cu_seqlens_k", [0, 5]),
        (cached, "k_scale", 0.5),
        (cached, "v_scale", 0.5),
        (cached, "cache_leftpad", [0, 0]),
        (shared, "suffix_lens", [1, 1]),
        (cascade, "suffix_lens", [1, 1]),
        (cascade, "suffix_block_table", [[0], [1]]),
        (cascade, "cu_seqlens_q", [0, 3]),
        (cascade, "k_scale", 0.5),
        (lambda q: flash_attn_func(q, K, K), "q", [1.0]),
        (lambda k: flash_attn_func(Q, k, K), "k", None),
        (lambda v: flash_attn_func(Q, K, v), "v", 1),
        (lambda q: flash_attn_fp8_func(q, K, K), "q", [1.0]),
        (lambda q: block_sparse_attention(q, K, K, BlockSparsity.from_mask(MASK)), "q", [1.0]),
        (lambda q: linear_attention(q, K, K), "q", [1.0]),
        (lambda k: linear_attention(Q, k, K), "k", [1.0]),
        (lambda q: flash_attn_with_kvcache(q, K, K, block_table=TABLE, cache_seqlens=1), "q", [1.0]),
        (lambda k_cache: flash_attn_with_kvcache(Q, k_cache, K), "k_cache", [1.0]),
        (lambda k: cached(k=k, v=K, cache_seqlens=1), "k", [1.0]),
        (lambda rotary_cos: cached(k=K, v=K, cache_seqlens=0, rotary_cos=rotary_cos, rotary_sin=K), "rotary_cos", 1.0),
        (lambda q: shared_prefix_attention(q, K, K, prefix_block_table=TABLE[0], prefix_len=2, **SUFFIXES), "q", 1),
        (
            lambda k_cache: shared_prefix_attention(
                Q, k_cache, K, prefix_block_table=TABLE[0], prefix_len=2, **SUFFIXES
            ),
            "k_cache",
            1,
        ),
        (BlockSparsity.from_mask, "mask", [True]),
        (block_patterns.documents, "document_ids", [0, 0, 1]),
        (lambda **x: block_patterns.sliding_window(9, window=(1, 1), **x), "global_tokens", [0]),
    ],
)
def test_what_must_be_a_tensor_is_named(function: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a tensor, got "):
        function(**{name: value})


def test_lengths_are_whole_numbers() -> None:
    with pytest.raises(TypeError, match=r"cache_seqlens, where it is not a tensor, must be an int, got 2\.7"):
        cached(cache_seqlens=2.7)
    with pytest.raises(TypeError, match=r"prefix_len, where it is not a tensor, must be an int, got 2\.5"):
        shared(prefix_len=2.5)


@pytest.mark.parametrize("value", ["1", [1.0], None])
@pytest.mark.parametrize("name", ["softcap", "dropout_p", "softmax_scale"])
def test_numbers_are_numbers(name: str, value: Any) -> None:
    message = f"^{name} must be a number, got "
    with pytest.raises(TypeError, match=message):
        attention(AttentionArgs(Q, K, K, **{"softmax_scale": 1.0, name: value}))
    if (name, value) != ("softmax_scale", None):
        with pytest.raises(TypeError, match=message):
            flash_attn_func(Q, K, K, **{name: value})


def test_a_number_may_be_a_tensor_of_one() -> None:
    half = torch.tensor(0.5)
    out = flash_attn_func(Q, K, K, softmax_scale=half, softcap=half)  # type: ignore[arg-type]
    assert torch.equal(out, flash_attn_func(Q, K, K, softmax_scale=0.5, softcap=0.5))
    with pytest.raises(TypeError, match=r"^softmax_scale must be a number, got "):
        flash_attn_func(Q, K, K, softmax_scale=torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (lambda **x: flash_attn_func(Q, K, K, **x), "chunk_size", 2.5),
        (lambda **x: flash_attn_func(Q, K, K, **x), "chunk_size", None),
        (varlen, "max_seqlen_q", 3.0),
        (varlen, "max_seqlen_k", None),
        (cached, "num_splits", 1.5),
        (cached, "num_splits", None),
        (lambda **x: attention(AttentionArgs(Q, K, K, 1.0, **x)), "window_left", 2.5),
        (lambda **x: linear_attention(Q, K, K, **x), "chunk_size", 2.5),
    ],
)
def test_counts_are_whole_numbers(function: Callable[..., Any], name: str, value: Any) -> None:
    """In inference mode too, where torch.library does not see the call."""
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), pytest.raises(TypeError, match=f"^{name} must be an int, got {value}"):
            function(**{name: value})


@pytest.mark.parametrize("other", [torch.ones(3, 5, dtype=torch.bool), len, None])
def test_a_sparsity_is_no_mask(other: Any) -> None:
    with pytest.raises(TypeError, match=r"BlockSparsity or a BlockMask .*from_mask, .*create_block_mask"):
        block_sparse_attention(Q, K, K, other)


def test_states_are_merged_from_a_sequence() -> None:
    outs, lses = torch.randn(2, 3, 4, 8), torch.randn(2, 4, 3)
    merge_states(outs.unbind(), lses.unbind())
    with pytest.raises(TypeError, match=r"outs must be a sequence of tensors, one a state: pass outs\.unbind\(\)"):
        merge_states(outs, lses.unbind())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lses must be a sequence of tensors"):
        merge_states(outs.unbind(), lses)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"outs\[0\] must be a tensor, got 1"):
        merge_states([1], [2])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"sinks must be floating point, got torch.int32"):
        merge_states(outs.unbind(), lses.unbind(), sinks=torch.ones(4, dtype=torch.int32))


def test_arguments_are_equal_to_themselves_alone() -> None:
    """Comparing tensors by == gives no truth value."""
    for make in (
        lambda: AttentionArgs(Q, K, K, 1.0),
        lambda: PrefixGroups(TABLE, LENGTHS),
        lambda: BlockSparsity.from_mask(torch.ones(1, 1, 3, 5, dtype=torch.bool)),
    ):
        one: object = make()
        assert one == one  # noqa: PLR0124
        assert one != make()
        assert len({one, one}) == 1
