"""The CPU path against standard attention in float64: every option, every layout, forward and backward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problems import dense, grid, paged, poisoned, varlen
from torch import Tensor

from attention_backend.problem import AttentionArgs
from attention_backend.reference import cpu, standard

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
#: In two bytes torch's fused kernel takes a cheaper exponential.
LSE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-4, torch.float16: 2e-4}


def assert_matches_standard(args: AttentionArgs) -> None:
    out, lse = cpu.forward(args)
    truth, truth_lse = standard.attention(args)
    tolerance = TOLERANCE[args.dtype]
    assert out.dtype == args.dtype
    assert out.shape == args.out_shape
    assert lse.shape == args.lse_shape
    torch.testing.assert_close(out.double(), truth, atol=tolerance, rtol=tolerance)
    lse_tolerance = LSE_TOLERANCE[args.dtype]
    torch.testing.assert_close(lse.double(), truth_lse, atol=lse_tolerance, rtol=lse_tolerance)


def gradients_by_autograd(args: AttentionArgs, grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    leaves = {n: getattr(args, n).detach().requires_grad_() for n in DIFFERENTIABLE if getattr(args, n) is not None}
    changed: dict[str, Any] = dict(leaves)
    out, lse = standard.attention(replace(args, **changed))
    seen = lse != -torch.inf
    loss = (out * grad_out).sum() + (lse[seen] * grad_lse[seen]).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_gradients_match(args: AttentionArgs) -> None:
    out, lse = cpu.forward(args)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    ours = cpu.backward(args, out, lse, grad_out, grad_lse)
    for name, truth in gradients_by_autograd(args, grad_out, grad_lse).items():
        gradient = getattr(ours, f"d{name}")
        assert gradient.dtype == getattr(args, name).dtype
        torch.testing.assert_close(gradient, truth, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("args", grid(torch.float32))
def test_forward_is_standard_attention(args: AttentionArgs) -> None:
    assert_matches_standard(args)


@pytest.mark.parametrize("args", grid(torch.float64))
def test_backward_is_autograd_through_standard_attention(args: AttentionArgs) -> None:
    assert_gradients_match(args)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", [dense, varlen, paged])
def test_every_dtype(make: Any, dtype: torch.dtype) -> None:
    assert_matches_standard(replace(make(dtype), window_right=0))


@pytest.mark.parametrize("args", grid(torch.float32))
def test_unused_slots_never_reach_the_output(args: AttentionArgs) -> None:
    zero, nan, inf = (poisoned(args, value) for value in (0.0, float("nan"), float("inf")))
    out, lse = cpu.forward(zero)
    for bad in (nan, inf):
        bad_out, bad_lse = cpu.forward(bad)
        assert torch.equal(out, bad_out)
        assert torch.equal(lse, bad_lse)


@pytest.mark.parametrize("args", grid(torch.float64))
def test_unused_slots_never_reach_the_gradients(args: AttentionArgs) -> None:
    zero, nan = poisoned(args, 0.0), poisoned(args, float("nan"))
    out, lse = cpu.forward(zero)
    grad_out = torch.randn_like(out)
    clean, bad = cpu.backward(zero, out, lse, grad_out), cpu.backward(nan, out, lse, grad_out)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name), getattr(bad, name)), name


def test_a_row_that_sees_nothing_is_zero_with_or_without_a_sink() -> None:
    args = replace(dense(torch.float32), seqused_k=torch.zeros(3, dtype=torch.int32))
    for problem in (args, replace(args, sinks=torch.randn(args.num_heads))):
        out, lse = cpu.forward(problem)
        assert torch.equal(out, torch.zeros_like(out))
        assert bool((lse == -torch.inf).all())


def test_a_bias_of_minus_infinity_is_a_mask() -> None:
    args = dense(torch.float64)
    hidden = torch.rand(3, 1, args.q.shape[1], args.k.shape[1]) < 0.5
    hidden[0, 0, 3] = True  # a row that sees nothing
    problem = replace(args, bias=torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf))
    assert_matches_standard(problem)
    assert bool((cpu.forward(problem)[1][0, :, 3] == -torch.inf).all())


def test_decodes_of_very_different_lengths() -> None:
    args = paged(torch.float32, lengths=(1, 700, 5, 1500, 512, 513, 0, 90), new=(1,) * 8)
    decodes = replace(args, q=args.q.unsqueeze(1), cu_seqlens_q=None, max_seqlen_q=0)
    assert_matches_standard(decodes)
    assert_matches_standard(args)


def test_a_decode_gives_the_same_bits_alone_and_in_a_batch_of_equals() -> None:
    args = paged(torch.float32, lengths=(300,) * 8, new=(1,) * 8)
    decodes = replace(args, q=args.q.unsqueeze(1), cu_seqlens_q=None, max_seqlen_q=0)
    assert decodes.seqused_k is not None
    assert decodes.block_table is not None
    out, _ = cpu.forward(decodes)
    alone = replace(decodes, q=decodes.q[:1], seqused_k=decodes.seqused_k[:1], block_table=decodes.block_table[:1])
    torch.testing.assert_close(cpu.forward(alone)[0], out[:1], atol=1e-6, rtol=1e-6)


def test_lengths_beyond_the_keys_end_with_the_keys() -> None:
    options: dict[str, Any] = {"window_left": 9, "window_right": 0, "alibi_slopes": torch.rand(4)}
    args = replace(dense(torch.float64), **options)
    pages = replace(args, k=args.k.reshape(15, 13, 2, 16), v=args.v.reshape(15, 13, 2, 16), max_seqlen_k=65)
    pages = replace(pages, block_table=torch.arange(15, dtype=torch.int32).view(3, 5))
    decodes = replace(pages, q=args.q[:, :1], alibi_slopes=None)
    within, beyond = (torch.tensor([end, 20, 0], dtype=torch.int32) for end in (65, 70))
    for problem in (args, pages, decodes):
        assert_matches_standard(replace(problem, seqused_k=beyond))
        for implementation in (cpu.forward, standard.attention):
            wants = implementation(replace(problem, seqused_k=within))
            for ours, want in zip(implementation(replace(problem, seqused_k=beyond)), wants, strict=True):
                assert torch.equal(ours, want)


def test_the_engines_transposed_pool_and_a_plain_cache_agree() -> None:
    args = paged(torch.float32)
    plain = replace(args, k=args.k.contiguous(), v=args.v.contiguous())
    assert not args.k.is_contiguous()
    assert torch.equal(cpu.forward(args)[0], cpu.forward(plain)[0])


def test_many_key_blocks_and_row_tiles() -> None:
    args = dense(torch.float64, batch=1, seqlen_q=130, seqlen_k=9001)
    assert_matches_standard(replace(args, window_right=0, sinks=torch.randn(args.num_heads, dtype=torch.float64)))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    args = replace(dense(torch.float32), softmax_scale=200.0)
    out, lse = cpu.forward(args)
    truth, truth_lse = standard.attention(args)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-2, rtol=1e-5)
    torch.testing.assert_close(out.double(), truth, atol=1e-2, rtol=1e-2)
