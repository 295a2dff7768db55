"""flash_attn_with_kvcache over float8 caches: what is stored, what is computed, what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend import AttentionArgs, flash_attn_with_kvcache
from attention_backend.reference import rotary, standard

FP8 = torch.float8_e4m3fn
BATCH, CAPACITY, HEADS, DIM, NEW = 3, 48, 2, 16, 4


def problem() -> dict[str, Any]:
    torch.manual_seed(3)
    caches = [torch.randn(BATCH, CAPACITY, HEADS, DIM).to(FP8) for _ in range(2)]
    return {
        **dict(zip(("k_cache", "v_cache"), caches, strict=True)),
        **{"q": torch.randn(BATCH, NEW, 3 * HEADS, DIM), "cache_seqlens": torch.tensor([5, 0, 40], dtype=torch.int32)},
        **{n: torch.randn(BATCH, NEW, HEADS, DIM) * 2 for n in "kv"},
        **{f"{n}_scale": torch.tensor([0.013, 2.5]) for n in "kv"},  # with the first, some do not fit
        **{"causal": True},
    }


def tables() -> dict[str, Tensor]:
    angles = torch.arange(60).unsqueeze(1) / torch.tensor([1.0, 7.0, 20.0])
    return {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}


def paged(call: dict[str, Any]) -> dict[str, Any]:
    """The same caches as the engine's pages of 16, in reverse."""
    pages = {}
    for name in ("k_cache", "v_cache"):
        blocks = call[name].reshape(-1, 16, HEADS, DIM).flip(0).transpose(1, 2).contiguous()
        pages[name] = blocks.transpose(1, 2)
    table = torch.arange(BATCH * CAPACITY // 16 - 1, -1, -1, dtype=torch.int32).view(BATCH, -1)
    return {**call, **pages, "block_table": table}


def rows(cache: Tensor, table: Tensor | None) -> Tensor:
    """`[batch, slots, heads, dim]` in float32."""
    return (cache if table is None else cache.float()[table.long()].flatten(1, 2)).float()


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale[:, None]).clamp(-448, 448).to(FP8).float()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("in_pages", [False, True])
def test_new_keys_are_scaled_and_rounded_into_their_slots_and_seen(in_pages: bool, turned: bool) -> None:
    call = paged(problem()) if in_pages else problem()
    extra: dict[str, Any] = tables() if turned else {}
    table = call.get("block_table")
    want_k, want_v = rows(call["k_cache"], table).clone(), rows(call["v_cache"], table).clone()
    q, k = call["q"], call["k"]
    if turned:
        positions = (call["cache_seqlens"].unsqueeze(1) + torch.arange(NEW)).flatten()
        turns = (extra["rotary_cos"], extra["rotary_sin"], positions, True)
        q, k = (rotary.apply(x.flatten(0, 1), *turns).view(x.shape) for x in (q, k))
    for b, start in enumerate(call["cache_seqlens"].tolist()):
        want_k[b, start : start + NEW] = rounded(k[b], call["k_scale"])
        want_v[b, start : start + NEW] = rounded(call["v"][b], call["v_scale"])

    out = flash_attn_with_kvcache(**call, **extra)

    assert torch.equal(rows(call["k_cache"], table), want_k)
    assert torch.equal(rows(call["v_cache"], table), want_v)
    scaled = want_k * call["k_scale"][:, None], want_v * call["v_scale"][:, None]
    args = AttentionArgs(q, *scaled, DIM**-0.5, seqused_k=call["cache_seqlens"] + NEW, window_right=0)
    torch.testing.assert_close(torch.as_tensor(out).double(), standard.attention(args)[0], atol=5e-5, rtol=5e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_storing_and_attending_compile_as_one_graph(backend: str) -> None:
    def step(call: dict[str, Any]) -> Tensor:
        return torch.as_tensor(flash_attn_with_kvcache(**call, **tables()))

    plain, compiled = problem(), problem()
    assert torch.equal(torch.compile(step, fullgraph=True, backend=backend)(compiled), step(plain))
    assert torch.equal(compiled["k_cache"].float(), plain["k_cache"].float())


BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k_scale": None}, ValueError, "cache needs k_scale"),
    ({"v_scale": torch.ones(3)}, ValueError, r"v_scale must have shape \[2\]"),
    ({"k": torch.randn(BATCH, NEW, HEADS, DIM).half()}, TypeError, "k must have q's dtype"),
    ({"v": torch.randn(BATCH, NEW, HEADS, 32)}, ValueError, "v has head_dim 32, its cache 16"),
    ({n: torch.randn(BATCH, CAPACITY, HEADS, DIM).half() for n in ("k_cache", "v_cache")}, TypeError, "the caches"),
    ({"k": None, "v": None, "v_scale": None}, ValueError, "v_scale goes with torch.float8_e4m3fn"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CALLS)
def test_calls_that_do_not_fit_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**{**problem(), **changes})
