"""What torch's fused kernel computes for the CPU's attention, against standard attention in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problems import dense, paged, varlen
from torch import Tensor

from attention_backend import dispatch, paged_attention
from attention_backend.metadata import PagedMetadata
from attention_backend.problem import AttentionArgs
from attention_backend.reference import cpu, decode, fused, kv_cache, standard

BLOCK, HEADS, KV_HEADS, DIM = 16, 6, 2, 32


def pages(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Caches whose unused slots hold NaN, and a block table in random order."""
    torch.manual_seed(0)
    counts = [-(-length // BLOCK) for length in lengths]
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    order = iter((torch.randperm(sum(counts)) + 1).tolist())
    k, v = (torch.full((sum(counts) + 1, KV_HEADS, BLOCK, DIM), torch.nan, dtype=dtype) for _ in range(2))
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count] = torch.tensor([next(order) for _ in range(count)])
        slots = (table[b].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
        kv_cache.store(*(torch.randn(length, KV_HEADS, DIM, dtype=dtype) for _ in range(2)), k, v, slots)
    return k, v, table


def step(lengths: list[int], table: Tensor) -> PagedMetadata:
    num_seqs = len(lengths)
    return PagedMetadata(
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((num_seqs,), -1),
        num_decodes=num_seqs,
        max_seqlen_q=1,
        max_seqlen_k=max(lengths),
    )


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The keys of every call of torch's kernel."""
    calls: list[Tensor] = []
    kernel = fused.attention
    monkeypatch.setattr(
        fused, "attention", lambda q, k, *rest, **options: calls.append(k) or kernel(q, k, *rest, **options)
    )
    return calls


@pytest.mark.parametrize("window_right", [-1, 0])
@pytest.mark.parametrize("make", [dense, varlen, paged])
def test_plain_problems_are_put_together_from_blocks_of_any_size(
    make: Any, window_right: int, monkeypatch: pytest.MonkeyPatch, kernel_calls: list[Tensor]
) -> None:
    args = make(torch.float32)
    args = replace(args, v=torch.randn_like(args.k), window_right=window_right, sinks=torch.randn(args.num_heads))
    truth = standard.attention(args)
    counts = []
    for most in (1, 1 << 12, 1 << 22):
        monkeypatch.setattr(fused, "_MAX_COPIED", most)
        kernel_calls.clear()
        out, lse = cpu.forward(args)
        torch.testing.assert_close(out.double(), truth[0], atol=5e-6, rtol=5e-6)
        torch.testing.assert_close(lse.double(), truth[1], atol=1e-5, rtol=1e-5)
        counts.append(len(kernel_calls))
    assert counts[2] > 0
    assert (counts[0] > counts[2]) == (make is paged), "what is not copied is not cut"


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("window_right", [-1, 0])
@pytest.mark.parametrize("make", [dense, varlen, paged])
def test_scores_may_be_scaled_by_anything(make: Any, window_right: int, scale: float) -> None:
    args = replace(make(torch.float32), window_right=window_right, softmax_scale=scale)
    args = replace(args, v=torch.randn_like(args.k))
    for ours, truth in zip(cpu.forward(args), standard.attention(args), strict=True):
        torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=1e-5)


def test_rows_of_queries_may_overlap() -> None:
    args = dense(torch.float32)
    rows = torch.randn(args.q.numel()).as_strided(args.q.shape, (args.q.stride(0), 7, args.q.stride(2), 1))
    args = replace(args, q=rows, v=torch.randn_like(args.k), window_right=0)
    torch.testing.assert_close(cpu.forward(args)[0].double(), standard.attention(args)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"softcap": 5.0}, {"window_left": 3}, {"chunk_size": 8}, {"key_mask": torch.ones(3, 99, dtype=torch.bool)}],
)
def test_other_problems_are_not(changes: dict[str, Any], kernel_calls: list[Tensor]) -> None:
    args = dense(torch.float32)
    if "key_mask" in changes:
        changes = {"key_mask": torch.ones(args.batch, args.k.shape[1], dtype=torch.bool)}
    cpu.forward(replace(args, window_right=0, **changes))
    assert kernel_calls == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("lengths", [[50], [50, 50], [1, 50, 33], [3, 700, 16, 900]])
def test_a_step_of_decodes_equals_the_general_way(
    lengths: list[int], clean: bool, window: int, sinks: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v, table = pages(lengths, dtype)
    cleaned = torch.nan_to_num(k), torch.nan_to_num(v)
    q = torch.randn(len(lengths), HEADS, DIM, dtype=dtype)
    options: dict[str, Any] = {"softmax_scale": 0.2, "window_left": window}
    options["sinks"] = torch.randn(HEADS) if sinks else None
    general = paged_attention(q, None, None, *cleaned, step(lengths, table), **options)
    served: list[bool] = []
    of_step = decode.of_step

    def watched(*args: Any) -> Tensor | None:
        out = of_step(*args)
        served.append(out is not None)
        return out

    monkeypatch.setattr(decode, "of_step", watched)
    metadata, before = step(lengths, table), dispatch.calls().get("cpu_reference", 0)
    with torch.inference_mode():
        for _ in range(2):
            ours = paged_attention(q, None, None, *(cleaned if clean else (k, v)), metadata, **options)
            assert len(metadata.plans) == 1, "a second layer looks at the step again"
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, general, atol=tolerance, rtol=tolerance)
    assert dispatch.calls()["cpu_reference"] == before + 2
    if clean or len(set(lengths)) == 1:  # others are padded to one another, and would see the NaN of unused slots
        assert all(served)
    else:
        assert not any(served)


def test_another_step_looks_again() -> None:
    k, v, table = pages([50])
    q = torch.randn(1, HEADS, DIM)
    long = step([50], table)
    with torch.inference_mode():
        before = paged_attention(q, None, None, k, v, long, softmax_scale=0.2)
        short = replace(long, seq_lens=torch.tensor([9], dtype=torch.int32))
        after = paged_attention(q, None, None, k, v, short, softmax_scale=0.2)
        assert torch.equal(after, paged_attention(q, None, None, k, v, step([9], table), softmax_scale=0.2))
    assert not torch.equal(after, before)


def test_a_sequence_without_keys_gives_zeros() -> None:
    k, v, table = pages([5, 9])
    q = torch.randn(2, HEADS, DIM)
    with torch.inference_mode():
        out = paged_attention(q, None, None, k, v, step([5, 0], table), softmax_scale=0.2)
    assert torch.equal(out[1], torch.zeros(HEADS, DIM))
    assert out[0].isfinite().all()


def test_gradients_are_taken_from_its_results() -> None:
    args = AttentionArgs(
        torch.randn(1, 7, 4, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16), 0.3, window_right=0
    )
    out, lse = cpu.forward(args)
    ours = cpu.backward(args, out, lse, torch.ones_like(out))
    leaves = [x.double().requires_grad_() for x in (args.q, args.k, args.v)]
    standard.attention(AttentionArgs(*leaves, 0.3, window_right=0))[0].sum().backward()
    for gradient, leaf in zip((ours.dq, ours.dk, ours.dv), leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(gradient.double(), leaf.grad, atol=1e-5, rtol=1e-5)
