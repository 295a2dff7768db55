"""Attention: tensors in, tensors out. Knows no model, no request and no process but its own."""

from attention_backend.cached import flash_attn_with_kvcache, paged_attention
from attention_backend.dispatch import UnsupportedError
from attention_backend.interface import attention, attention_with_lse, flash_attn_func, flash_attn_varlen_func
from attention_backend.metadata import PagedMetadata
from attention_backend.problem import AttentionArgs

__all__ = [
    "AttentionArgs",
    "PagedMetadata",
    "UnsupportedError",
    "attention",
    "attention_with_lse",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "paged_attention",
]
