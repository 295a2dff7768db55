"""Whether quantised weights have scales, whole blocks of them, and all of them were read. Reads no weights.

transformers (5.23) derives a block's size from the number of scales: 576 rows with 5 scales of 128 rows each fail, and
192 rows with 2 of them become two blocks of 96, which are other weights. What has no scale that it knows keeps its
codes as they are.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.errors import ModelLoadError
from models.stored_weights import StoredTensor, stored_tensors

_SCALES = "_scale_inv"
_WEIGHT = re.compile(r".*(\.weight|_proj)")
_SCALES_OF_WEIGHT = re.compile(r"(?P<weight>.*(\.weight|_proj))_scale(_inv)?")
#: What published checkpoints call the scales of a linear layer's `weight`.
_BESIDE_WEIGHT = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")


def check_blocks(folder: Path, settings: Mapping[str, Any]) -> None:
    """`settings`: quantization_config of config.json. Raises ModelLoadError."""
    block = settings.get("weight_block_size")
    if block is None:
        return
    shapes = {tensor.name: tensor.shape for tensor in _stored(folder)}
    for name, scales in shapes.items():
        weight = shapes.get(name.removesuffix(_SCALES), ()) if name.endswith(_SCALES) else ()
        sides = list(zip(weight[-2:], block, scales[-2:], strict=False))
        if any(side % size and -(-side // size) == count > 1 for side, size, count in sides):
            raise ModelLoadError(
                f"the weights are quantised (fp8) in blocks of {block[0]} x {block[1]}, and {list(weight)} of "
                f"{name.removesuffix(_SCALES)} is not made of whole ones, which is not served"
            )


def check_scales(folder: Path) -> None:
    """Of quantised weights that will be dequantised. Raises ModelLoadError for linear layers' codes in 8 bits without
    scales beside them."""
    tensors = _stored(folder)
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        module, _, last = tensor.name.rpartition(".")
        is_code = last == "weight" and tensor.dtype in _EIGHT_BITS
        if is_code and not any(f"{module}.{scales}" in names for scales in _BESIDE_WEIGHT):
            raise ModelLoadError(f"the weights are quantised, and {tensor.name} has no scales in the files of {folder}")


def check_unread(folder: Path, unread: Iterable[str]) -> None:
    """`unread`: tensors of the files that transformers has no use for. Raises ModelLoadError for scales of weights that
    it did read: their codes then stand for themselves (AutoFP8's weight_scale; no quantization_config)."""
    names = set(unread)
    for name in sorted(names):
        scales = _SCALES_OF_WEIGHT.fullmatch(name)
        if scales is not None and scales["weight"] not in names:
            raise ModelLoadError(
                f"{folder} holds {name}, and by its config.json nothing is multiplied by that: the weights are "
                "quantised in a format that is not served, or quantization_config is missing"
            )


def check_numbers(folder: Path, unread: Iterable[str]) -> None:
    """Of weights that no quantization_config speaks of: `unread` as in `check_unread`. Raises ModelLoadError for whole
    numbers, which transformers casts as if they were the weights."""
    names = set(unread)
    for tensor in _stored(folder):
        if tensor.dtype[0] in "IU" and _WEIGHT.fullmatch(tensor.name) and tensor.name not in names:
            raise ModelLoadError(
                f"{folder}: {tensor.name} is whole numbers ({tensor.dtype}), and config.json has no "
                "quantization_config: the weights are quantised in a format that is not served"
            )


def _stored(folder: Path) -> list[StoredTensor]:
    try:
        return stored_tensors(folder)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder} has no whole *.safetensors files: {error}") from error
