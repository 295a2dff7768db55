"""Where a model calls attention, and with what: found by one forward with a recording attention function.

Sizes are read from the calls themselves, so no family needs its own rules (fused projections, MLA, per-layer heads).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from models.patching import UnsupportedModelError

_RECORDER = "longwave_recorder"
_PROBE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """One attention layer, as the engine's cache and kernels see it."""

    layer_idx: int
    layer_type: str  # transformers' names: full_attention, sliding_attention, chunked_attention
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    window: int  # keys a row sees, its own included; 0 = all
    chunk_size: int  # 0 = not chunked
    softcap: float
    has_sinks: bool


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Runs the block with another attention implementation, then restores the one that was set."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def find_attention_sites(model: PreTrainedModel) -> list[AttentionSite]:
    """One site per layer, in order. Raises UnsupportedModelError when layers bypass the attention interface."""
    text_config = model.config.get_text_config()
    layer_types = getattr(text_config, "layer_types", None)
    chunk_size = getattr(text_config, "attention_chunk_size", None) or 0
    sites: list[AttentionSite] = []

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_other: Any,  # the engine's own attention function is the one that judges these
    ) -> tuple[Tensor, None]:
        layer_idx: int = module.layer_idx  # type: ignore[assignment]
        window = sliding_window or 0
        kind = "sliding_attention" if window else "full_attention"
        if layer_types is not None:
            kind = layer_types[layer_idx]
        sites.append(
            AttentionSite(
                layer_idx=layer_idx,
                layer_type=kind,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                head_dim_v=value.shape[3],
                softmax_scale=query.shape[3] ** -0.5 if scaling is None else scaling,
                window=window,
                chunk_size=chunk_size if kind == "chunked_attention" else 0,
                softcap=softcap or 0.0,
                has_sinks=s_aux is not None,
            )
        )
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_RECORDER, record)
    with attention_implementation(model, _RECORDER):
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=model.device)
        model(input_ids=ids, position_ids=torch.arange(_PROBE_TOKENS, device=model.device)[None], use_cache=False)
    found = [site.layer_idx for site in sites]
    expected = list(range(text_config.num_hidden_layers))
    if found != expected:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(expected)} layers, but attention was called for layers {found}: "
            "layers without attention, or with attention of their own, cannot run on a paged cache"
        )
    return sites
