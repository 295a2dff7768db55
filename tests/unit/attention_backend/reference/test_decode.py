"""The CPU's decode path against the tiled one, which takes the same rows as varlen queries."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs
from attention_backend.reference import cpu, decode, kv_cache
from attention_backend.reference.contents import ByContents

BLOCK_SIZE, HEADS, KV_HEADS, DIM, DIM_V = 16, 6, 2, 32, 24


def problem(lengths: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> AttentionArgs:
    """Pages in random order; the block table's unused entries name no page of the pool."""
    torch.manual_seed(0)
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    num_blocks = sum(counts) + 1
    table = torch.full((len(lengths), max(counts) + 1), 10**6, dtype=torch.int32)
    order = iter((torch.randperm(num_blocks - 1) + 1).tolist())
    for b, count in enumerate(counts):
        table[b, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    k, v = (torch.randn(num_blocks, KV_HEADS, BLOCK_SIZE, dim, dtype=dtype) for dim in (DIM, DIM_V))
    return AttentionArgs(
        torch.randn(len(lengths), 1, HEADS, DIM, dtype=dtype),
        k.transpose(1, 2),
        v.transpose(1, 2),
        DIM**-0.5,
        max_seqlen_k=max(lengths),
        seqused_k=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        window_right=0,
        **options,
    )


def float8(args: AttentionArgs) -> AttentionArgs:
    """The same keys and values rounded to float8, each head with scales of its own."""
    k_scale, v_scale = torch.tensor([0.02, 0.5]), torch.tensor([0.3, 0.01])
    assert len(k_scale) == KV_HEADS
    k, v = (
        (x.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).transpose(1, 2).contiguous()
        for x, scale in ((args.k, k_scale), (args.v, v_scale))
    )
    return replace(args, k=k.transpose(1, 2), v=v.transpose(1, 2), k_scale=k_scale, v_scale=v_scale)


def tiled(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    starts = torch.arange(args.batch + 1, dtype=torch.int32)
    out, lse = cpu.forward(replace(args, q=args.q.squeeze(1), cu_seqlens_q=starts, max_seqlen_q=1))
    return out.unsqueeze(1), lse.T.unsqueeze(2)


def assert_same(args: AttentionArgs, tolerance: float = 2e-6) -> None:
    assert decode.serves(args)
    for ours, expected in zip(cpu.forward(args), tiled(args), strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_left": 20},
        {"window_left": 0},
        {"chunk_size": 48},
        {"softcap": 3.0},
        {"sinks": torch.linspace(-2, 3, HEADS)},
        {"leftpad_k": torch.tensor([3, 0, 17, 0, 100], dtype=torch.int32)},
        {"window_left": 300, "softcap": 2.0, "sinks": torch.zeros(HEADS)},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_every_option_agrees_with_the_tiled_path(options: dict[str, Any]) -> None:
    assert_same(problem([1, 16, 49, 700, 2100], **options))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-12)]
)
def test_every_dtype_agrees_with_the_tiled_path(dtype: torch.dtype, tolerance: float) -> None:
    assert_same(problem([5, 130], dtype), tolerance)


FLOAT8_OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_left": 20},
    {"chunk_size": 48},
    {"softcap": 3.0},
    {"sinks": torch.linspace(-2, 3, HEADS)},
    {"leftpad_k": torch.tensor([3, 0, 17, 0, 100], dtype=torch.int32)},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", FLOAT8_OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_float8_pages_agree_with_the_tiled_path(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = float8(problem([1, 16, 49, 700, 2100], dtype, **options))
    calls = []
    forward = decode.forward
    monkeypatch.setattr(decode, "forward", lambda args: calls.append(1) or forward(args))
    assert_same(args, 8e-3 if dtype == torch.bfloat16 else 5e-6)
    assert calls == [1], "the tiled path was compared with itself"


