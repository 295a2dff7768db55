"""Where a model calls attention, and with what: found by one forward with a recording attention function.

Sizes are read from the calls themselves, so no family needs its own rules (fused projections, MLA, per-layer heads).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attention_backend.problem import UNBOUNDED
from models.patching import UnsupportedModelError
from models.patching.errors import refusing_calls, refusing_failures
from models.patching.paged import chunk_size, window
from models.patching.rule import MaskFunction, MaskRule, classify, describe

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


class _Masks:
    """Stands for a model's masks, and knows which keys each lets a token see. They are told apart by the size of a
    dimension, which costs no memory and stays whatever is cut off at the end."""

    def __init__(self) -> None:
        self._functions: list[MaskFunction] = []

    def make(
        self, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
    ) -> Tensor:
        """transformers' mask interface."""
        self._functions.append(mask_function)
        return torch.empty(1, 1, 1, 1, device=device).expand(1, len(self._functions), q_length, kv_length)

    def check(self, mask: Tensor | None, site: AttentionSite, model_type: str) -> None:
        """Raises UnsupportedModelError unless it lets a token see the keys that it would see on pages."""
        # A mask of another rank is one that the model made by itself.
        function = self._functions[mask.shape[1] - 1] if mask is not None and mask.dim() == 4 else None
        rule = None if function is None else classify(function)
        on_pages = MaskRule(left=site.window - 1 if site.window else UNBOUNDED, right=0, chunk=site.chunk_size)
        if rule is None or replace(rule, chunk_start=None) != on_pages:
            told = "none that is known here" if function is None else describe(function)
            raise UnsupportedModelError(
                f"{model_type}: the mask of layer {site.layer_idx} ({site.layer_type}) is {told}, but pages have no "
                f"mask: there a token would see a window of {site.window} keys, chunks of {site.chunk_size} (0: all)"
            )


@torch.inference_mode()
def find_attention_sites(model: PreTrainedModel) -> list[AttentionSite]:
    """One site per layer, in order. Raises UnsupportedModelError when layers bypass the attention interface, or see
    other keys than the engine's attention would show them."""
    text_config = model.config.get_text_config()
    layer_types = getattr(text_config, "layer_types", None)
    masks = _Masks()
    calls: list[tuple[AttentionSite, Tensor | None]] = []

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_other: Any,  # the engine's own attention function is the one that judges these
    ) -> tuple[Tensor, None]:
        layer_idx: int = module.layer_idx  # type: ignore[assignment]
        keys = window(module, layer_idx, sliding_window)
        kind = "sliding_attention" if keys else "full_attention"
        if layer_types is not None:
            kind = layer_types[layer_idx]
        site = AttentionSite(
            layer_idx=layer_idx,
            layer_type=kind,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            head_dim_v=value.shape[3],
            softmax_scale=query.shape[3] ** -0.5 if scaling is None else scaling,
            window=keys,
            chunk_size=chunk_size(module, layer_idx),
            softcap=softcap or 0.0,
            has_sinks=s_aux is not None,
        )
        calls.append((site, attention_mask))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_RECORDER, record)
    AttentionMaskInterface.register(_RECORDER, masks.make)
    with attention_implementation(model, _RECORDER), refusing_calls(model), refusing_failures(model):
        _run(model)
    found = [site.layer_idx for site, _ in calls]
    expected = list(range(text_config.num_hidden_layers))
    if found != expected:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(expected)} layers, but attention was called for layers {found}: "
            "layers without attention, or with attention of their own, cannot run on a paged cache"
        )
    for site, mask in calls:
        masks.check(mask, site, text_config.model_type)
    return [site for site, _ in calls]


def _run(model: PreTrainedModel) -> None:
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    # With a 2-D mask nobody looks for packed sequences, which a model without weights could not answer.
    model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False)
