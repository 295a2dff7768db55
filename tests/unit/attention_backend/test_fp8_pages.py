"""Steps over float8 pages: what is stored is what every kind of row attends to."""

from typing import Any

import pytest
import torch
from test_interface import step
from torch import Tensor

from attention_backend import AttentionArgs, fp8_pages, paged_attention
from attention_backend.fp8_pages import dequantize_pages_op
from attention_backend.metadata import PagedMetadata
from attention_backend.reference import standard
from attention_backend.reference.kv_cache import FP8, quantised

SCALES = (torch.tensor([0.25, 2.0]), torch.tensor([1.0, 0.125]))


def float8(cache: Tensor, scale: Tensor) -> Tensor:
    """`[num_blocks, heads, block_size, dim]`"""
    return quantised(cache.transpose(1, 2), scale).transpose(1, 2).contiguous()


def float8_step(num_decodes: int, prefill: int) -> tuple[list[Tensor], PagedMetadata, AttentionArgs]:
    """As `step`, with caches of 8 bits; the problem's are what those stand for, the new tokens included."""
    (q, k, v, *_), metadata, problem = step(num_decodes, prefill)
    caches = [float8(cache.transpose(1, 2), scale) for cache, scale in zip((problem.k, problem.v), SCALES, strict=True)]
    true = [(cache.float() * scale[:, None, None]).transpose(1, 2) for cache, scale in zip(caches, SCALES, strict=True)]
    for cache in caches:  # the new tokens are still to come
        for slot in metadata.slot_mapping.tolist():
            cache.view(torch.uint8)[slot // 16, :, slot % 16] = 0x7F  # NaN
    fields = {name: getattr(problem, name) for name in AttentionArgs.__slots__} | {"k": true[0], "v": true[1]}
    return [q, k, v, *caches], metadata, AttentionArgs(**fields)


@pytest.mark.parametrize(("num_decodes", "prefill"), [(2, 0), (0, 5), (2, 5), (1, 40)])
@pytest.mark.parametrize("copied", [False, True])
def test_every_row_attends_to_what_the_pages_stand_for(
    num_decodes: int, prefill: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`copied`: as on a GPU where no kernel reads float8 pages for many rows."""
    if copied:
        monkeypatch.setattr(fp8_pages, "is_copied", lambda _args: True)
    call, metadata, problem = float8_step(num_decodes, prefill)
    k_scale, v_scale = SCALES
    attend: Any = paged_attention
    out = attend(*call, metadata, softmax_scale=0.25, k_scale=k_scale, v_scale=v_scale)
    torch.testing.assert_close(out.double(), standard.attention(problem)[0], atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("dense", [False, True])
def test_copies_are_made_of_some_sequences_at_a_time(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    counts, lens = [3, 3, 3, 3] if dense else [3, 1, 7, 4], [20, 3, 30, 48]
    table = torch.randperm(12, dtype=torch.int32).view(4, 3)
    caches = [float8(torch.randn(12, 2, 16, 16), scale) for scale in SCALES]
    cu = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    args = AttentionArgs(
        torch.randn(4, 3, 6, 16) if dense else torch.randn(sum(counts), 6, 16),
        caches[0].transpose(1, 2),
        caches[1].transpose(1, 2),
        0.25,
        cu_seqlens_q=None if dense else cu,
        max_seqlen_q=7,
        max_seqlen_k=48,
        seqused_k=torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        window_left=17,
        window_right=0,
        k_scale=SCALES[0],
        v_scale=SCALES[1],
    )
    whole = fp8_pages.attention(args)
    assert fp8_pages.kernel(args) == "cpu_reference"
    copies: list[int] = []
    plain = fp8_pages.dequantize_pages_op

    def counted(*call: Any) -> tuple[Tensor, Tensor]:
        copies.append(call[4].shape[0])
        copied: tuple[Tensor, Tensor] = plain(*call)
        return copied

    monkeypatch.setattr(fp8_pages, "is_copied", lambda _args: True)
    monkeypatch.setattr(fp8_pages, "dequantize_pages_op", counted)
    assert fp8_pages.kernel(args) == "dequantize_pages + cpu_reference"
    page = 16 * 2 * 32 * 4
    for room, parts in ((12 * page, [4]), (7 * page, [2, 2]), (10 * page, [3, 1]), (1, [1, 1, 1, 1])):
        copies.clear()
        monkeypatch.setattr(fp8_pages, "COPY_BYTES", room)
        torch.testing.assert_close(fp8_pages.attention(args), whole, atol=5e-6, rtol=5e-6)
        assert copies == parts


def test_a_scale_that_is_a_power_of_two_makes_copies_exact() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8)
    cache = values[values.float().isfinite()][:240].view(1, 1, 15, 16).expand(2, 2, -1, -1).contiguous()
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    scale = torch.tensor([2.0**-5, 2.0**3])
    lens = torch.tensor([30], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        k, _ = dequantize_pages_op(cache, cache, scale, scale, table, lens, None, 1, -1, dtype)
        assert torch.equal(k.double(), cache.double() * scale.double()[:, None, None])


def test_the_operator_keeps_torch_librarys_contract() -> None:
    caches = [float8(torch.randn(5, 2, 16, 16), scale) for scale in SCALES]
    table, lens = torch.tensor([[1, 3, 0]], dtype=torch.int32), torch.tensor([33], dtype=torch.int32)
    arguments = (*caches, *SCALES, table, lens, None, 1, -1, torch.bfloat16)
    # torch's check of schemas compares arguments by arithmetic, which float8 has none of.
    torch.library.opcheck(
        dequantize_pages_op.overload, arguments, test_utils=("test_faketensor", "test_aot_dispatch_static")
    )