def test_a_sequence_without_keys_gives_zero_and_minus_infinity() -> None:
    args = problem([0, 33], sinks=torch.ones(HEADS))
    assert_same(args)
    out, lse = cpu.forward(args)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()


def test_sequences_are_copied_in_parts_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    args = problem([40, 64, 3, 50, 7])
    whole = cpu.forward(args)
    monkeypatch.setattr(decode, "_plans", ByContents())
    monkeypatch.setattr(decode, "_MAX_COPIED", 2 * 64 * KV_HEADS * (DIM + DIM_V))
    monkeypatch.setattr(decode, "_LONGEST_COPIED", 10**6)
    for part, expected in zip(cpu.forward(args), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=2e-6, atol=2e-6)


def test_a_context_too_long_to_copy_is_left_to_the_tiled_path(monkeypatch: pytest.MonkeyPatch) -> None:
    args = problem([600, 5])
    monkeypatch.setattr(decode, "_LONGEST_COPIED", 600 * KV_HEADS * (DIM + DIM_V) - 1)
    assert not decode.serves(args)


@pytest.mark.parametrize(
    ("garbage", "eight"), [(torch.nan, False), (torch.inf, False), (-torch.inf, False), (torch.nan, True)]
)
def test_slots_out_of_sight_may_hold_anything(garbage: float, eight: bool) -> None:
    args = problem([5, 70], window_left=30)
    if eight:  # which has a NaN, but no infinity
        args = float8(args)
    expected = cpu.forward(args)
    seen = torch.zeros(args.k.shape[:2], dtype=torch.bool)
    assert args.block_table is not None
    for b, length in enumerate((5, 70)):
        for position in range(max(0, length - 31), length):
            seen[args.block_table[b, position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    for cache in (args.k, args.v):
        filled = cache.float().masked_fill(~seen[..., None, None], garbage)
        assert not filled.isfinite().all()
        cache.copy_(filled)
    for ours, clean in zip(cpu.forward(args), expected, strict=True):
        assert torch.equal(ours, clean)


def test_new_values_in_old_tensors_are_noticed() -> None:
    args = problem([40, 64])
    cpu.forward(args)
    assert args.seqused_k is not None
    assert args.block_table is not None
    args.seqused_k.numpy()[:] = (20, 41)  # as the engine's staging buffer changes: unseen by torch
    assert_same(args)
    args.block_table.numpy()[:, :2] = args.block_table.numpy()[::-1, :2].copy()
    assert_same(args)


def test_stores_notice_new_values_in_old_slots() -> None:
    cache = torch.zeros(2, KV_HEADS, BLOCK_SIZE, DIM)
    slots, new = torch.tensor([3]), torch.ones(1, KV_HEADS, DIM)
    kv_cache.store(new, new, cache, cache.clone(), slots)
    slots.numpy()[:] = 20
    kv_cache.store(new, new, cache, cache.clone(), slots)
    assert cache[0, :, 3].eq(1).all()
    assert cache[1, :, 4].eq(1).all()
    assert cache.sum() == 2 * KV_HEADS * DIM


def test_layers_of_a_step_share_what_was_made() -> None:
    made: list[int] = []
    memory: ByContents[int] = ByContents()

    def make() -> int:
        made.append(len(made))
        return made[-1]

    x = torch.tensor([1, 2])
    assert memory.get(make, (x, None), "a") == memory.get(make, (x.clone(), None), "a") == 0
    assert memory.get(make, (x, None), "b") == 1
    assert memory.get(make, (x.int(), None), "a") == 2
    assert memory.get(make, (None, x), "a") == 3
    for step in range(20):
        memory.get(make, (x,), step)
    assert len(memory._made) <= 8


def test_what_was_made_in_inference_mode_serves_outside_of_it() -> None:
    args = problem([40, 64])
    with torch.inference_mode():
        inside = cpu.forward(args)[0].clone()
    q = args.q.clone().requires_grad_()
    outside = cpu.forward(replace(args, q=q))[0]
    torch.testing.assert_close(outside, inside)
