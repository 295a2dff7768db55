"""Steps of the engine over float8 pages: stored with scales, read as they are by few rows, and on Hopper by many; else
over a copy."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_backend import cached, dispatch, fp8_pages
from attention_backend.fp8_pages import dequantize_pages_op
from attention_backend.metadata import PagedMetadata
from attention_backend.problem import AttentionArgs
from attention_backend.reference import kv_cache

from .error_rule import assert_out_close
from .oracle import attention
from .problems import generator, randn
from .test_paged_attention import BATCHES, SMALL, Step, step
from .test_shared_pages import CASES, build, with_sharing

# Loosely typed: caches are handed in as a pair.
paged_attention: Callable[..., Tensor] = cached.paged_attention
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
LIMIT = 2**31


def quantised(cache: Tensor, scale: Tensor) -> Tensor:
    """`[num_blocks, heads, page, dim]`; NaN stays NaN."""
    return kv_cache.quantised(cache.transpose(1, 2), scale).transpose(1, 2).contiguous()


def check_step(problem: Step) -> None:
    """The step over quantised pages against the attention over what they stand for, new tokens included."""
    dtype, kv_heads = problem.q.dtype, problem.k.shape[1]
    scales = [
        torch.tensor((both * kv_heads)[:kv_heads], device=problem.q.device)
        for both in ([2.0**-7, 2.0**-6], [2.0**-6, 0.01])
    ]
    caches = [quantised(cache, scale) for cache, scale in zip((problem.k_cache, problem.v_cache), scales, strict=True)]
    slots = problem.metadata.slot_mapping
    page = problem.k_cache.shape[2]
    out = paged_attention(
        problem.q, problem.k, problem.v, *caches, problem.metadata, softmax_scale=problem.q.shape[-1] ** -0.5,
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    for new, cache, scale in zip((problem.k, problem.v), caches, scales, strict=True):
        stored = cache.view(torch.uint8)[slots // page, :, slots % page]
        assert torch.equal(stored, kv_cache.quantised(new, scale).view(torch.uint8))
    true = [cache.double() * scale.double()[:, None, None] for cache, scale in zip(caches, scales, strict=True)]
    meant = replace(problem.args(), k=true[0].transpose(1, 2), v=true[1].transpose(1, 2), q=problem.q.double())
    rounded = replace(meant, **{name: getattr(meant, name).to(dtype) for name in "qkv"})
    truth, _ = attention(meant)
    same_dtype, _ = attention(rounded, dtype, reorder=True)
    assert_out_close(out, truth, same_dtype, rtol=3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_over_float8_pages_is_attention_over_what_they_stand_for(
    name: str, page: int, device: torch.device
) -> None:
    check_step(step(BATCHES[name], device, page))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["few", "mixed", "nested_beside", "only_chunks_share"])
def test_float8_pages_that_are_shared_are_read_in_groups_of_few_rows(name: str, device: torch.device) -> None:
    check_step(with_sharing(build(CASES[name], device), CASES[name], max_rows=16))


@pytest.mark.parametrize("name", SMALL)
def test_a_step_over_float8_pages_on_cpu(name: str) -> None:
    check_step(step(SMALL[name], CPU, 16))


@pytest.mark.gpu
def test_copies_of_some_sequences_at_a_time_are_the_copy_of_all(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = generator("parts", device)
    caches = [randn((40, 2, 64, 128), torch.float32, g).to(FP8) for _ in "kv"]
    table = torch.randperm(40).to(device=device, dtype=torch.int32).view(4, 10)
    lens, counts = [600, 100, 640, 333], [300, 100, 1, 200]
    args = AttentionArgs(
        randn((sum(counts), 8, 128), torch.bfloat16, g),
        caches[0].transpose(1, 2),
        caches[1].transpose(1, 2),
        0.1,
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(device=device, dtype=torch.int32),
        max_seqlen_q=300,
        max_seqlen_k=640,
        seqused_k=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=table,
        window_right=0,
        k_scale=torch.tensor([0.5, 0.25], device=device),
        v_scale=torch.tensor([0.5, 1.0], device=device),
    )
    monkeypatch.setattr(fp8_pages, "is_copied", lambda _args: True)
    for window in (-1, 100):
        windowed = replace(args, window_left=window)
        monkeypatch.setattr(fp8_pages, "COPY_BYTES", 1 << 30)
        whole = fp8_pages.attention(windowed)
        monkeypatch.setattr(fp8_pages, "COPY_BYTES", 1)
        torch.testing.assert_close(fp8_pages.attention(windowed), whole, atol=2e-3, rtol=1e-2)
        truth, _ = attention(_dequantised(windowed))
        torch.testing.assert_close(whole.double(), truth, atol=2e-2, rtol=2e-2)


def _dequantised(args: AttentionArgs) -> AttentionArgs:
    assert args.k_scale is not None
    assert args.v_scale is not None
    k, v = (x.double() * scale.double()[:, None] for x, scale in ((args.k, args.k_scale), (args.v, args.v_scale)))
    return replace(args, q=args.q.double(), k=k, v=v, k_scale=None, v_scale=None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_byte_is_converted_exactly(dtype: torch.dtype, cuda: torch.device) -> None:
    """All 256 bytes, times powers of two, in pages that do not follow one another, heads apart."""
    values = torch.arange(256, dtype=torch.uint8, device=cuda).repeat(64).view(1, 1, 128, 128)
    pool = torch.stack([values.roll(i) for i in range(5)]).view(5, 1, 128, 128).repeat(1, 3, 1, 1)
    cache = pool.transpose(0, 1).contiguous().transpose(0, 1).view(FP8)  # a head's pages together
    table = torch.tensor([[4, 2, 0], [1, 3, 3]], dtype=torch.int32, device=cuda)
    lens = torch.tensor([384, 129], dtype=torch.int32, device=cuda)
    scale = torch.tensor([2.0**-3, 1.0, 2.0**4], device=cuda)
    k, v = dequantize_pages_op(cache, cache, scale, scale, table, lens, None, 1, -1, dtype)
    want = (cache.float() * scale[:, None, None]).to(dtype)[[4, 2, 0, 1, 3]]
    for copy in (k, v):
        assert torch.equal(copy[:5].nan_to_num(77.0), want.nan_to_num(77.0))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "copied"), [(1, False), (200, False), (200, True)], ids=["decode", "prefill", "copy"])
def test_a_float8_pool_may_be_larger_than_two_to_the_31(
    rows: int, copied: bool, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page past 4 GiB: what a 32-bit offset would read is another page."""
    if torch.cuda.mem_get_info(cuda)[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    g = generator(("float8 pool", rows), cuda)
    page, kv_heads, dim = 64, 8, 128
    num_blocks = 2 * LIMIT // (page * kv_heads * dim) + 64
    caches = [torch.zeros((num_blocks, kv_heads, page, dim), dtype=FP8, device=cuda) for _ in "kv"]
    table = (torch.arange(16, dtype=torch.int32, device=cuda) + num_blocks - 20).view(1, 16)
    lens = torch.tensor([1000], dtype=torch.int32, device=cuda)
    slots = torch.arange(1000, device=cuda) + (num_blocks - 20) * page
    scale = torch.full((kv_heads,), 2.0**-6, device=cuda)
    q, k, v = (randn((n, h, dim), torch.bfloat16, g) for n, h in ((rows, 32), (1000, kv_heads), (1000, kv_heads)))
    from attention_backend.kernels import kv_cache_store

    kv_cache_store.store(k, v, caches[0], caches[1], slots, scale, scale)
    metadata = PagedMetadata(
        torch.tensor([0, rows], dtype=torch.int32, device=cuda), lens, table, slots[-rows:], int(rows == 1), rows, 1024
    )
    if copied:
        monkeypatch.setattr(fp8_pages, "is_copied", lambda _args: True)
    out = paged_attention(q, None, None, *caches, metadata, softmax_scale=0.1, k_scale=scale, v_scale=scale)
    few = [cache[num_blocks - 20 : num_blocks - 4].clone() for cache in caches]
    near = replace(metadata, block_table=torch.arange(16, dtype=torch.int32, device=cuda).view(1, 16))
    want = paged_attention(q, None, None, *few, near, softmax_scale=0.1, k_scale=scale, v_scale=scale)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=1e-2)
    assert rows > 1 or dispatch.calls()["flash_decode"] > 0
