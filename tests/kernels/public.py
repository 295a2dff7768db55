"""The public functions under test, loosely typed: what FlashAttention's functions return depends on their arguments."""

from collections.abc import Callable
from typing import Any

import attention_backend

flash_attn_func: Callable[..., Any] = attention_backend.flash_attn_func
flash_attn_varlen_func: Callable[..., Any] = attention_backend.flash_attn_varlen_func
flash_attn_with_kvcache: Callable[..., Any] = attention_backend.flash_attn_with_kvcache
