"""A layer between two attentions is Hugging Face's formulas, rounded where its modules round; wrong calls raise."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attention_backend import UnsupportedError, chain_operators, layers, paged_attention
from attention_backend.heuristics.layer_chain import chain_config
from attention_backend.layer_chain import (
    MOST_ROWS,
    ChainOptions,
    ChainWeights,
    NextAttention,
    OwnAttention,
    layer_chain,
    layer_chain_to_pages,
    refuses,
)
from attention_backend.metadata import KVPages, PagedMetadata

WIDTH, ATTENDED, GATED, NEXT = 48, 32, 72, 40
OPTIONS = ChainOptions("silu", 1e-5, 1e-6)
NO_ATTENTION = (None, None, None, None, 0.0)  # in front, as the operators have it


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) / shape[-1] ** 0.5


def made(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> ChainWeights:
    weights = (randn(WIDTH, ATTENDED), randn(WIDTH), randn(2 * GATED, WIDTH), randn(WIDTH, GATED), randn(WIDTH, seed=1))
    last = (randn(NEXT, WIDTH), randn(NEXT) if bias else None)
    return ChainWeights(*(x if x is None else x.to(dtype) for x in (*weights, *last)))  # type: ignore[arg-type]


def norm(weight: Tensor, eps: float) -> LlamaRMSNorm:
    module = LlamaRMSNorm(WIDTH, eps).requires_grad_(False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_modules_one_after_another(dtype: torch.dtype, bias: bool) -> None:
    weights = made(dtype, bias=bias)
    attended, residual = randn(3, ATTENDED).to(dtype), randn(3, WIDTH).to(dtype)
    total = residual + attended @ weights.out.T
    gate, up = (norm(weights.norm_mlp, 1e-5)(total) @ weights.gate_up.T).chunk(2, dim=1)
    total = total + (nn.functional.silu(gate) * up) @ weights.down.T
    expected = nn.functional.linear(norm(weights.norm_next, 1e-6)(total), weights.next, weights.next_bias)
    ours = layer_chain(attended, residual, weights, OPTIONS)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(ours[0], total, **tolerance)
    torch.testing.assert_close(ours[1], expected, **tolerance)


def test_torch_knows_its_results_without_running_it() -> None:
    weights = made(bias=True)
    call = (randn(2, ATTENDED), randn(2, WIDTH), weights.out, weights.norm_mlp, weights.gate_up, weights.down,
            weights.norm_next, weights.next, weights.next_bias, "silu", 1e-5, 1e-5, False,
            *NO_ATTENTION)  # fmt: skip
    torch.library.opcheck(chain_operators.layer_chain_op.overload, call)


@pytest.mark.parametrize("name", ["out", "norm_mlp", "gate_up", "down", "norm_next", "next", "next_bias"])
def test_a_weight_that_does_not_fit_is_named(name: str) -> None:
    weights = made(bias=True)
    for wrong in (getattr(weights, name)[:-1], getattr(weights, name).double()):
        with pytest.raises(ValueError, match="must be torch"):
            layer_chain(randn(2, ATTENDED), randn(2, WIDTH), replace(weights, **{name: wrong}), OPTIONS)


def test_more_rows_than_it_takes_and_unknown_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=f"1 to {MOST_ROWS} rows"):
        layer_chain(randn(MOST_ROWS + 1, ATTENDED), randn(MOST_ROWS + 1, WIDTH), made(), OPTIONS)
    with pytest.raises(ValueError, match="'relu' is not one of"):
        layer_chain(randn(1, ATTENDED), randn(1, WIDTH), made(), replace(OPTIONS, activation="relu"))


HEADS, KV_HEADS, HEAD_DIM = 3, 1, 8  # of NEXT


def next_attention(dtype: torch.dtype = torch.float32, *, fp8: bool = False, rows: int = 3) -> NextAttention:
    cache = randn(4, KV_HEADS, 16, HEAD_DIM).to(torch.float8_e4m3fn if fp8 else dtype)
    scales = (torch.tensor([0.5]), torch.tensor([0.25])) if fp8 else (None, None)
    angles = randn(rows, HEAD_DIM // 2)
    slots = torch.tensor([33, -1, 7])[:rows]
    return NextAttention(HEADS, KVPages(cache.clone(), cache.flip(0), *scales), slots, angles.cos(), angles.sin())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_pages_are_those_of_two_calls(dtype: torch.dtype, fp8: bool) -> None:
    weights, (attended, residual) = made(dtype, bias=True), (randn(3, ATTENDED).to(dtype), randn(3, WIDTH).to(dtype))
    ours, theirs = next_attention(dtype, fp8=fp8), next_attention(dtype, fp8=fp8)
    total, queries = layer_chain_to_pages(attended, residual, weights, OPTIONS, ours)
    expected, products = layer_chain(attended, residual, weights, OPTIONS)
    q, k, v = products.unflatten(1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    pages = theirs.pages
    before = pages.k.clone()
    turned = layers.rotary_store(
        q, k, v, pages.k, pages.v, theirs.slot_mapping, theirs.cos, theirs.sin,
        k_scale=pages.k_scale, v_scale=pages.v_scale,
    )  # fmt: skip
    assert torch.equal(total, expected)
    assert torch.equal(queries, turned)
    assert not torch.equal(pages.k.float(), before.float())
    for mine, other in zip(ours.pages, pages, strict=True):
        assert torch.equal(mine.float(), other.float())


def test_torch_knows_what_is_stored_without_running_it() -> None:
    weights, following = made(bias=True), next_attention(rows=2)
    call = (randn(2, ATTENDED), randn(2, WIDTH), weights.out, weights.norm_mlp, weights.gate_up, weights.down,
            weights.norm_next, weights.next, weights.next_bias, "silu", 1e-5, 1e-5, False, *NO_ATTENTION, HEADS,
            *following.pages, following.slot_mapping, following.cos, following.sin, None, None)  # fmt: skip
    torch.library.opcheck(chain_operators.layer_chain_to_pages_op.overload, call)


def own_attention(dtype: torch.dtype = torch.float32) -> OwnAttention:
    """Of three rows with 4 heads of 8: ATTENDED."""
    pages = KVPages(*(randn(8, 2, 16, 8, seed=seed).to(dtype) for seed in (1, 2)))
    table, lens = (
        torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
        torch.tensor([20, 1, 32], dtype=torch.int32),
    )
    return OwnAttention(pages, table, lens, 0.3)


def by_itself(queries: Tensor, own: OwnAttention) -> Tensor:
    ends = torch.arange(4, dtype=torch.int32)
    step = PagedMetadata(ends, own.seq_lens, own.block_table, torch.full((3,), -1), 3, 1, 32)
    return paged_attention(queries, None, None, *own.pages, step, softmax_scale=own.softmax_scale).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_the_attention_in_front_it_is_both_one_after_the_other(dtype: torch.dtype) -> None:
    weights, queries, residual = made(dtype), randn(3, 4, 8).to(dtype), randn(3, WIDTH).to(dtype)
    own = own_attention(dtype)
    attended = by_itself(queries, own)
    expected = layer_chain(attended, residual, weights, OPTIONS)
    for mine, other in zip(layer_chain(queries, residual, weights, OPTIONS, own=own), expected, strict=True):
        assert torch.equal(mine, other)
    ours, theirs = next_attention(dtype), next_attention(dtype)
    total, turned = layer_chain_to_pages(queries, residual, weights, OPTIONS, ours, own=own)
    expected = layer_chain_to_pages(attended, residual, weights, OPTIONS, theirs)
    assert torch.equal(total, expected[0])
    assert torch.equal(turned, expected[1])
    assert torch.equal(ours.pages.k, theirs.pages.k)


def test_torch_knows_it_with_the_attention_in_front() -> None:
    weights, own = made(), own_attention()
    call = (randn(3, 4, 8), randn(3, WIDTH), weights.out, weights.norm_mlp, weights.gate_up, weights.down,
            weights.norm_next, weights.next, weights.next_bias, "silu", 1e-5, 1e-5, False, *own.pages, own.block_table,
            own.seq_lens, own.softmax_scale)  # fmt: skip
    torch.library.opcheck(chain_operators.layer_chain_op.overload, call)


def test_an_attention_in_front_that_does_not_fit_is_refused() -> None:
    queries, residual, own = randn(3, 4, 8), randn(3, WIDTH), own_attention()
    narrow = KVPages(own.pages.k[..., :4], own.pages.v)
    three = KVPages(*(x[:, :1].expand(-1, 3, -1, -1) for x in own.pages))
    wrong: tuple[tuple[OwnAttention, str], ...] = (
        (replace(own, pages=narrow), "k_cache must have shape"),
        (replace(own, pages=KVPages(own.pages.k, own.pages.v[:4])), "v_cache must have shape"),
        (replace(own, pages=three), "no multiple of 3 key heads"),
        (replace(own, block_table=own.block_table[:2]), "block_table must have shape"),
        (replace(own, block_table=own.block_table[:, :0]), "block_table must have columns"),
        (replace(own, seq_lens=own.seq_lens[:2]), "seq_lens must have shape"),
        (replace(own, softmax_scale=float("nan")), "softmax_scale must be from"),
    )
    for attention, message in wrong:
        with pytest.raises(ValueError, match=message):
            layer_chain(queries, residual, made(), OPTIONS, own=attention)
    with pytest.raises(ValueError, match=r"queries must be \[rows, heads, head_dim\]"):
        layer_chain(queries.flatten(1), residual, made(), OPTIONS, own=own)
    for other in (own_attention(torch.float16), replace(own, seq_lens=own.seq_lens.long())):
        with pytest.raises(TypeError, match="must be torch"):
            layer_chain(queries, residual, made(), OPTIONS, own=other)
    pages = KVPages(own.pages.k.clone().requires_grad_(), own.pages.v)
    with pytest.raises(UnsupportedError, match="layer_chain has no gradient"):
        layer_chain(queries, residual, made(), OPTIONS, own=replace(own, pages=pages))


def test_an_attention_that_does_not_fit_is_refused_and_nothing_stored() -> None:
    x, weights, fits = (randn(3, ATTENDED), randn(3, WIDTH)), made(), next_attention()
    before = fits.pages.k.clone()
    wrong = (
        (replace(fits, num_heads=2), "next must have 2"),
        (replace(fits, slot_mapping=fits.slot_mapping[:2]), "slot_mapping must be int64"),
        (replace(fits, cos=fits.cos[:, :1]), "cos and sin must be"),
        (replace(fits, pages=KVPages(fits.pages.k[0], fits.pages.v)), "k_cache must be"),
        (replace(fits, pages=KVPages(fits.pages.k, fits.pages.v[:, :, :8])), "caches"),
    )
    for attention, message in wrong:
        with pytest.raises(ValueError, match=message):
            layer_chain_to_pages(*x, weights, OPTIONS, attention)
    with pytest.raises(TypeError, match="the caches are"):
        layer_chain_to_pages(*x, weights, OPTIONS, next_attention(torch.float16))
    with pytest.raises(UnsupportedError, match="layer_chain_to_pages has no gradient"):
        layer_chain_to_pages(x[0], x[1].clone().requires_grad_(), weights, OPTIONS, fits)
    assert torch.equal(fits.pages.k, before)


def test_it_has_no_gradient() -> None:
    with pytest.raises(UnsupportedError, match="layer_chain has no gradient"):
        layer_chain(randn(1, ATTENDED), randn(1, WIDTH).requires_grad_(), made(), OPTIONS)


def test_a_cpu_has_no_kernel_for_it() -> None:
    reason = refuses(torch.device("cpu"), torch.bfloat16, attended_width=ATTENDED, width=WIDTH, gated_width=GATED)
    assert reason == "it is a kernel for Hopper GPUs"


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize(("width", "widest"), [(64, 96), (2048, 8192), (4096, 14336), (5120, 13824), (3072, 24576)])
def test_a_block_has_room_for_its_rows_and_a_ring(rows: int, width: int, widest: int) -> None:
    config = chain_config(rows, width, widest)
    if config is None:
        assert rows * widest * 2 > 150_000
        return
    assert config.stages % config.num_warps == 0, "warps could mistake one filling of the ring for the next"
    assert config.stages <= 64, "the kernel has so many barriers"
    assert 0 < config.in_flight <= config.stages
    assert config.smem_bytes(rows, width, widest) > rows * widest * 2 + config.stages * config.tile_bytes
    assert config.smem_bytes(rows, width, widest) + config.static_bytes <= 227 * 1024
