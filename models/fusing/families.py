"""Which families are fused: their class names, and how their layers are put together. Loads no model code.

Exact classes only: a subclass may compute anything.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from models.fusing.plain import NotFusedError, is_plain


@dataclass(frozen=True, slots=True)
class Family:
    """A module of transformers, `transformers.models.<name>.modeling_<name>`, and its differences from Llama."""

    name: str
    prefix: str  # of its classes
    decoder: str = "Model"  # the class that holds the layers, after the prefix
    unit_offset: bool = False  # RMSNorm times 1 + weight, rounded once
    sandwich: bool = False  # each block's result is normalised before it is added to the residual
    softcap: bool = False  # logits are capped by the config's final_logit_softcapping

    def cls(self, part: str) -> str:
        return f"transformers.models.{self.name}.modeling_{self.name}.{self.prefix}{part}"


FAMILIES = (
    Family("llama", "Llama"),
    Family("mistral", "Mistral"),
    Family("qwen2", "Qwen2"),
    Family("qwen3", "Qwen3"),
    Family("phi3", "Phi3"),
    Family("smollm3", "SmolLM3"),
    Family("gemma2", "Gemma2", unit_offset=True, sandwich=True, softcap=True),
    Family("gemma3", "Gemma3", decoder="TextModel", unit_offset=True, sandwich=True, softcap=True),
)


def class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def family_of(model: PreTrainedModel) -> Family:
    """The family of a causal language model whose structure is exactly as its class makes it.

    Raises NotFusedError. Linear layers, norms and activations are not looked at: each may differ by itself.
    """
    name = class_name(model)
    family = next((f for f in FAMILIES if f.cls("ForCausalLM") == name), None)
    if family is None:
        known = ", ".join(f"{f.prefix}ForCausalLM" for f in FAMILIES)
        raise NotFusedError(f"{type(model).__name__} is not one of the fused families ({known})")
    inner: Any = model.model
    expected = [(model, "ForCausalLM"), (inner, family.decoder)]
    for layer in inner.layers:
        expected += [(layer, "DecoderLayer"), (layer.self_attn, "Attention"), (layer.mlp, "MLP")]
    for module, part in expected:
        if class_name(module) != family.cls(part):
            raise NotFusedError(f"{class_name(module)} stands where {family.cls(part)} is expected")
        if not is_plain(module, type(module)):
            raise NotFusedError(f"{type(module).__name__} has hooks or a forward of its own")
    return family
