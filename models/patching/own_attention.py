"""Which families have attention code of their own, that no registered attention reaches. Knows no mask."""

from collections.abc import Iterator
from functools import cache

import torch
from transformers import PreTrainedModel

REASON = (
    "has attention code of its own and does not use transformers' AttentionInterface, so the attention cannot be "
    "replaced"
)


def has_own_attention(cls: type[PreTrainedModel]) -> bool:
    return not cls._can_set_attn_implementation()


@torch.compiler.assume_constant_result
def is_bypassed_by(config_class: type) -> bool:
    """Whether all models that are loaded for this kind of configuration have attention code of their own.

    Asked for a mask, whose model is loaded. The first question about a class reads source code, the next ones nothing.
    """
    return _is_bypassed_by(config_class)


@cache
def _is_bypassed_by(config_class: type) -> bool:
    classes = [cls for cls in _loaded(PreTrainedModel) if cls.config_class is config_class]
    return bool(classes) and all(map(has_own_attention, classes))


def _loaded(cls: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _loaded(subclass)
