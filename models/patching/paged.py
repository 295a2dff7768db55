"""The attention function of the name "longwave_paged": one layer of one engine step over the paged KV cache.

It has no mask function on purpose: transformers then makes no mask and never waits for the device. Knows no scheduler.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

import attention_backend
from attention_backend.metadata import KVPages, PagedMetadata
from attention_backend.problem import UNBOUNDED
from models.patching.errors import UnsupportedCallError
from models.patching.keywords import refuse_dropout, refuse_unknown
from models.patching.layout import tokens_first


def longwave_paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    paged_metadata: PagedMetadata | None = None,
    kv_caches: Sequence[KVPages] | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """query `[1, heads, tokens, head_dim]`, key and value `[1, kv_heads, tokens, *]` of this step's tokens only.

    `kv_caches[layer]` is written, then read through the block table. Returns `[1, tokens, heads, head_dim_v]`.
    """
    refuse_unknown(module, keywords)
    refuse_dropout(module, dropout)
    if paged_metadata is None or kv_caches is None:
        raise UnsupportedCallError(
            f"{type(module).__name__} was called without paged_metadata and kv_caches: "
            'either the model drops its keyword arguments, or it needs attn_implementation="longwave"'
        )
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    if not causal or attention_mask is not None or query.shape[0] != 1:
        raise UnsupportedCallError(f"{type(module).__name__}: the paged attention is causal, unmasked and one flat row")
    layer = module.layer_idx
    assert isinstance(layer, int)
    pages = kv_caches[layer]
    keys = window(module, layer, sliding_window)
    out = attention_backend.paged_attention(
        tokens_first(query)[0],  # [tokens, heads, head_dim], a view
        tokens_first(key)[0],
        tokens_first(value)[0],
        pages.k,
        pages.v,
        paged_metadata,
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window_left=keys - 1 if keys else UNBOUNDED,
        chunk_size=chunk_size(module, layer),
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        k_scale=pages.k_scale,
        v_scale=pages.v_scale,
    )
    return out[None], None


def window(module: nn.Module, layer: int, sliding_window: int | None) -> int:
    """Keys that a row of this layer sees, its own included; 0: all before it. Where the call does not say so, the
    config does: some families (Qwen2-MoE, PhiMoE) make it part of their mask alone, and pages have no mask."""
    if sliding_window is not None:
        return sliding_window
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or layer_types[layer] == "sliding_attention":
        return getattr(config, "sliding_window", None) or 0
    return 0


def chunk_size(module: nn.Module, layer: int) -> int:
    """The chunk of a chunked layer (Llama 4), which no keyword tells; 0 elsewhere."""
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or layer_types[layer] != "chunked_attention":
        return 0
    return int(config.attention_chunk_size)
