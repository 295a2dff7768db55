"""Attention: tensors in, tensors out. Knows no model, no request and no process but its own.

Importing this room is light (it names the cache of kernels and converted models, too): torch comes in with a function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "AttentionArgs": "problem",
    "BlockSparsity": "block_sparse",
    "PagedMetadata": "metadata",
    "PrefixGroups": "shared_prefix",
    "UnsupportedError": "dispatch",
    "attention": "interface",
    "attention_with_lse": "interface",
    "block_sparse_attention": "block_sparse",
    "cascade_attention": "shared_prefix",
    "choose_tokens": "token_choice",
    "flash_attn_fp8_func": "fp8",
    "flash_attn_func": "interface",
    "flash_attn_varlen_func": "interface",
    "flash_attn_with_kvcache": "cached",
    "linear_attention": "linear",
    "merge_states": "shared_prefix",
    "paged_attention": "cached",
    "shared_prefix_attention": "shared_prefix",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"attention_backend.{_MODULES.get(name, name)}")
    value = globals()[name] = getattr(module, name) if name in _MODULES else module
    return value


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
