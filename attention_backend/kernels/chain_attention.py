"""The attention in front of a chain, as layer_chain_sm90 computes it. Assumes that shapes were checked."""

import ctypes
import math
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

from torch import Tensor

from attention_backend.heuristics.layer_chain import HEAD_DIMS, MOST_HEADS, ChainHeads, attention_parts
from attention_backend.kernels.rows import check_rows


class ChainAttention(ctypes.Structure):
    """parts/chain_plan.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("k_cache", "v_cache", "block_table", "seq_lens")),
        *((name, c_int64) for name in ("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "table_row")),
        ("scale_log2", c_float),
        *((name, c_int) for name in ("num_kv_heads", "page_size", "table_width", "parts", "reserved")),
    )


def takes_heads(heads: ChainHeads) -> bool:
    """Whether there is a kernel for them, for however many rows."""
    return refuses_heads(heads, 1, heads.num_kv_heads) is None


def refuses_heads(heads: ChainHeads, rows: int, blocks: int) -> str | None:
    """Why so many rows' attention is not computed in front of a chain of so many blocks; None: it is."""
    if heads.head_dim not in HEAD_DIMS:
        return f"heads of {heads.head_dim}: attention in front of it takes {', '.join(map(str, HEAD_DIMS))}"
    if heads.group > MOST_HEADS:
        return f"{heads.group} query heads a key head: attention in front of it takes {MOST_HEADS} at most"
    if rows * heads.num_kv_heads > blocks:
        return f"{rows} rows of {heads.num_kv_heads} key heads: there are {blocks} blocks for their attention"
    return None


@dataclass(frozen=True, slots=True)
class Attending:
    """One query row a sequence against its pages."""

    k_cache: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: Tensor
    block_table: Tensor  # int32 [rows, width]
    seq_lens: Tensor  # int32 [rows]
    softmax_scale: float

    def heads(self, num_heads: int) -> ChainHeads:
        _, num_kv_heads, _, head_dim = self.k_cache.shape
        return ChainHeads(num_heads // num_kv_heads, num_kv_heads, head_dim)

    def num_words(self, heads: ChainHeads, blocks: int) -> int:
        """Of the kernel's Exchange: two elements of what comes out; of every part, columns and logarithms of heads."""
        vectors = -(-heads.group * (heads.head_dim + 1) // 4)
        pairs = self.seq_lens.shape[0] * heads.num_kv_heads
        return pairs * (heads.group * heads.head_dim // 2 + attention_parts(blocks, pairs) * 4 * vectors)

    def params(self, blocks: int) -> ChainAttention:
        """Raises UnsupportedError for pages whose rows are not 16-byte aligned."""
        k, v, table, num_kv_heads = self.k_cache, self.v_cache, self.block_table, self.k_cache.shape[1]
        check_rows(k_cache=k, v_cache=v)
        p = ChainAttention(num_kv_heads=num_kv_heads, page_size=k.shape[2], table_width=table.shape[1])
        p.k_cache, p.v_cache, p.block_table, p.seq_lens = (x.data_ptr() for x in (k, v, table, self.seq_lens))
        p.k_page, p.k_head, p.k_slot, _ = k.stride()
        p.v_page, p.v_head, p.v_slot, _ = v.stride()
        p.table_row, p.scale_log2 = table.stride(0), self.softmax_scale * math.log2(math.e)
        p.parts = attention_parts(blocks, self.seq_lens.shape[0] * num_kv_heads)
        return p
