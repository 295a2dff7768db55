"""FlashAttention's functions as its users call them, held to torch SDPA with the mask spelt out.

And to flash_attn itself where that is installed. Gradients come from whatever backward serves the device.
"""

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from .error_rule import assert_out_close
from .problems import block_table, generator, randn
from .public import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[batch, seqlen, heads, dim]` in and out; visible bool `[seqlen_q, seqlen_k]`. Rows that see nothing are 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    if visible is not None:
        out = torch.where(visible.any(-1, keepdim=True), out, 0.0)
    return out.transpose(1, 2)


def bottom_right(sq: int, sk: int, device: torch.device, left: int = -1, right: int = 0) -> Tensor:
    p, j = torch.arange(sq, device=device)[:, None] + sk - sq, torch.arange(sk, device=device)[None]
    visible = j <= p + right if right >= 0 else torch.ones_like(p + j, dtype=torch.bool)
    return visible & (j >= p - left) if left >= 0 else visible


def assert_like_sdpa(out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> None:
    assert_out_close(out, sdpa(q, k, v, visible, torch.float64), sdpa(q, k, v, visible, q.dtype))


def qkv(sq: int, sk: int, device: torch.device, heads: tuple[int, int] = (6, 2), dim: int = 64) -> list[Tensor]:
    g = generator(("api", sq, sk, heads, dim), device)
    return [randn((2, s, h, dim), BF16, g) for s, h in ((sq, heads[0]), (sk, heads[1]), (sk, heads[1]))]


def check_func(sq: int, sk: int, causal: bool, window: tuple[int, int], dim: int, device: torch.device) -> None:
    q, k, v = qkv(sq, sk, device, dim=dim)
    right = 0 if causal else window[1]
    out = flash_attn_func(q, k, v, causal=causal, window_size=window)
    assert_like_sdpa(out, q, k, v, bottom_right(sq, sk, device, window[0], right))


def check_results(device: torch.device) -> None:
    """Positional arguments in FlashAttention's order, and what return_attn_probs adds."""
    q, k, v = qkv(33, 33, device)
    want = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True)
    assert torch.equal(flash_attn_func(q, k, v, 0.0, 0.3, True), want)
    out, lse, *_ = flash_attn_func(q, k, v, 0.0, 0.3, True, return_attn_probs=True)
    assert torch.equal(out, want)
    assert lse.shape == (2, 6, 33)
    assert lse.dtype == torch.float32
    scores = (q.float().transpose(1, 2) @ k.float().repeat_interleave(3, 2).permute(0, 2, 3, 1)) * 0.3
    scores = scores.masked_fill(~bottom_right(33, 33, device), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-3, rtol=1e-4)


def check_varlen(lens: list[tuple[int, int]], device: torch.device) -> None:
    parts = [[x[0] for x in qkv(sq, sk, device)] for sq, sk in lens]
    q, k, v = (torch.cat([p[i] for p in parts]) for i in range(3))
    cu_q, cu_k = (
        torch.tensor([0, *(n[i] for n in lens)]).cumsum(0).to(device=device, dtype=torch.int32) for i in range(2)
    )
    longest = [max(n[i] for n in lens) for i in range(2)]
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, causal=True)
    for part, rows in zip(parts, out.split([sq for sq, _ in lens]), strict=True):
        if part[0].shape[0]:
            visible = bottom_right(part[0].shape[0], part[1].shape[0], device)
            assert_like_sdpa(rows[None], part[0][None], part[1][None], part[2][None], visible)


def check_gradients(sq: int, sk: int, device: torch.device) -> None:
    inputs = [x.detach().requires_grad_() for x in qkv(sq, sk, device)]
    grad_out = randn((2, sq, 6, 64), BF16, generator("grad", device))
    grads = torch.autograd.grad(flash_attn_func(*inputs, causal=True), inputs, grad_out)
    visible = bottom_right(sq, sk, device)

    def reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
        return torch.autograd.grad(sdpa(q, k, v, visible, dtype), (q, k, v), grad_out.to(dtype))

    for ours, truth, same in zip(grads, reference(torch.float64), reference(BF16), strict=True):
        assert ours.dtype == BF16
        assert_out_close(ours, truth, same, rtol=3.0)


@dataclass(frozen=True)
class CacheCase:
    """One call of flash_attn_with_kvcache on two sequences of a cache for four."""

    sq: int = 1
    new: int = 1
    page: int = 0
    causal: bool = True
    rotary_dim: int = 0
    interleaved: bool = True
    splits: int = 0
    window: int = -1

    def __str__(self) -> str:
        rotary = f"rotary{self.rotary_dim}{'interleaved' if self.interleaved else 'halves'}" if self.rotary_dim else ""
        mask = f"{'causal' if self.causal else 'full'}{self.window if self.window >= 0 else ''}"
        return f"q{self.sq}-new{self.new}-page{self.page}-{mask}-{rotary}-splits{self.splits}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x `[batch, seqlen, heads, dim]` at positions `[batch, seqlen]`, in float32, rounded once."""
    half = cos.shape[1]
    c, s = (t.float()[positions][:, :, None] for t in (cos, sin))
    turned = x[..., : 2 * half].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def check_kvcache(case: CacheCase, device: torch.device) -> None:
    g = generator(case, device)
    batch, slots, heads, kv_heads, dim, lens = 2, 192, 8, 2, 64, [100, 17]
    q, k, v = (randn((batch, n, h, dim), BF16, g) for n, h in ((case.sq, heads), (case.new, kv_heads), (case.new, 2)))
    k_cache, v_cache = (randn((batch, slots, kv_heads, dim), BF16, g) for _ in range(2))
    seqlens = torch.tensor(lens, dtype=torch.int32, device=device)
    options: dict[str, object] = {"causal": case.causal, "num_splits": case.splits, "window_size": (case.window, -1)}
    if case.window >= 0:
        options["window_size"] = (case.window, 0)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    want_q, new_k = q, k
    if case.rotary_dim:
        angles = torch.rand((slots, case.rotary_dim // 2), device=device, generator=g) * 6
        cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": case.interleaved}
        at = seqlens[:, None] + torch.arange(max(case.sq, case.new), device=device)
        q_at = at[:, : case.sq] if case.causal or case.window >= 0 else seqlens[:, None].expand(-1, case.sq)
        want_q, new_k = (
            rotate(q, cos, sin, q_at, case.interleaved),
            rotate(k, cos, sin, at[:, : case.new], case.interleaved),
        )
    for b, n in enumerate(lens):
        want_k[b, n : n + case.new], want_v[b, n : n + case.new] = new_k[b], v[b]

    caches = [k_cache, v_cache]
    if case.page:
        blocks = slots // case.page
        table = block_table([slots] * batch, case.page, batch * blocks + 3, generator(case, CPU)).to(device)
        pools = [
            torch.full((batch * blocks + 3, case.page, kv_heads, dim), torch.nan, device=device).to(BF16)
            for _ in caches
        ]
        for pool, cache in zip(pools, caches, strict=True):
            pool[table.flatten().long()] = cache.view(batch * blocks, case.page, kv_heads, dim)
        options["block_table"], caches = table, pools
    new = {"k": k, "v": v} if case.new else {}
    out, lse = flash_attn_with_kvcache(q, *caches, **new, cache_seqlens=seqlens, return_softmax_lse=True, **options)

    if case.page:
        caches = [pool[table.long()].flatten(1, 2) for pool in caches]
    torch.testing.assert_close(caches[0], want_k, atol=0.03 if case.rotary_dim else 0.0, rtol=0.0)
    assert torch.equal(caches[1], want_v)
    assert lse.shape == (batch, heads, case.sq)
    for b, n in enumerate(lens):
        total = n + case.new
        right = 0 if case.causal or case.window >= 0 else -1
        visible = bottom_right(case.sq, total, device, case.window, right)
        assert_like_sdpa(
            out[b : b + 1], want_q[b : b + 1], caches[0][b : b + 1, :total], want_v[b : b + 1, :total], visible
        )


CACHE_CASES = (
    CacheCase(),
    CacheCase(new=0),
    CacheCase(sq=5, new=5),
    CacheCase(sq=40, new=40, page=64),
    CacheCase(page=16),
    CacheCase(sq=3, new=7, page=48),
    CacheCase(page=64, splits=3),
    CacheCase(sq=4, new=0, page=64, causal=False),
    CacheCase(sq=2, new=2, window=20),
    CacheCase(rotary_dim=64),
    CacheCase(rotary_dim=64, interleaved=False, page=64),
    CacheCase(sq=9, new=9, rotary_dim=32, interleaved=False),
    CacheCase(sq=3, new=3, rotary_dim=32, causal=False, page=16),
)
FUNC_CASES = [(64, 64, True, (-1, -1)), (37, 91, True, (-1, -1)), (91, 37, True, (-1, -1)), (50, 80, False, (-1, -1)),
              (50, 80, False, (9, 3)), (80, 80, True, (16, 0))]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("sq", "sk", "causal", "window"), [*FUNC_CASES, (1000, 1300, True, (-1, -1))])
def test_func_agrees_with_sdpa(
    sq: int, sk: int, causal: bool, window: tuple[int, int], dim: int, device: torch.device
) -> None:
    check_func(sq, sk, causal, window, dim, device)


@pytest.mark.gpu
def test_func_returns_lse_and_takes_positional_arguments(device: torch.device) -> None:
    check_results(device)


@pytest.mark.gpu
def test_varlen_agrees_with_sdpa_of_each_sequence(device: torch.device) -> None:
    check_varlen([(100, 100), (0, 30), (1, 500), (257, 300), (64, 64)], device)


@pytest.mark.gpu
@pytest.mark.parametrize(("sq", "sk"), [(128, 128), (100, 230)])
def test_gradients_agree_with_sdpa(sq: int, sk: int, device: torch.device) -> None:
    check_gradients(sq, sk, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CACHE_CASES, ids=str)
def test_kvcache_updates_the_cache_and_agrees_with_sdpa(case: CacheCase, device: torch.device) -> None:
    check_kvcache(case, device)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash_attn is not installed")
@pytest.mark.parametrize(("sq", "sk", "causal", "window"), FUNC_CASES)
def test_func_agrees_with_flash_attn_itself(
    sq: int, sk: int, causal: bool, window: tuple[int, int], cuda: torch.device
) -> None:
    import flash_attn

    q, k, v = qkv(sq, sk, cuda)
    options = {"causal": causal, "window_size": window, "softcap": 15.0, "return_attn_probs": True}
    theirs, their_lse, _ = flash_attn.flash_attn_func(q, k, v, **options)
    ours, our_lse, *_ = flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(our_lse, their_lse, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("sq", "sk", "causal", "window"), FUNC_CASES)
def test_func_agrees_with_sdpa_on_cpu(sq: int, sk: int, causal: bool, window: tuple[int, int]) -> None:
    check_func(sq, sk, causal, window, 64, CPU)


def test_func_returns_lse_and_takes_positional_arguments_on_cpu() -> None:
    check_results(CPU)


def test_varlen_agrees_with_sdpa_of_each_sequence_on_cpu() -> None:
    check_varlen([(10, 10), (0, 3), (1, 50), (25, 30)], CPU)


def test_gradients_agree_with_sdpa_on_cpu() -> None:
    check_gradients(20, 33, CPU)


@pytest.mark.parametrize("case", CACHE_CASES, ids=str)
def test_kvcache_updates_the_cache_and_agrees_with_sdpa_on_cpu(case: CacheCase) -> None:
    check_kvcache(case, CPU)
