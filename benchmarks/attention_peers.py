"""Peers from packages of their own, timed where they can be imported: FlashAttention-3, FlashAttention-4, FlashInfer.

Plans, metadata and layouts are made before the timed call. Nothing of ours depends on them.
"""

import torch
from torch import Tensor

from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import CASCADE, FA3, FA4, FLASHINFER, Call, contender

_WORKSPACE_BYTES = 128 * 1024 * 1024
_FLOAT8_MAX = 448.0
_PAGED = ("decode", "latency", "paged", "chunk", "shared_prefix")


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some versions return the log-sum-exp too."""
    return result[0] if isinstance(result, tuple) else result


@contender(FA3, "forward", "shapes")
def fa3(cell: Cell, t: Tensors) -> Call:
    from flash_attn_interface import flash_attn_func

    return lambda: first(flash_attn_func(t.q, t.k, t.v, causal=cell.causal))


@contender(FA3, "varlen")
def fa3_varlen(cell: Cell, t: Tensors) -> Call:
    from flash_attn_interface import flash_attn_varlen_func

    most = cell.seqlen_q, cell.seqlen_k
    return lambda: first(flash_attn_varlen_func(t.q, t.k, t.v, t.cu, t.cu, *most, causal=cell.causal))


@contender(FA3, *_PAGED)
def fa3_paged(cell: Cell, t: Tensors) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    k, v = t.token_major_pages
    metadata = get_scheduler_metadata(
        cell.batch,
        cell.seqlen_q,
        t.table.shape[1] * cell.page,
        cell.heads,
        cell.kv_heads,
        cell.head_dim,
        t.used,
        qkv_dtype=t.q.dtype,
        page_size=cell.page,
        causal=True,
    )
    return lambda: first(
        flash_attn_with_kvcache(
            t.q,
            k,
            v,
            cache_seqlens=t.used,
            page_table=t.table,
            causal=True,
            num_splits=0,
            scheduler_metadata=metadata,
        )
    )


@contender(FA3, "fp8_forward")
def fa3_float8(cell: Cell, t: Tensors) -> Call:
    """The kernel alone, on tensors quantised before: one scale a sequence and head."""
    from flash_attn_interface import flash_attn_func

    quantised, scales = zip(*(_per_head_float8(x) for x in (t.q, t.k, t.v)), strict=True)
    names = ("q_descale", "k_descale", "v_descale")
    kwargs = dict(zip(names, scales, strict=True))
    return lambda: first(flash_attn_func(*quantised, causal=cell.causal, **kwargs))


def _per_head_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn like x `[batch, seqlen, heads, head_dim]` and float32 `[batch, heads]`."""
    scale = x.float().abs().amax(dim=(1, 3)) / _FLOAT8_MAX
    return (x.float() / scale[:, None, :, None]).to(torch.float8_e4m3fn), scale


@contender(FA4, "forward")
def fa4(cell: Cell, t: Tensors) -> Call:
    from flash_attn.cute import flash_attn_func

    return lambda: first(flash_attn_func(t.q, t.k, t.v, causal=cell.causal))


@contender(FA4, "varlen")
def fa4_varlen(cell: Cell, t: Tensors) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    kwargs = {"cu_seqlens_q": t.cu, "cu_seqlens_k": t.cu, "max_seqlen_q": cell.seqlen_q, "max_seqlen_k": cell.seqlen_k}
    return lambda: first(flash_attn_varlen_func(t.q, t.k, t.v, **kwargs, causal=cell.causal))


@contender(FA4, "decode")
def fa4_decode(cell: Cell, t: Tensors) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    k, v = t.token_major_pages
    kwargs = {"seqused_k": t.used, "page_table": t.table, "max_seqlen_k": cell.seqlen_k}
    return lambda: first(flash_attn_varlen_func(t.q, k, v, **kwargs, causal=True, num_splits=0))


def _workspace(t: Tensors) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=t.q.device)


def _page_lists(cell: Cell, t: Tensors, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's indptr, indices and length of the last page, of each sequence's pages from number `first` on."""
    pages = t.table[:, first:]
    indptr = torch.arange(cell.batch + 1, dtype=torch.int32, device=t.q.device) * pages.shape[1]
    return indptr, pages.flatten().contiguous(), ((t.used - 1) % cell.page + 1).int()


@contender(FLASHINFER, "decode", "latency", "shared_prefix")
def flashinfer_decode(cell: Cell, t: Tensors) -> Call:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(t), "NHD", use_tensor_cores=True)
    shape = cell.heads, cell.kv_heads, cell.head_dim, cell.page
    wrapper.plan(*_page_lists(cell, t), *shape, q_data_type=t.q.dtype, kv_data_type=t.q.dtype)
    q, pages = t.q.squeeze(1), t.token_major_pages
    return lambda: wrapper.run(q, pages).unsqueeze(1)


@contender(FLASHINFER, "paged", "chunk")
def flashinfer_prefill(cell: Cell, t: Tensors) -> Call:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(t), "NHD", backend="fa3")
    rows = torch.arange(cell.batch + 1, dtype=torch.int32, device=t.q.device) * cell.seqlen_q
    shape = cell.heads, cell.kv_heads, cell.head_dim, cell.page
    dtypes = {"q_data_type": t.q.dtype, "kv_data_type": t.q.dtype}
    wrapper.plan(rows, *_page_lists(cell, t), *shape, causal=cell.causal, **dtypes)
    q, pages = t.q.flatten(0, 1), t.token_major_pages
    return lambda: wrapper.run(q, pages).view_as(t.q)


@contender(CASCADE, "shared_prefix")
def flashinfer_cascade(cell: Cell, t: Tensors) -> Call:
    """FlashInfer told which pages are shared."""
    import flashinfer

    shared = cell.shared // cell.page
    rows = torch.arange(cell.batch + 1, dtype=torch.int32, device=t.q.device)
    indptr, indices, last = _page_lists(cell, t, shared)
    pages_before = indptr.new_tensor([0, shared])
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, _workspace(t), "NHD")
    wrapper.plan(
        [rows[[0, -1]], rows],
        [pages_before, indptr],
        [t.table[0, :shared].contiguous(), indices],
        [last.new_tensor([cell.page]), last],
        cell.heads,
        cell.kv_heads,
        cell.head_dim,
        cell.page,
        q_data_type=t.q.dtype,
        kv_data_type=t.q.dtype,
    )
    q, pages = t.q.squeeze(1), t.token_major_pages
    return lambda: wrapper.run(q, pages).unsqueeze(1)
