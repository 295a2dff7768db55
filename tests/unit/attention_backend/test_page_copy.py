"""Blocks as rows of bytes: what is gathered is what the pages hold, and it comes back to just the blocks named."""

import pytest
import torch
from torch import Tensor

from attention_backend.page_copy import PageCopy

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def arrays(dtype: torch.dtype, num_blocks: int = 9) -> list[Tensor]:
    """Layers of different sizes; the last is one half of a larger array."""
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 16, 32), (2, 16, 16), (1, 16, 64))
    made = [torch.randn(num_blocks, *shape, generator=g).to(dtype) for shape in shapes]
    return [*made, torch.randn(num_blocks, 2, 16, 8, generator=g).to(dtype)[:, 1]]


def raw(array: Tensor) -> Tensor:
    """uint8 `[num_blocks, bytes of a page]`."""
    return array.flatten(1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_all_pages_of_a_block_one_after_another(dtype: torch.dtype) -> None:
    pages = arrays(dtype)
    copy = PageCopy(pages)
    assert copy.row_bytes == sum(array[0].numel() for array in pages) * dtype.itemsize
    blocks = torch.tensor([5, 0, 8], dtype=torch.int32)
    rows = torch.zeros(3, copy.row_bytes, dtype=torch.uint8)
    copy.gather(blocks, rows)
    assert torch.equal(rows, torch.cat([raw(array)[blocks.long()] for array in pages], dim=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_back_to_the_blocks_named_and_to_no_other(dtype: torch.dtype) -> None:
    pages = arrays(dtype)
    copy = PageCopy(pages)
    before = [raw(array).clone() for array in pages]
    rows = torch.zeros(3, copy.row_bytes, dtype=torch.uint8)
    copy.gather(torch.tensor([5, 0, 8], dtype=torch.int32), rows)
    copy.scatter(rows, torch.tensor([1, 2, 7], dtype=torch.int32))
    for array, old in zip(pages, before, strict=True):
        old[[1, 2, 7]] = old[[5, 0, 8]]
        assert torch.equal(raw(array), old)


def test_pages_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        PageCopy([torch.zeros(4, 16, 32).transpose(1, 2)])
    with pytest.raises(ValueError, match="16-byte"):
        PageCopy([torch.zeros(4, 3)])


def test_rows_of_another_size_are_refused() -> None:
    copy = PageCopy(arrays(torch.float32))
    with pytest.raises(ValueError, match="rows must be uint8"):
        copy.gather(torch.tensor([1], dtype=torch.int32), torch.zeros(2, copy.row_bytes, dtype=torch.uint8))
