"""Random models too small to be slow, large enough in their weights that every mistake shows."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from models import patching
from models.loader import LoadedModel

#: Sizes that most families name so.
TINY: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**TINY, **changes})


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Weights large enough that positions and neighbours matter."""
    patching.register()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=patching.LONGWAVE_PAGED).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or "sinks" in name:
                parameter.normal_(0, 0.15)
    return model


def as_loaded(model: PreTrainedModel) -> LoadedModel:
    config = model.config.get_text_config()
    return LoadedModel(model, config, (2,), config.max_position_embeddings, config.vocab_size, "tiny")
