"""Which attention kernels a model's layers will be served by, by name: for people who ask. Runs nothing."""

from collections.abc import Sequence

import torch

from attention_backend import dispatch, fp8_pages
from attention_backend.metadata import KVPages
from attention_backend.problem import AttentionArgs
from models.attention_sites import AttentionSite
from models.kv_pool import KVCaches

#: Rows of a call that stands for prefills: more than a decode kernel takes, and fewer than float8 pages are copied for
#: where a kernel reads them.
_PREFILL_ROWS = 256


def chosen_kernels(
    sites: Sequence[AttentionSite], caches: KVCaches, dtype: torch.dtype, max_model_len: int
) -> dict[str, str]:
    """Of each layer type, in prefill and in decode. Raises UnsupportedError where there is none."""
    names = {}
    for site, pages in zip(sites, caches, strict=True):
        for phase, rows in (("prefill", _PREFILL_ROWS), ("decode", 1)):
            args = _representative_args(site, pages, dtype, rows, max_model_len)
            serving = dispatch.select(args).kernel if pages.k_scale is None else fp8_pages.kernel(args)
            names[f"{site.layer_type}/{phase}"] = serving
    return names


def copied_pages(
    sites: Sequence[AttentionSite], caches: KVCaches, dtype: torch.dtype, rows: int, max_model_len: int
) -> int:
    """How many float8 pages of several sequences are copied at once in prefills of so many rows, one sequence's being
    as many as it has. 0: none are copied."""
    problems = (
        _representative_args(site, pages, dtype, rows, max_model_len)
        for site, pages in zip(sites, caches, strict=True)
        if pages.k_scale is not None
    )
    return min((fp8_pages.pages_at_once(args) for args in problems if fp8_pages.is_copied(args)), default=0)


def _representative_args(
    site: AttentionSite, pages: KVPages, dtype: torch.dtype, rows: int, max_model_len: int
) -> AttentionArgs:
    device = pages.k.device
    max_blocks = -(-max_model_len // pages.k.shape[2])

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionArgs(
        q=torch.empty(rows, site.num_heads, site.head_dim, dtype=dtype, device=device),
        k=pages.k.transpose(1, 2),
        v=pages.v.transpose(1, 2),
        softmax_scale=site.softmax_scale,
        cu_seqlens_q=int32(0, rows),
        max_seqlen_q=rows,
        max_seqlen_k=max_model_len,
        seqused_k=int32(rows),
        block_table=torch.zeros(1, max_blocks, dtype=torch.int32, device=device),
        sinks=torch.zeros(site.num_heads, device=device) if site.has_sinks else None,
        window_left=site.window - 1,
        window_right=0,
        chunk_size=site.chunk_size,
        softcap=site.softcap,
        k_scale=pages.k_scale,
        v_scale=pages.v_scale,
    )
