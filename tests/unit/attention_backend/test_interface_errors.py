"""Every refusal of the public functions says what was wrong and what would be right."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend import (
    AttentionArgs,
    PagedMetadata,
    UnsupportedError,
    attention,
    dispatch,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    paged_attention,
)
from attention_backend.metadata import SharedPages


def i32(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


def base() -> AttentionArgs:
    return AttentionArgs(torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8), 0.3)


FLOAT8: dict[str, Any] = {
    **{n: torch.randn(2, 5, 2, 8).to(torch.float8_e4m3fn) for n in "kv"},
    **{f"{n}_scale": torch.rand(2) for n in "kv"},
}

BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.randn(3, 4, 8)}, ValueError, r"q must be \[batch, seqlen, heads, dim\]"),
    ({"q": torch.randn(2, 3, 4, 8).half()}, TypeError, "one dtype"),
    ({"q": torch.randn(2, 3, 8, 4).mT}, ValueError, "last dimension of q must be contiguous"),
    ({n: torch.ones(2, 5, 2, 8, dtype=torch.int32) for n in "qkv"}, TypeError, "floating point"),
    ({"v": torch.randn(2, 6, 2, 8)}, ValueError, "k and v must agree"),
    ({"q": torch.randn(2, 3, 4, 16)}, ValueError, "same head_dim, got 16 and 8"),
    ({"q": torch.randn(2, 3, 3, 8)}, ValueError, "multiple of num_kv_heads, got 3 and 2"),
    ({"q": torch.randn(1, 3, 4, 8)}, ValueError, "same batch, got 1 and 2"),
    ({"k": torch.randn(2, 5, 2, 8, device="meta")}, ValueError, "k is on meta"),
    ({"window_left": -2}, ValueError, "window_left must be -1"),
    ({"window_right": -7}, ValueError, "window_right must be -1"),
    ({"chunk_size": -1}, ValueError, "chunk_size must be at least 0"),
    ({"num_splits": -1}, ValueError, "num_splits must be at least 0"),
    ({"block_table": i32(2, 1)}, ValueError, "block_table needs seqused_k"),
    ({"block_table": i32(2, 1).long(), "seqused_k": i32(2)}, TypeError, r"block_table must be torch.int32"),
    ({"block_table": i32(3, 1), "seqused_k": i32(2)}, ValueError, r"block_table must have shape \[2, any\]"),
    ({"seqused_k": i32(2).long()}, TypeError, "seqused_k must be torch.int32"),
    ({"leftpad_k": i32(3)}, ValueError, r"leftpad_k must have shape \[2\]"),
    ({"mask_desc": i32(2, 6)}, ValueError, r"mask_desc must have shape \[2, 8\]"),
    ({"key_mask": i32(2, 5)}, TypeError, "key_mask must be torch.bool"),
    ({"key_mask": i32(2, 4).bool()}, ValueError, r"key_mask must have shape \[2, 5\]"),
    ({"alibi_slopes": torch.rand(4).double()}, TypeError, "alibi_slopes must be torch.float32"),
    ({"alibi_slopes": torch.rand(3, 4)}, ValueError, r"alibi_slopes must have shape \[2, 4\]"),
    ({"sinks": torch.rand(3)}, ValueError, r"sinks must have shape \[4\]"),
    ({"sinks": i32(4)}, TypeError, "sinks must be floating point"),
    ({"bias": torch.rand(2, 4, 3, 4)}, ValueError, r"bias must be \[1 or 2, 1 or 4, 1 or 3, 5\]"),
    ({"bias": i32(2, 4, 3, 5)}, TypeError, "bias must be floating point"),
    ({"bias": torch.rand(2, 4, 3, 5), "block_table": i32(2, 1), "seqused_k": i32(2)}, ValueError, "bias is for dense"),
    ({"bias": torch.rand(2, 4, 3, 5, device="meta")}, ValueError, "bias is on meta"),
    ({"dropout_p": 1.0, "dropout_seed": i32(2).long()}, ValueError, "dropout_p must be at least 0 and below 1"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p must be at least 0"),
    ({"dropout_p": 0.1}, ValueError, "dropout_p needs dropout_seed"),
    ({"dropout_p": 0.1, "dropout_seed": i32(2)}, TypeError, "dropout_seed must be torch.int64"),
    ({"dropout_seed": i32(1).long()}, ValueError, r"dropout_seed must have shape \[2\]"),
    ({"k_scale": torch.rand(2)}, ValueError, "k_scale goes with torch.float8_e4m3fn k and v"),
    ({**FLOAT8, "v_scale": None}, ValueError, "v_scale goes with torch.float8_e4m3fn"),
    ({**FLOAT8, "v": torch.randn(2, 5, 2, 8)}, TypeError, "one dtype"),
    ({**FLOAT8, "k_scale": torch.rand(4)}, ValueError, r"k_scale must have shape \[2\]"),
    ({**FLOAT8, "v_scale": torch.rand(2).half()}, TypeError, "v_scale must be torch.float32"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_precisely(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(replace(base(), **changes))


def test_cu_seqlens_are_int32() -> None:
    q, k, v = (x.flatten(0, 1) for x in (base().q, base().k, base().v))
    good, bad = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([0, 10])
    with pytest.raises(TypeError, match=r"cu_seqlens_k must be torch.int32, got torch.int64"):
        flash_attn_varlen_func(q, k, v, good, bad, 6, 10)
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be torch.int32"):
        flash_attn_varlen_func(q, k, v, bad, good, 6, 10)


PACKED: dict[str, Any] = {
    **{"q": torch.randn(6, 4, 8), "k": torch.randn(10, 2, 8), "v": torch.randn(10, 2, 8)},
    **{f"cu_seqlens_{n}": torch.tensor([0, end, 2 * end], dtype=torch.int32) for n, end in (("q", 3), ("k", 5))},
    **{"max_seqlen_q": 3, "max_seqlen_k": 5},
}
PAGED: dict[str, Any] = {
    **{"k": torch.randn(3, 4, 2, 8), "v": torch.randn(3, 4, 2, 8), "max_seqlen_k": 5},
    **{"block_table": i32(2, 2), "seqused_k": i32(2)},
}
BAD_LENGTHS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({**PACKED, "max_seqlen_q": 0}, ValueError, "cu_seqlens_q needs max_seqlen_q, the longest sequence, got 0"),
    ({**PACKED, "max_seqlen_k": 0}, ValueError, "cu_seqlens_k needs max_seqlen_k, the longest sequence, got 0"),
    ({**PACKED, "cu_seqlens_q": i32(0)}, ValueError, r"cu_seqlens_q must have shape \[batch \+ 1\], got \(0,\)"),
    ({**PACKED, "cu_seqlens_q": i32(1)}, ValueError, "cu_seqlens_q names no sequence, and q has 6 rows"),
    ({**PACKED, "cu_seqlens_q": i32(3, 1)}, ValueError, r"cu_seqlens_q must have shape \[batch \+ 1\], got \(3, 1\)"),
    ({**PACKED, "cu_seqlens_k": i32(0)}, ValueError, r"cu_seqlens_k must have shape \[3\], got \(0,\)"),
    (
        {**PACKED, "cu_seqlens_k": None, "k": torch.randn(3, 5, 2, 8), "v": torch.randn(3, 5, 2, 8)},
        ValueError,
        "same batch, got 2 and 3",
    ),
    ({**PACKED, "key_mask": i32(2, 4).bool()}, ValueError, "key_mask must be as wide as a sequence can be, 5, got 4"),
    ({**PAGED, "key_mask": i32(2, 7).bool()}, ValueError, "key_mask must be as wide as a sequence can be, 8, got 7"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_LENGTHS)
def test_bad_lengths_are_refused_precisely(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(replace(base(), **changes))


@pytest.mark.parametrize(("changes", "width"), [(PACKED, 5), (PACKED, 9), (PAGED, 8), (PAGED, 11)])
def test_a_key_mask_may_be_wider_than_the_keys(changes: dict[str, Any], width: int) -> None:
    args = replace(base(), **changes)
    masked = attention(replace(args, key_mask=torch.ones(2, width, dtype=torch.bool)))
    torch.testing.assert_close(masked, attention(args))


def test_sequences_without_keys_need_no_longest() -> None:
    starts = torch.zeros(3, dtype=torch.int32)
    args = replace(base(), **{**PACKED, "k": torch.randn(0, 2, 8), "v": torch.randn(0, 2, 8)})
    assert not attention(replace(args, cu_seqlens_k=starts, max_seqlen_k=0)).any()


def test_lengths_of_pages_go_by_their_own_name() -> None:
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    pages = PAGED["k"], PAGED["v"]
    with pytest.raises(TypeError, match=r"cu_seqlens_k must be torch.int32, got torch.int64"):
        flash_attn_varlen_func(PACKED["q"], *pages, starts, starts.long(), 3, 3, block_table=PAGED["block_table"])


def test_heads_of_no_elements_have_no_default_scale() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be at least 1, got q of shape \(2, 3, 4, 0\)"):
        flash_attn_func(torch.randn(2, 3, 4, 0), torch.randn(2, 5, 2, 0), base().v)


def test_cu_seqlens_k_and_a_block_table_exclude_each_other() -> None:
    args = replace(base(), k=torch.randn(5, 2, 8), v=torch.randn(5, 2, 8), cu_seqlens_k=i32(3))
    with pytest.raises(ValueError, match="with block_table pass seqused_k"):
        attention(replace(args, block_table=i32(2, 1), seqused_k=i32(2)))


def test_dropout_of_everything_is_refused() -> None:
    args = base()
    with pytest.raises(ValueError, match=r"dropout_p must be at least 0 and below 1, got 1.0"):
        flash_attn_func(args.q, args.k, args.v, 1.0)


def test_float8_keys_have_no_gradient() -> None:
    out = attention(replace(base(), q=base().q.requires_grad_(), **FLOAT8))
    with pytest.raises(UnsupportedError, match="float8 keys and values are for inference"):
        out.sum().backward()


LOST: dict[str, Tensor] = {
    "alibi_slopes": torch.rand(4),
    "softmax_scale": torch.tensor(0.3),
    "softcap": torch.tensor(20.0),
    "k_scale": FLOAT8["k_scale"],
    "v_scale": FLOAT8["v_scale"],
}


@pytest.mark.parametrize("name", LOST)
def test_what_would_lose_its_gradient_in_silence_is_refused_with_what_has_one(name: str) -> None:
    others = FLOAT8 if name.endswith("_scale") and name != "softmax_scale" else {}
    args = replace(base(), **{**others, name: LOST[name].clone().requires_grad_()})
    with pytest.raises(UnsupportedError, match=f"{name} has no gradient.*in q, k, v, bias and sinks: "):
        attention(args)
    with torch.no_grad():
        attention(args)


def test_a_learnt_softmax_scale_is_refused_by_the_public_functions() -> None:
    args, scale = base(), torch.tensor(0.3, requires_grad=True)
    for function in (flash_attn_func, flash_attn_with_kvcache):
        with pytest.raises(UnsupportedError, match="multiply q by it and pass softmax_scale=1"):
            function(args.q, args.k, args.v, softmax_scale=scale)


def test_a_cache_stores_nothing_when_alibi_slopes_want_a_gradient() -> None:
    args = base()
    before = args.k.clone()
    new, slopes = torch.randn(2, 1, 2, 8), torch.rand(4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="alibi_slopes has no gradient"):
        flash_attn_with_kvcache(args.q, args.k, args.v, new, new, cache_seqlens=2, alibi_slopes=slopes)
    assert torch.equal(args.k, before)


@pytest.mark.parametrize("loss", [Tensor.sum, lambda out: out.square().sum()])
def test_a_gradient_of_a_gradient_is_an_error(loss: Callable[[Tensor], Tensor]) -> None:
    args = replace(base(), q=base().q.requires_grad_())
    (gradient,) = torch.autograd.grad(loss(attention(args)), args.q, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiable once"):
        gradient.square().sum().backward()


def test_a_device_that_nothing_serves_is_refused_with_what_is_served() -> None:
    args = base()
    with pytest.raises(UnsupportedError, match="cpu_reference"):
        dispatch.run(replace(args, q=args.q.to("meta")))


BAD_CACHE_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": torch.randn(2, 1, 2, 8)}, ValueError, "k and v go together"),
    ({n: torch.randn(2, 1, 2, 8) for n in "kv"}, ValueError, "k needs cache_seqlens"),
    ({"rotary_cos": torch.randn(9, 4)}, ValueError, "go together"),
    ({"rotary_cos": torch.randn(9, 4), "rotary_sin": torch.randn(9, 4)}, ValueError, "rotary_cos without k"),
    ({"block_table": i32(2, 1)}, ValueError, "block_table needs cache_seqlens"),
    ({"block_table": i32(2, 1), "cache_batch_idx": i32(2), "cache_seqlens": 3}, ValueError, "reorder the table"),
    ({"cache_batch_idx": i32(2).long()}, TypeError, "cache_batch_idx must be torch.int32"),
    ({"cache_seqlens": i32(2).long()}, TypeError, "cache_seqlens must be torch.int32"),
    ({**{n: torch.randn(2, 1, 3, 8) for n in "kv"}, "cache_seqlens": 1}, ValueError, r"k must be \[2, seqlen_new, 2"),
    ({**{n: torch.randn(2, 3, 2, 8) for n in "kv"}, "cache_seqlens": 4}, ValueError, "holds 5 keys.*end at 7"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CACHE_CALLS)
def test_bad_cache_calls_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    args = base()
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(args.q, args.k, args.v, **changes)


def step() -> dict[str, Any]:
    cu = torch.tensor([0, 1], dtype=torch.int32)
    return {
        **{"q": torch.randn(1, 4, 8), "k_new": torch.randn(1, 2, 8), "v_new": torch.randn(1, 2, 8)},
        **{"k_cache": torch.randn(3, 2, 16, 8), "v_cache": torch.randn(3, 2, 16, 8), "softmax_scale": 0.3},
        "metadata": PagedMetadata(cu, i32(1), i32(1, 3), torch.zeros(1, dtype=torch.int64), 1, 1, 1),
    }


@pytest.mark.parametrize("name", ["q", "k_new", "v_new", "sinks"])
def test_steps_have_no_gradients_and_refuse_before_they_store(name: str) -> None:
    call = {**step(), "sinks": torch.randn(4)}
    call[name].requires_grad_()
    before = call["k_cache"].clone()
    with pytest.raises(UnsupportedError, match="paged_attention has no gradient"):
        paged_attention(**call)
    assert torch.equal(call["k_cache"], before)
    with torch.no_grad():
        paged_attention(**call)
    assert not torch.equal(call["k_cache"], before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("softmax_scale", "softcap") for value in (-1.0, 1e-39, 2e38, math.inf, math.nan)),
        ("softmax_scale", 0.0),
    ],
)
def test_factors_of_scores_that_float32_does_not_hold_are_refused(name: str, value: float) -> None:
    """Kernels made NaN of them."""
    zero = "0, or " if name == "softcap" else ""
    said = re.escape(f"{name} must be {zero}from 1.18e-38 to 1.7e+38, got {value}")
    with pytest.raises(ValueError, match=said):
        attention(replace(base(), **{name: value}))
    with pytest.raises(ValueError, match=said):
        paged_attention(**{**step(), name: value})


EIGHT = torch.zeros(3, 2, 16, 8, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_steps_have_no_gradients_of_scales(name: str) -> None:
    call = {**step(), "k_cache": EIGHT.clone(), "v_cache": EIGHT.clone()}
    call |= {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    call[name].requires_grad_()
    with pytest.raises(UnsupportedError, match="paged_attention has no gradient"):
        paged_attention(**call)
    assert not call["k_cache"].float().any()


BAD_STEPS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.randn(1, 1, 4, 8)}, ValueError, r"must be \[tokens, heads, dim\]"),
    ({"k_cache": torch.randn(3, 2, 15, 8)}, ValueError, r"must be \[num_blocks, num_kv_heads, block_size, dim\]"),
    ({"v_new": torch.randn(1, 3, 8)}, ValueError, r"v_new must be \[1, 2, 8\] to fit q and its cache, got \[1, 3, 8\]"),
    ({"q": torch.randn(1, 3, 8)}, ValueError, "head ratio"),
    ({"q": torch.randn(1, 4, 8).half(), "k_new": None, "v_new": None}, TypeError, "the caches are"),
    ({"v_new": None}, ValueError, "k_new and v_new go together"),
    ({"k_new": torch.randn(1, 2, 8).half()}, TypeError, "k_new must have q's dtype torch.float32, got torch.float16"),
    ({"v_new": torch.randn(1, 2, 8).double()}, TypeError, "v_new must have q's dtype"),
    ({"v_new": torch.randn(1, 2, 8, device="meta")}, ValueError, "v_new is on meta"),
    ({"k_cache": torch.randn(3, 2, 16, 8, device="meta")}, ValueError, "k_cache is on meta"),
    ({"q": torch.randn(1, 8, 4).mT}, ValueError, "last dimension of q must be contiguous"),
    ({"v_cache": torch.randn(3, 2, 8, 16).mT}, ValueError, "last dimension of v_cache must be contiguous"),
    ({"sinks": torch.randn(3)}, ValueError, r"sinks must have shape \[4\], got \(3,\)"),
    ({"sinks": i32(4)}, TypeError, "sinks must be floating point"),
    (
        {"k_cache": EIGHT, "v_cache": EIGHT, **{f"{n}_scale": torch.ones(2).double() for n in "kv"}},
        TypeError,
        "k_scale",
    ),
    ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, ValueError, "2 slots for 1 rows of q"),
    ({"window_left": -3}, ValueError, "window_left must be -1"),
    ({"k_scale": torch.ones(2)}, ValueError, "k_scale goes with torch.float8_e4m3fn"),
    ({"k_cache": EIGHT, "v_cache": EIGHT}, ValueError, "k_scale goes with torch.float8_e4m3fn"),
    ({"k_cache": EIGHT, "v_cache": EIGHT, "k_scale": torch.ones(2)}, ValueError, "v_scale goes with"),
    ({"k_cache": EIGHT, "v_cache": EIGHT, "k_scale": torch.ones(3)}, ValueError, r"k_scale must have shape \[2\]"),
    ({"k_cache": EIGHT}, TypeError, "the caches are torch.float8_e4m3fn and torch.float32"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_STEPS)
def test_bad_steps_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    step: dict[str, Any] = {
        **{"q": torch.randn(1, 4, 8), "k_new": torch.randn(1, 2, 8), "v_new": torch.randn(1, 2, 8)},
        **{"k_cache": torch.randn(3, 2, 16, 8), "v_cache": torch.randn(3, 2, 16, 8)},
        **{"slot_mapping": torch.zeros(1, dtype=torch.int64), "window_left": -1, **changes},
    }
    cu = torch.tensor([0, 1], dtype=torch.int32)
    metadata = PagedMetadata(cu, i32(1), i32(1, 3), step.pop("slot_mapping"), 1, 1, 1)
    with pytest.raises(error, match=message):
        paged_attention(**step, metadata=metadata, softmax_scale=0.3)


def test_metadata_of_another_device_is_refused() -> None:
    q, cache = torch.randn(1, 4, 8), torch.randn(3, 2, 16, 8)
    tensors = (i32(2), i32(1), i32(1, 3), torch.zeros(1, dtype=torch.int64))
    metadata = PagedMetadata(*(x.to("meta") for x in tensors), 1, 1, 1)
    with pytest.raises(ValueError, match="the metadata is on meta, q is on cpu"):
        paged_attention(q, None, None, cache, cache, metadata, softmax_scale=0.3)


BAD_METADATA: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"seq_lens": i32(2).long()}, TypeError, "seq_lens must be torch.int32, got torch.int64"),
    ({"seq_lens": i32(1)}, ValueError, r"cu_seqlens_q must have shape \[2\], got \(3,\)"),
    ({"seq_lens": torch.tensor(3, dtype=torch.int32)}, ValueError, r"seq_lens must have shape \[0\]"),
    ({"seq_lens": i32(4)[::2]}, ValueError, r"last dimension of seq_lens must be contiguous, got strides \(2,\)"),
    ({"cu_seqlens_q": i32(3).long()}, TypeError, "cu_seqlens_q must be torch.int32"),
    ({"cu_seqlens_q": i32(3, 1)}, ValueError, r"cu_seqlens_q must have shape \[3\]"),
    ({"cu_seqlens_q": i32(3).to("meta")}, ValueError, "cu_seqlens_q is on meta, seq_lens on cpu"),
    ({"block_table": i32(2, 3).long()}, TypeError, "block_table must be torch.int32"),
    ({"block_table": i32(3, 2).T}, ValueError, r"last dimension of block_table must be contiguous"),
    ({"block_table": i32(1, 3)}, ValueError, r"block_table must have shape \[2, any\], got \(1, 3\)"),
    ({"slot_mapping": i32(2)}, TypeError, "slot_mapping must be torch.int64"),
    ({"slot_mapping": torch.zeros(4, dtype=torch.int64)[::2]}, ValueError, "last dimension of slot_mapping"),
    ({"slot_mapping": torch.zeros(1, dtype=torch.int64)}, ValueError, "2 decodes need a row each, there are 1"),
    (  # those that may be missing, too
        {"slot_mapping": torch.zeros(1, dtype=torch.int64), "decodes_here": i32(2, 1, 1).bool()},
        ValueError,
        "2 decodes need a row each, there are 1",
    ),
    ({"num_decodes": 3}, ValueError, "num_decodes must be from 0 to 2"),
    ({"num_decodes": -1}, ValueError, "num_decodes must be from 0 to 2"),
    ({"decodes_here": i32(2, 1, 1)}, TypeError, "decodes_here must be torch.bool"),
    ({"decodes_here": i32(1, 1, 1).bool()}, ValueError, r"decodes_here must have shape \[2, 1, 1\]"),
    (
        {"decodes_here": i32(2, 1, 1).bool(), "shared_prefills": SharedPages((), i32(1))},
        ValueError,
        "shared_prefills are served where every decode has its row",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_METADATA)
def test_bad_metadata_are_refused_where_they_are_made(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    tensors = {"cu_seqlens_q": i32(3), "seq_lens": i32(2), "block_table": i32(2, 3)}
    good = PagedMetadata(
        **tensors, slot_mapping=torch.zeros(2, dtype=torch.int64), num_decodes=2, max_seqlen_q=1, max_seqlen_k=1
    )
    with pytest.raises(error, match=message):
        replace(good, **changes)
