"""Which layers of a model an adapter may change: the linear ones inside its decoder layers. Knows no adapter.

They see every row of the flattened batch in its order. Experts see some rows, the head only those that sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from models.packed_linear import PackedLinear
from models.quantization import is_quantized_linear


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """y `[rows, out_features]` = x `[rows, in_features]` W^T + b, however the module stores W."""

    module: nn.Module
    in_features: int
    out_features: int


def find_linears(model: PreTrainedModel) -> Mapping[str, LinearLayer]:
    """By the module's name, as PEFT's files spell it (model.layers.0.self_attn.q_proj)."""
    found: dict[str, LinearLayer] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if any(part.isdecimal() for part in parts) and "experts" not in parts:
            shape = _shape(module)
            if shape is not None:
                found[name] = LinearLayer(module, *shape)
    return found


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """(in, out). Subclasses compute something else, of which only those known here are y = x W^T + b."""
    if type(module) is nn.Linear or type(module) is PackedLinear or is_quantized_linear(module):
        return module.in_features, module.out_features
    if type(module) is Conv1D:  # GPT-2's: W is [in, out]
        return module.nx, module.nf
    return None
