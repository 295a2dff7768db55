"""Whether fp8 weights are whole blocks of their scales, by the headers of their files. Reads no weights.

transformers (5.23) derives a block's size from the number of scales: 576 rows with 5 scales of 128 rows each fail, and
192 rows with 2 of them become two blocks of 96, which are other weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import ModelLoadError
from models.stored_weights import stored_tensors

_SCALES = "_scale_inv"


def check_blocks(folder: Path, settings: Mapping[str, Any]) -> None:
    """`settings`: quantization_config of config.json. Raises ModelLoadError."""
    block = settings.get("weight_block_size")
    if block is None:
        return
    try:
        shapes = {tensor.name: tensor.shape for tensor in stored_tensors(folder)}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder} has no whole *.safetensors files: {error}") from error
    for name, scales in shapes.items():
        weight = shapes.get(name.removesuffix(_SCALES), ()) if name.endswith(_SCALES) else ()
        sides = list(zip(weight[-2:], block, scales[-2:], strict=False))
        if any(side % size and -(-side // size) == count > 1 for side, size, count in sides):
            raise ModelLoadError(
                f"the weights are quantised (fp8) in blocks of {block[0]} x {block[1]}, and {list(weight)} of "
                f"{name.removesuffix(_SCALES)} is not made of whole ones, which is not served"
            )
