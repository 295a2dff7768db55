"""The peers' contenders hand their packages the same problem in the packages' own layouts: packages that are fakes of a
few lines here, after the signatures of FlashAttention-3, FlashAttention-4 and FlashInfer."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks import attention_timing, attention_torch
from benchmarks.attention_cells import Cell
from benchmarks.attention_contenders import REGISTRY
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_masks import SOFTCAP, WINDOW
from benchmarks.attention_truth import Truth, acceptable

FORWARD = Cell("forward", 2, 24, 24, 4, 2, 16, True)
DECODE = Cell("decode", 3, 1, 128, 4, 2, 16, False, page=32)
CHUNK = Cell("chunk", 2, 40, 128, 4, 2, 16, True, page=32)
VARLEN = Cell("varlen", 3, 150, 150, 4, 4, 16, True, lengths=(70, 150, 20))
SHARED = Cell("shared_prefix", 4, 1, 150, 4, 2, 16, False, page=16, shared=96)
WINDOWED = replace(FORWARD, section="features", option=WINDOW, amount=7)
CAPPED = replace(FORWARD, section="features", option=SOFTCAP, amount=5)
FLOAT8 = Cell("fp8_forward", 2, 64, 64, 2, 2, 64, False)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int = -1, softcap: float = 0.0) -> Tensor:
    """`[rows, heads, head_dim]` over `[keys, kv_heads, head_dim]`, bottom-right aligned."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if window >= 0:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).tril(-1 - window), -torch.inf)
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).bfloat16()


def ragged(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool) -> Tensor:
    rows, keys = (list(zip(cu.tolist(), cu[1:].tolist(), strict=False)) for cu in (cu_q, cu_k))
    return torch.cat([attention(q[a:b], k[c:d], v[c:d], causal) for (a, b), (c, d) in zip(rows, keys, strict=True)])


def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, causal: bool) -> Tensor:
    outs = []
    for b, length in enumerate(lens.tolist()):
        keys, values = (x[table[b].long()].flatten(0, 1)[:length] for x in (k, v))
        outs.append(attention(q[b], keys, values, causal))
    return torch.stack(outs)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **descale: Tensor,
) -> Tensor:
    assert window_size[1] in (-1, 0)
    scales = [descale.get(f"{name}_descale") for name in "qkv"]
    q, k, v = (x if s is None else x.float() * s[:, None, :, None] for x, s in zip((q, k, v), scales, strict=True))
    return torch.stack([attention(*x, causal, window_size[0], softcap) for x in zip(q, k, v, strict=True)])


def scheduler_metadata(
    batch: int, rows: int, keys: int, heads: int, kv_heads: int, dim: int, lens: Tensor, **options: Any
) -> Tensor:
    assert lens.shape == (batch,)
    assert keys % options["page_size"] == 0
    assert (heads % kv_heads, options["qkv_dtype"]) == (0, torch.bfloat16)
    return torch.zeros(1, dtype=torch.int32)


def with_kvcache(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    assert options["num_splits"] == 0
    assert options["scheduler_metadata"] is not None
    return paged(q, k, v, options["page_table"], options["cache_seqlens"], options["causal"])


def fa3_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, *, causal: bool
) -> Tensor:
    assert (most_q, most_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    return ragged(q, k, v, cu_q, cu_k, causal)


FA3 = SimpleNamespace(
    flash_attn_func=dense,
    flash_attn_varlen_func=fa3_varlen,
    flash_attn_with_kvcache=with_kvcache,
    get_scheduler_metadata=scheduler_metadata,
)


def fa4_varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: Any) -> tuple[Tensor, None]:
    if "page_table" in options:
        return paged(q, k, v, options["page_table"], options["seqused_k"], causal), None
    return ragged(q, k, v, options["cu_seqlens_q"], options["cu_seqlens_k"], causal), None


FA4 = SimpleNamespace(flash_attn_func=lambda *x, causal: (dense(*x, causal), None), flash_attn_varlen_func=fa4_varlen)


