"""Which models the patched attention serves exactly, told from their structure first and by name where it cannot show.

Refusing at load is the point: every family listed here would otherwise run, and be wrong or quadratic in silence.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from models.patching.errors import UnsupportedModelError
from models.patching.mask import MASK_EDITORS
from models.patching.own_attention import REASON, has_own_attention
from models.towers import TOWERS

#: Kinds of layers whose whole state is keys and values of tokens.
SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

#: Families that reach the attention interface but that the engine would serve wrong, and why.
_REFUSED_FOR_SERVING = {
    "diffllama": "it attends twice a layer with different values, and a layer has one set of pages",
    "lfm2": "its short convolutions carry state between steps",
    "lfm3": "its short convolutions carry state between steps",
    "lfm2_moe": "its short convolutions carry state between steps",
    "minimax": "its lightning attention carries state between steps",
    "moshi": "its depth decoder runs inside every step, with keys of its own",
    "nemotron": "it drops the keyword arguments that carry the pages",
    "stablelm": "it drops the keyword arguments that carry the pages",
}
_INTERFACE_CALL = "ALL_ATTENTION_FUNCTIONS.get_interface("


def check_config(config: PretrainedConfig) -> None:
    """What a checkpoint's configuration alone says: before any weight is read. Raises UnsupportedModelError."""
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text_config = config.sub_configs.get("text_config")
    text_alone = family is not None and text_config is not None and family.config_class is text_config
    if not text_alone:  # of some checkpoints with towers, transformers makes and loads the text model and nothing else
        _refuse_towers(config)
    if family is not None:
        check_class(family, config.model_type)


def check_class(cls: type[PreTrainedModel], model_type: str) -> None:
    """Before a model of it is made, which some families fail to with an attention that they do not know. Raises
    UnsupportedModelError."""
    if has_own_attention(cls):
        raise UnsupportedModelError(f"{model_type}: {cls.__name__} {REASON}")


def check_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError unless `attn_implementation="longwave"` would reach every attention of `model`."""
    for part in _pretrained_parts(model):
        model_type = part.config.model_type
        if model_type in MASK_EDITORS:
            raise UnsupportedModelError(
                f"{model_type}: its layers compute with the attention mask and need it written out, N x N"
            )
        check_class(type(part), model_type)
    if not _interface_classes(model):
        raise UnsupportedModelError(
            f"{model.config.model_type}: no layer of {type(model).__name__} calls transformers' AttentionInterface"
        )


def check_supported_for_serving(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError unless the engine can serve `model` from pages, many requests in one flat row."""
    _refuse_towers(model.config)
    check_supported(model)
    config: Any = model.config.get_text_config()
    model_type = config.model_type

    def refuse(reason: str) -> None:
        raise UnsupportedModelError(f"{model_type}: {reason}; the engine serves decoder-only attention models")

    for name in {model_type, model.config.model_type} & _REFUSED_FOR_SERVING.keys():
        refuse(_REFUSED_FOR_SERVING[name])
    if getattr(model.config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if not model.can_generate():
        refuse(f"{type(model).__name__} does not generate")
    other = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if other:
        refuse(f"it has layers of type {', '.join(sorted(other))}, which keep more than keys and values")
    if any(getattr(type(part), "_is_stateful", False) for part in _pretrained_parts(model)):
        refuse("it carries recurrent or convolutional state between steps")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        refuse("it takes no position_ids, so requests cannot share a row")
    _check_attention_layers(model, model_type)
    _check_positions(model, model_type)


def _refuse_towers(config: PretrainedConfig) -> None:
    towers = [kind for kind in TOWERS if getattr(config, f"{kind}_config", None) is not None]
    if towers:
        raise UnsupportedModelError(
            f"{config.model_type}: it has a tower for {' and '.join(towers)}: only text models are served"
        )


def _check_attention_layers(model: PreTrainedModel, model_type: str) -> None:
    classes = _interface_classes(model)
    layers = [module for module in model.modules() if type(module) in classes]
    indices = [getattr(layer, "layer_idx", None) for layer in layers]
    if None in indices or len(set(indices)) != len(indices):
        raise UnsupportedModelError(
            f"{model_type}: its attention layers are not numbered one by one ({indices}), so pages cannot be told apart"
        )
    for layer in layers:
        if not getattr(layer, "is_causal", True):
            raise UnsupportedModelError(f"{model_type}: {type(layer).__name__} is not causal, as paged attention is")


def _check_positions(model: nn.Module, model_type: str) -> None:
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)
        for rope_type in rope_types.values() if isinstance(rope_types, dict) else [rope_types]:
            if isinstance(rope_type, str) and "dynamic" in rope_type:
                raise UnsupportedModelError(
                    f"{model_type}: rope_type {rope_type!r} changes with the longest request of the batch; "
                    "use yarn, linear or longrope scaling"
                )


def _pretrained_parts(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _interface_classes(model: nn.Module) -> set[type]:
    """The classes of attention layers that call whatever attention is registered."""
    classes = {type(module) for module in model.modules()}
    return {cls for cls in classes if _is_attention(cls.__name__) and _INTERFACE_CALL in _source(cls)}


def _is_attention(class_name: str) -> bool:
    return "Attention" in class_name or class_name.endswith("MLA")


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # a class made in a notebook has no file to read
        return ""
