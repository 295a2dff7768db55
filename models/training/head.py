"""A language model's head, applied to any rows of hidden states. Knows the three ways in which families scale logits.

A family with a fourth way does not pass `self_check`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.patching import UnsupportedModelError


class ModelHead:
    """hidden `[rows, hidden_size]` -> logits `[rows, vocab_size]`, in the model's dtype."""

    def __init__(self, model: PreTrainedModel) -> None:
        linear = model.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise UnsupportedModelError(f"{type(model).__name__} has no linear head that could be trained against")
        config: Any = model.config.get_text_config()
        self.linear = linear
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        self._scale: float = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self._scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
