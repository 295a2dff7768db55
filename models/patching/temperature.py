"""Llama 4's attention temperature, which follows a token's position: told by `position_ids`, as rotary embeddings are.

transformers takes the index in the row plus what a cache has seen for the position. Where requests share a row, or a
step goes on in the middle of a prompt, it is another. Knows no rows and no pages.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.patching.errors import UnsupportedCallError

_POSITIONS = "temperature_positions"  # the keyword that a layer hands on to its attention


class _Positions:
    """In a cache's place: tells the attention that so many tokens came before each row, and holds no keys."""

    def __init__(self, position_ids: Tensor) -> None:
        """int `[1, tokens]`."""
        if position_ids.shape[0] != 1:
            raise UnsupportedCallError(
                f"position_ids {tuple(position_ids.shape)}: the temperature of Llama 4 is computed for one flat row"
            )
        rows = torch.arange(position_ids.shape[1], device=position_ids.device)
        self._before = position_ids[0] - rows

    def get_seq_length(self, _layer: int) -> Tensor:
        return self._before

    def update(self, key: Tensor, value: Tensor, _layer: int) -> tuple[Tensor, Tensor]:
        return key, value


def fix_temperature(model: nn.Module) -> int:
    """Every layer of `model` that scales its queries by position goes by `position_ids` from now on, unless a cache is
    given. Returns how many do; may be repeated."""
    fixed = 0
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            layer.register_forward_pre_hook(_hand_on, with_kwargs=True)
            attention.register_forward_pre_hook(_use, with_kwargs=True)
            fixed += 1
    return fixed


def _hand_on(_layer: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The layer keeps its positions for itself. Its cache would be taken away where it is checkpointed, so what stands
    for one is made in the attention, which also is where a layer that is recomputed comes by."""
    return args, {**keywords, _POSITIONS: keywords["position_ids"]}


def _use(_attention: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    keywords = dict(keywords)
    position_ids = keywords.pop(_POSITIONS, None)
    if position_ids is not None and keywords.get("past_key_values") is None:
        keywords["past_key_values"] = _Positions(position_ids)
    return args, keywords
