"""Which fp8 weights are refused for the sizes of their blocks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.errors import ModelLoadError
from models.quantized_blocks import check_blocks

BLOCKS = {"weight_block_size": [128, 128]}


def folder(path: Path, weight: tuple[int, ...], scales: tuple[int, ...]) -> Path:
    tensors = {"a.weight": torch.zeros(weight, dtype=torch.uint8), "a.weight_scale_inv": torch.zeros(scales)}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("weight", "scales"),
    [((576, 256), (5, 2)), ((192, 256), (2, 2)), ((256, 192), (2, 2)), ((4, 192, 128), (4, 2, 1))],
)
def test_blocks_that_are_not_whole_are_refused(
    tmp_path: Path, weight: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    with pytest.raises(ModelLoadError, match=r"128 x 128, and \[.*\] of a\.weight is not made of whole ones"):
        check_blocks(folder(tmp_path, weight, scales), BLOCKS)


@pytest.mark.parametrize(
    ("weight", "scales"),
    [((256, 384), (2, 3)), ((64, 128), (1, 1)), ((4, 256, 128), (4, 2, 1)), ((192, 96), ()), ((192, 96), (6, 3))],
)
def test_whole_blocks_and_scales_of_other_sizes_are_left_to_transformers(
    tmp_path: Path, weight: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    check_blocks(folder(tmp_path, weight, scales), BLOCKS)
    check_blocks(tmp_path, {"weight_block_size": None})
