"""Cosines and sines of a step's positions, once a step for all its layers. Knows no attention."""

from typing import Any

from torch import Tensor, nn

from models.fusing.families import Family, class_name
from models.fusing.plain import is_plain

Tables = tuple[Tensor, Tensor]  # cos and sin, float32 [tokens, rotary_dim / 2]


class StepRotary:
    """A family's rotary embedding, which may differ by layer type (Gemma 3)."""

    def __init__(self, module: nn.Module, family: Family) -> None:
        self._module: Any = module
        self._known = class_name(module) == family.cls("RotaryEmbedding")

    @property
    def fused(self) -> bool:
        """Frequencies that change with the batch ("dynamic") are left to the module."""
        types = self._module.rope_type
        changing = any("dynamic" in kind for kind in (types.values() if isinstance(types, dict) else [types]))
        return self._known and not changing and is_plain(self._module, type(self._module))

    def rotary_dim(self, layer_type: str) -> int:
        return 2 * int(self._frequencies(layer_type)[0].shape[0])

    def tables(self, position_ids: Tensor, layer_type: str, hidden: Tensor) -> Tables:
        """position_ids int64 `[1, tokens]`; `hidden` tells dtype and device to a module that is not known."""
        if self.fused:
            inv_freq, scaling = self._frequencies(layer_type)
            angles = position_ids[0, :, None] * inv_freq.float()
            cos, sin = angles.cos(), angles.sin()
            return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)
        by_type = (layer_type,) if isinstance(self._module.rope_type, dict) else ()
        cos, sin = self._module(hidden[None], position_ids, *by_type)
        half = cos.shape[-1] // 2  # the second half repeats the first
        return cos[0, :, :half].float(), sin[0, :, :half].float()

    def _frequencies(self, layer_type: str) -> tuple[Tensor, float]:
        prefix = f"{layer_type}_" if isinstance(self._module.rope_type, dict) else ""
        return getattr(self._module, f"{prefix}inv_freq"), getattr(self._module, f"{prefix}attention_scaling")