class PageLists:
    """What FlashInfer's wrappers make of indptr, indices and the last page's length."""

    def __init__(self, indptr: Tensor, indices: Tensor, last: Tensor, page: int) -> None:
        self.sequences = []
        for b, (first, stop) in enumerate(zip(indptr.tolist(), indptr[1:].tolist(), strict=False)):
            self.sequences.append((indices[first:stop].long(), (stop - first - 1) * page + int(last[b])))

    def keys(self, b: int, pages: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        places, length = self.sequences[b]
        k, v = (x[places].flatten(0, 1)[:length] for x in pages)
        return k, v


class BatchWrapper:
    def __init__(self, workspace: Tensor, layout: str, **_: Any) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")

    def _plan(self, rows: Tensor, lists: PageLists, causal: bool) -> None:
        self.rows, self.lists, self.causal = rows.tolist(), lists, causal

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        parts = zip(self.rows, self.rows[1:], strict=False)
        outs = [attention(q[a:b], *self.lists.keys(i, pages), self.causal) for i, (a, b) in enumerate(parts)]
        return torch.cat(outs)


class DecodeWrapper(BatchWrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, heads: int, kv: int, dim: int, page: int, **_: Any
    ) -> None:
        self._plan(torch.arange(len(indptr)), PageLists(indptr, indices, last, page), causal=False)


class PrefillWrapper(BatchWrapper):
    def plan(
        self,
        rows: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        heads: int,
        kv: int,
        dim: int,
        page: int,
        *,
        causal: bool,
        **_: Any,
    ) -> None:
        self._plan(rows, PageLists(indptr, indices, last, page), causal)


class CascadeWrapper:
    """Joins the levels' keys instead of merging their results."""

    def __init__(self, levels: int, workspace: Tensor, layout: str) -> None:
        assert (levels, workspace.dtype, layout) == (2, torch.uint8, "NHD")

    def plan(
        self,
        rows: list[Tensor],
        indptr: list[Tensor],
        indices: list[Tensor],
        last: list[Tensor],
        heads: int,
        kv: int,
        dim: int,
        page: int,
        **_: Any,
    ) -> None:
        self.levels = [PageLists(*x, page) for x in zip(indptr, indices, last, strict=True)]
        assert rows[0].tolist() == [0, rows[1].tolist()[-1]]

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        outs = []
        for b in range(q.shape[0]):
            both = self.levels[0].keys(0, pages), self.levels[1].keys(b, pages)
            k, v = (torch.cat(x) for x in zip(*both, strict=True))
            outs.append(attention(q[b : b + 1], k, v, causal=False))
        return torch.cat(outs)


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
    BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper,
    MultiLevelCascadeAttentionWrapper=CascadeWrapper,
)
FAKES = {
    "flash_attn_interface": FA3,
    "flash_attn": SimpleNamespace(cute=FA4),
    "flash_attn.cute": FA4,
    "flashinfer": FLASHINFER,
}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in FAKES.items():
        monkeypatch.setitem(sys.modules, name, fake)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        (name, cell)
        for name in ("fa3", "fa4", "flashinfer", "flashinfer-cascade")
        for cell in (
            FORWARD,
            replace(FORWARD, causal=False),
            VARLEN,
            DECODE,
            replace(DECODE, section="latency"),
            CHUNK,
            replace(CHUNK, section="paged"),
            SHARED,
            FLOAT8,
            replace(FORWARD, section="shapes", head_dim=80),
            WINDOWED,
            CAPPED,
        )
        if cell.section in REGISTRY[name].makes
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.section}-{x.option or x.mask}",
)
def test_a_peer_gets_the_cells_problem(name: str, cell: Cell) -> None:
    tensors = Tensors.random(cell, torch.device("cpu"))
    truth = Truth.of(cell, tensors)
    calls, result = attention_timing.prepare(cell, [tensors], truth, REGISTRY[name], cell.section)
    assert len(calls) == 1, result.reason
    assert result.error is not None
    assert acceptable(cell, result.error)
    assert calls[0]().shape == tensors.q.shape


@pytest.mark.parametrize("causal", [False, True])
def test_keys_in_use_reach_torchs_kernels_packed_or_masked(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("padding", 3, 40, 40, 4, 4, 16, causal, lengths=(40, 7, 25))
    t = Tensors.random(cell, torch.device("cpu"))
    truth = Truth.of(cell, t)
    monkeypatch.setattr(
        attention_torch, "_ragged", lambda q, k, v, cu_q, cu_k, cell: ragged(q, k, v, cu_q, cu_k, cell.causal)
    )
    assert acceptable(cell, truth.error(REGISTRY["fa2"].makes["padding"](cell, t)()))
    masked = attention_torch.sdpa(SDPBackend.MATH, attention_torch.key_padding_mask)(cell, t)()
    assert acceptable(cell, truth.error(masked))


def test_every_peer_has_a_fake() -> None:
    made: dict[str, Callable[..., Any]] = {}
    for contender in REGISTRY.values():
        if contender.package:
            made |= contender.makes
            assert contender.package in FAKES
    assert {"forward", "decode", "shared_prefix", "varlen", "chunk"} <= set(made)
