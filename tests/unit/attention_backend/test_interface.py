"""The public functions: FlashAttention's semantics, the operators' contracts, the compiler."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_backend
from attention_backend import (
    AttentionArgs,
    PagedMetadata,
    attention_with_lse,
    dispatch,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    ops,
    paged_attention,
    paged_ops,
)
from attention_backend.interface import with_plain_strides
from attention_backend.reference import rotary, standard

FIELDS = AttentionArgs.__slots__


def close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours.double(), truth.double(), atol=5e-6, rtol=5e-6)


def tensors(batch: int = 2, rows: int = 7, keys: int = 33, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, n, h, 16, dtype=dtype) for n, h in ((rows, 4), (keys, 2), (keys, 2))]


def step(num_decodes: int = 2, prefill: int = 5) -> tuple[list[Tensor], PagedMetadata, AttentionArgs]:
    """A step of the engine and the same attention as one problem over the caches."""
    torch.manual_seed(0)
    lengths, new = [*[30, 49][:num_decodes], *[40] * bool(prefill)], [*[1] * num_decodes, *[prefill] * bool(prefill)]
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)[: len(lengths)]
    slots = [
        int(table[b, p // 16]) * 16 + p % 16
        for b, (n, new_b) in enumerate(zip(lengths, new, strict=True))
        for p in range(n - new_b, n)
    ]
    cu = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    metadata = PagedMetadata(cu, seq_lens, table, torch.tensor(slots), num_decodes, max(new), max(lengths))
    total = sum(new)
    q, k, v = torch.randn(total, 6, 16), torch.randn(total, 2, 16), torch.randn(total, 2, 16)
    caches = [torch.randn(12, 2, 16, 16) for _ in range(2)]
    views = [c.clone() for c in caches]
    for token, slot in enumerate(slots):
        views[0][slot // 16, :, slot % 16], views[1][slot // 16, :, slot % 16] = k[token], v[token]
    problem = AttentionArgs(
        *(q, views[0].transpose(1, 2), views[1].transpose(1, 2), 0.25, cu),
        max_seqlen_q=max(new), max_seqlen_k=max(lengths), seqused_k=seq_lens, block_table=table, window_right=0,
    )  # fmt: skip
    return [q, k, v, *caches], metadata, problem


def test_the_room_exports_what_it_promises() -> None:
    for name in attention_backend.__all__:
        assert getattr(attention_backend, name) is not None


def test_causal_is_bottom_right_and_cancels_the_right_window() -> None:
    q, k, v = tensors()
    truth, lse = standard.attention(AttentionArgs(q, k, v, 0.25, window_left=5, window_right=0))
    result = flash_attn_func(q, k, v, causal=True, window_size=(5, 3), return_attn_probs=True)
    close(result[0], truth)
    close(result[1], lse)
    assert result[2] is None


def test_varlen_packed_and_paged_agree_with_standard() -> None:
    q, k, v = (x.flatten(0, 1) for x in tensors(1, 20, 20))
    cu_q, cu_k = (torch.tensor([0, n, 20], dtype=torch.int32) for n in (3, 9))
    slopes = torch.rand(4)
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 17, 11, causal=True, softcap=2.0, alibi_slopes=slopes)
    problem = AttentionArgs(q, k, v, 0.25, cu_q, cu_k, 17, 11, alibi_slopes=slopes, window_right=0, softcap=2.0)
    close(out, standard.attention(problem)[0])
    pages = [torch.zeros(4, 8, 2, 16) for _ in range(2)]
    for page, x in zip(pages, (k, v), strict=True):
        page[2, :8], page[0, :1], page[1, :8], page[3, :3] = x[:8], x[8:9], x[9:17], x[17:]
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    in_pages = flash_attn_varlen_func(
        q, *pages, cu_q, cu_k, 17, 11, causal=True, softcap=2.0, alibi_slopes=slopes, block_table=table
    )
    close(in_pages, out)


@pytest.mark.parametrize(("num_decodes", "prefill"), [(2, 0), (0, 5), (2, 5), (1, 40)])
def test_paged_attention_stores_then_attends(num_decodes: int, prefill: int) -> None:
    call, metadata, problem = step(num_decodes, prefill)
    sinks = torch.randn(6)
    out = paged_attention(*call, metadata, softmax_scale=0.25, window_left=20, chunk_size=32, softcap=3.0, sinks=sinks)
    assert torch.equal(call[3].transpose(1, 2), problem.k)
    assert torch.equal(call[4].transpose(1, 2), problem.v)
    close(out, standard.attention(replace(problem, window_left=20, chunk_size=32, softcap=3.0, sinks=sinks))[0])


@pytest.mark.parametrize("layout", ["dense", "rows", "paged", "engine"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_kvcache_appends_turns_and_attends(layout: str, causal: bool, interleaved: bool) -> None:
    q, k_new, v_new = tensors(2, 3, 3)
    lengths = torch.tensor([5, 13], dtype=torch.int32)
    angles = torch.arange(40)[:, None] / torch.tensor([1.0, 10.0, 100.0, 1000.0])
    cos, sin = angles.cos(), angles.sin()
    keywords: dict[str, Any] = {}
    if layout == "rows":
        keywords["cache_batch_idx"] = torch.tensor([3, 1], dtype=torch.int32)
        caches = [torch.randn(4, 24, 2, 16) for _ in range(2)]
        rows = [c[[3, 1]] for c in caches]
    elif layout == "dense":
        caches = [torch.randn(2, 24, 2, 16) for _ in range(2)]
        rows = [c.clone() for c in caches]
    else:
        table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
        keywords["block_table"] = table
        caches = [torch.randn(6, 8, 2, 16) for _ in range(2)]
        if layout == "engine":
            caches = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches]
        rows = [c[table.long()].flatten(1, 2) for c in caches]
    positions = lengths[:, None] + torch.arange(3)
    q_turned = rotary.apply(q, cos, sin, positions if causal else positions[:, :1].expand(-1, 3), interleaved)
    for b, n in enumerate(lengths.tolist()):
        rows[0][b, n : n + 3] = rotary.apply(k_new, cos, sin, positions, interleaved)[b]
        rows[1][b, n : n + 3] = v_new[b]
    problem = AttentionArgs(q_turned, *rows, 0.25, seqused_k=lengths + 3, window_right=0 if causal else -1)
    truth, truth_lse = standard.attention(problem)
    out, lse = flash_attn_with_kvcache(
        q, *caches, k_new, v_new, cos, sin, lengths, causal=causal, rotary_interleaved=interleaved,
        return_softmax_lse=True, **keywords,
    )  # fmt: skip
    close(out, truth)
    close(lse, truth_lse)


def test_kvcache_without_new_keys_takes_a_length_or_the_whole_cache() -> None:
    q, k, v = tensors()
    pad = torch.tensor([2, 0], dtype=torch.int32)
    used = torch.tensor([20, 20], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=20, cache_leftpad=pad)
    close(out, standard.attention(AttentionArgs(q, k, v, 0.25, seqused_k=used, leftpad_k=pad))[0])
    close(flash_attn_with_kvcache(q, k, v), standard.attention(AttentionArgs(q, k, v, 0.25))[0])


def test_every_call_is_counted() -> None:
    before = dispatch.calls().get("cpu_reference", 0)
    flash_attn_func(*tensors())
    assert dispatch.calls()["cpu_reference"] == before + 1


def test_recorded_calls_are_counted_when_they_are_replayed() -> None:
    flash_attn_func(*tensors())
    before = dispatch.calls()
    with dispatch.recording() as recorded:
        for _ in range(3):
            flash_attn_func(*tensors())
    assert dispatch.calls() == before
    assert recorded == {"cpu_reference": 3}
    for _ in range(2):
        dispatch.replayed(recorded)
    assert dispatch.calls() == before | {"cpu_reference": before["cpu_reference"] + 6}


def operator_arguments(args: AttentionArgs) -> tuple[Any, ...]:
    return tuple(getattr(args, name) for name in FIELDS)


def test_operators_keep_torch_librarys_contract() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.float64))
    bias, sinks = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in ((1, 4, 7, 33), (4,)))
    for args in (
        AttentionArgs(q, k, v, 0.25, window_right=0),
        AttentionArgs(q, k, v, 0.25, dropout_p=0.2, dropout_seed=torch.tensor([3, 4])),
        AttentionArgs(q, k, v, 0.25, bias=bias, sinks=sinks, softcap=2.0),
    ):
        torch.library.opcheck(ops.attention_op.overload, operator_arguments(args))
    with torch.no_grad():
        out, lse = attention_with_lse(args)
    flat = [x.detach() if isinstance(x, Tensor) else x for x in operator_arguments(args)]
    torch.library.opcheck(ops.attention_backward_op.overload, (out, lse, out, lse, *flat))
    call, m, _ = step()
    torch.library.opcheck(paged_ops.store_kv_op.overload, (*call[1:], m.slot_mapping))
    torch.library.opcheck(
        paged_ops.paged_attention_op.overload,
        (*call, m.cu_seqlens_q, m.seq_lens, m.block_table, m.slot_mapping, 2, 5, 49, 0.25, -1, 0, 0.0, None),
    )


def test_gradients_pass_gradcheck() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(1, 3, 5, torch.float64))
    bias, sinks = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in ((1, 4, 3, 5), (4,)))

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return attention_with_lse(AttentionArgs(q, k, v, 0.25, bias=bias, sinks=sinks, window_right=0, softcap=2.0))

    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks))


def test_dropout_is_repeated_by_torchs_seed_and_new_at_each_call() -> None:
    q, k, v = tensors(1, 33, 33)
    starts = torch.tensor([0, 33], dtype=torch.int32)

    def dense() -> Tensor:
        return torch.as_tensor(flash_attn_func(q, k, v, 0.3, causal=True))

    def packed() -> Tensor:
        rows = (x.squeeze(0) for x in (q, k, v))
        return torch.as_tensor(flash_attn_varlen_func(*rows, starts, starts, 33, 33, 0.3, causal=True)).unsqueeze(0)

    results = []
    for call in (dense, dense, packed):
        torch.manual_seed(7)
        results.append((call(), call()))
    (first, second), *again = results
    assert not torch.equal(first, second)
    for one, two in again:
        close(one, first)
        close(two, second)
    whole = torch.as_tensor(flash_attn_func(q, k, v, causal=True))
    assert (first - whole).abs().max() > 0.1


def test_dropout_returns_the_lse_without_it_and_no_mask() -> None:
    q, k, v = tensors()
    _, lse, mask = flash_attn_func(q, k, v, 0.3, return_attn_probs=True)
    assert mask is None
    torch.testing.assert_close(torch.as_tensor(lse), attention_with_lse(AttentionArgs(q, k, v, 0.25))[1])


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph_with_gradients(backend: str, dropout_p: float) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, dropout_p, causal=True, window_size=(9, 0))
        return torch.as_tensor(out).square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        leaves = [x.requires_grad_() for x in tensors()]  # which seeds torch
        function(*leaves).backward()
        results.append([x.grad for x in leaves])
    for ours, truth in zip(*results, strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_cached_calls_compile_as_one_graph(backend: str) -> None:
    call, metadata, _ = step()
    q, k, v = tensors(2, 1, 1)
    lengths, caches = torch.tensor([5, 13], dtype=torch.int32), [torch.randn(2, 24, 2, 16) for _ in range(2)]

    def engine(q: Tensor) -> Tensor:
        return paged_attention(q, *call[1:], metadata, softmax_scale=0.25)

    def kvcache(q: Tensor) -> Tensor:
        return torch.as_tensor(flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True))

    pairs: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [(engine, call[0]), (kvcache, q)]
    for function, x in pairs:
        assert torch.equal(torch.compile(function, fullgraph=True, backend=backend)(x), function(x))


def strided_problems() -> dict[str, AttentionArgs]:
    """What a problem brings beside q, k and v, in memory as models and users have it."""
    q, k, v = tensors()
    heads_last = torch.randn(7, 33, 4).permute(2, 0, 1)[None]  # T5's position bias
    table = torch.tensor([[1, 0, 2], [3, 5, 4]], dtype=torch.int32).repeat_interleave(2, 1)[:, ::2]
    pages = [x.reshape(-1, 11, 2, 16) for x in (k, v)]
    lengths, every_other = torch.tensor([20, 0, 33, 0], dtype=torch.int32), torch.rand(2, 66) < 0.5
    return {
        "bias": AttentionArgs(q, k, v, 0.25, bias=heads_last),
        "key mask": AttentionArgs(q, k, v, 0.25, key_mask=every_other[:, ::2]),
        "lengths": AttentionArgs(q, k, v, 0.25, seqused_k=lengths[::2], leftpad_k=lengths[3:].expand(2)),
        "sinks": AttentionArgs(q, k, v, 0.25, sinks=torch.randn(1).expand(4), alibi_slopes=torch.rand(8)[::2]),
        "table": AttentionArgs(q, *pages, 0.25, seqused_k=lengths[:2], block_table=table, max_seqlen_k=33),
    }


@pytest.mark.parametrize("name", strided_problems())
def test_kernels_get_plain_strides_and_the_same_values(name: str) -> None:
    args = strided_problems()[name]
    plain = with_plain_strides(args)
    assert plain is not args
    assert with_plain_strides(plain) is plain
    for field in FIELDS:
        before, after = getattr(args, field), getattr(plain, field)
        if isinstance(before, Tensor):
            assert after.stride(-1) == 1
            assert torch.equal(after, before)


def on_the_gpu(x: Tensor) -> Tensor:
    """With its strides, which to() would drop."""
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to("cuda:0").as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.gpu
@pytest.mark.parametrize("name", strided_problems())
def test_strides_change_no_result_on_a_gpu(name: str) -> None:
    args = strided_problems()[name]
    moved = {field: on_the_gpu(x) for field in FIELDS if isinstance(x := getattr(args, field), Tensor)}
    out, lse = attention_with_lse(replace(args, **moved))
    want, want_lse = attention_with_lse(args)
    close(out.cpu(), want)
    close(lse.cpu(), want_lse)
