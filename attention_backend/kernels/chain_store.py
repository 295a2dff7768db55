"""Where layer_chain_sm90 leaves what the next attention wants: turned queries, keys and values in their pages."""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.kernels import rotary_store
from attention_backend.kernels.params import pointer


class Store(Enum):
    """What becomes of the last products, as the kernel's define has it."""

    NOTHING = 0
    PAGES = 1
    FP8_PAGES = 2


class ChainStore(ctypes.Structure):
    """parts/chain_plan.cuh"""

    _fields_ = (
        *((name, c_void_p) for name in ("k_cache", "v_cache", "slot_mapping", "cos", "sin", "k_scale", "v_scale")),
        *((name, c_int64) for name in ("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "table_row")),
        *((name, c_int) for name in ("num_heads", "num_kv_heads", "head_dim", "half", "page_size", "reserved")),
    )


@dataclass(frozen=True, slots=True)
class Pages:
    """`layers.rotary_store`'s arguments behind queries, keys and values, which were checked; no norms of heads."""

    num_heads: int
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    cos: Tensor
    sin: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def queries(self) -> tuple[int, int]:
        """Of a row: heads, head_dim."""
        return self.num_heads, self.k_cache.shape[3]

    @property
    def store(self) -> Store:
        return Store.FP8_PAGES if self.k_cache.dtype == torch.float8_e4m3fn else Store.PAGES

    @property
    def params(self) -> ChainStore:
        """Raises UnsupportedError for sizes without a kernel and for rows that are not 16-byte aligned."""
        head_dim, half = self.k_cache.shape[3], self.cos.shape[1]
        reason = rotary_store.refuses(head_dim, 2 * half)
        if reason is not None:
            raise UnsupportedError(reason)
        rotary_store.check_tables(cos=self.cos, sin=self.sin)
        rotary_store.check_pages(self.k_cache, self.v_cache, self.k_scale, self.v_scale)
        p = ChainStore(num_heads=self.num_heads, num_kv_heads=self.k_cache.shape[1], head_dim=head_dim, half=half)
        p.k_cache, p.v_cache, p.slot_mapping = (x.data_ptr() for x in (self.k_cache, self.v_cache, self.slot_mapping))
        p.cos, p.sin, p.table_row = self.cos.data_ptr(), self.sin.data_ptr(), self.cos.stride(0)
        p.k_scale, p.v_scale = pointer(self.k_scale), pointer(self.v_scale)
        p.k_page, p.k_head, p.k_slot, _ = self.k_cache.stride()
        p.v_page, p.v_head, p.v_slot, _ = self.v_cache.stride()
        p.page_size = self.k_cache.shape[2]
        return p
