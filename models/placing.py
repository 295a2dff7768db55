"""Weights that were read already -> a model, where transformers would do no more than put each in its place. What it
would rename, convert, cast or tie in another way is left to it."""

from collections.abc import Mapping

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from models.errors import WRONG_CONFIG
from models.fusing.families import family_of
from models.fusing.plain import NotFusedError


def place(
    tensors: Mapping[str, Tensor], config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel | None:
    """The model over these very tensors, which are on `device`; None when they are not exactly its weights."""
    try:
        # Not on the meta device: each call would go through torch's references in Python, which import sympy.
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        family_of(model)
    except (*WRONG_CONFIG, NotFusedError):  # loading it will say what is wrong
        return None
    if not _are_its_weights(tensors, model):
        return None
    model.load_state_dict(tensors, strict=False, assign=True)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers' own word for "leave it"
    for name, buffer in list(model.named_buffers()):
        if buffer.device != device:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, buffer.to(device))
    with torch.no_grad():
        model.init_weights()  # the buffers that no checkpoint holds (rotary frequencies); and ties what is tied
    return model


def _are_its_weights(tensors: Mapping[str, Tensor], model: PreTrainedModel) -> bool:
    if model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict:
        return False
    expected = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    same = all(
        name in expected and (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)
        for name, tensor in tensors.items()
    )
    return same and set(tensors) == set(expected) - tied
