"""Rotary embeddings that choose their frequencies from the longest position of the whole batch: fixed for an engine.

One long request would otherwise change what every other request in its batch computes. Knows no attention.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.patching.errors import UnsupportedModelError

_FIXED = "longrope_fixed"  # any name that transformers' per-forward update does not look for


def fix_longrope(model: nn.Module, max_model_len: int) -> int:
    """Pins every LongRoPE of `model` to its long factors if `max_model_len` exceeds the original length, else short.

    The same choice for every request, whatever its length. Returns how many embeddings were pinned; may be repeated.
    Raises UnsupportedModelError for an embedding that goes on choosing by itself.
    """
    found = _longropes(model)
    for rope, layer_type in found:
        rope.rope_type = _FIXED if layer_type is None else {**rope.rope_type, layer_type: _FIXED}
        _pin(rope, max_model_len, layer_type)
    return len(found)


def longrope_lengths(model: nn.Module) -> list[int]:
    """The original length of every LongRoPE of `model`: a `max_model_len` above it chooses the long factors."""
    return [_parameters(rope, layer_type)["original_max_position_embeddings"] for rope, layer_type in _longropes(model)]


def _longropes(model: nn.Module) -> list[tuple[Any, str | None]]:
    """Each embedding with its layer type, None where it has one kind of layers; pinned ones too."""
    found: list[tuple[Any, str | None]] = []
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        types = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        found += [(module, layer_type) for layer_type, kind in types.items() if kind in ("longrope", _FIXED)]
    return found


def _parameters(rope: Any, layer_type: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = rope.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _pin(rope: Any, max_model_len: int, layer_type: str | None) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    parameters = _parameters(rope, layer_type)
    original_length = parameters["original_max_position_embeddings"]
    inv_freq: Tensor = getattr(rope, f"{prefix}inv_freq")
    is_long = max_model_len > original_length
    # Any seq_len above the original length asks for the long factors, any other for the short ones.
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        rope.config, inv_freq.device, seq_len=original_length + is_long, layer_type=layer_type
    )
    inv_freq.copy_(frequencies)  # in place: CUDA graphs read this address
    if "long_mscale" in parameters:
        _pin_scale(rope, inv_freq, parameters, is_long=is_long)
    if not _reads(rope, inv_freq, layer_type):
        raise UnsupportedModelError(
            f"{rope.config.model_type}: {type(rope).__name__} computes its LongRoPE frequencies in every forward, so "
            "one long request would change all others"
        )


def _pin_scale(rope: Any, inv_freq: Tensor, parameters: dict[str, Any], *, is_long: bool) -> None:
    """PhiMoE's own: it asks for frequencies in every forward (transformers names no length, and is given the short
    ones), and scales them by the longest position of the batch. A config of its own says that there is no choice."""
    scale = float(parameters["long_mscale" if is_long else "short_mscale"])
    rope.rope_init_fn = lambda _config: (inv_freq, scale)
    rope.config = copy.copy(rope.config)
    rope.config.rope_parameters = {**parameters, "rope_type": "default"}


@torch.no_grad()
def _reads(rope: Any, inv_freq: Tensor, layer_type: str | None) -> bool:
    """Whether what it computes comes from `inv_freq`."""
    position_ids = torch.ones(1, 1, dtype=torch.int64, device=inv_freq.device)
    kept = inv_freq.clone()
    inv_freq.fill_(torch.nan)
    try:
        out = rope(inv_freq.new_zeros(1, 1, 1), position_ids, *(() if layer_type is None else (layer_type,)))
    finally:
        inv_freq.copy_(kept)
    first: Tensor = out if isinstance(out, Tensor) else out[0]
    return bool(first.isnan().all())
