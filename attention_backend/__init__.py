"""Attention: tensors in, tensors out. Knows no model, no request and no process but its own."""

from attention_backend import block_patterns
from attention_backend.block_sparse import BlockSparsity, block_sparse_attention
from attention_backend.cached import flash_attn_with_kvcache, paged_attention
from attention_backend.dispatch import UnsupportedError
from attention_backend.fp8 import flash_attn_fp8_func
from attention_backend.interface import attention, attention_with_lse, flash_attn_func, flash_attn_varlen_func
from attention_backend.linear import linear_attention
from attention_backend.metadata import PagedMetadata
from attention_backend.problem import AttentionArgs
from attention_backend.shared_prefix import PrefixGroups, cascade_attention, merge_states, shared_prefix_attention
from attention_backend.token_choice import choose_tokens

__all__ = [
    "AttentionArgs",
    "BlockSparsity",
    "PagedMetadata",
    "PrefixGroups",
    "UnsupportedError",
    "attention",
    "attention_with_lse",
    "block_patterns",
    "block_sparse_attention",
    "cascade_attention",
    "choose_tokens",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "linear_attention",
    "merge_states",
    "paged_attention",
    "shared_prefix_attention",
]
