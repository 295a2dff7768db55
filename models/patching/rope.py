"""Rotary embeddings that choose their frequencies from the longest position of the whole batch: fixed for an engine.

One long request would otherwise change what every other request in its batch computes. Knows no attention.
"""

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = "longrope_fixed"  # any name that transformers' per-forward update does not look for


def fix_longrope(model: nn.Module, max_model_len: int) -> int:
    """Pins every LongRoPE of `model` to its long factors if `max_model_len` exceeds the original length, else short.

    The same choice for every request, whatever its length. Returns how many embeddings were pinned; may be repeated.
    """
    pinned = 0
    for module in model.modules():
        if not hasattr(module, "rope_type"):
            continue
        rope: Any = module
        if isinstance(rope.rope_type, dict):
            for layer_type, rope_type in rope.rope_type.items():
                if rope_type in ("longrope", _FIXED):
                    _pin(rope, max_model_len, layer_type)
                    rope.rope_type = {**rope.rope_type, layer_type: _FIXED}
                    pinned += 1
        elif rope.rope_type in ("longrope", _FIXED):
            _pin(rope, max_model_len, None)
            rope.rope_type = _FIXED
            pinned += 1
    return pinned


def _pin(rope: Any, max_model_len: int, layer_type: str | None) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    parameters = rope.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    original_length = parameters["original_max_position_embeddings"]
    inv_freq = getattr(rope, f"{prefix}inv_freq")
    # Any seq_len above the original length asks for the long factors, any other for the short ones.
    seq_len = original_length + 1 if max_model_len > original_length else original_length
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        rope.config, inv_freq.device, seq_len=seq_len, layer_type=layer_type
    )
    inv_freq.copy_(frequencies)  # in place: CUDA graphs read this address
