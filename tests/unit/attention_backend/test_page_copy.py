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


@pytest.mark.parametrize(
    ("blocks", "error", "words"),
    [
        (torch.tensor([3, 1]), TypeError, "blocks must be torch.int32, got torch.int64"),
        (torch.tensor([3, 0, 1, 0], dtype=torch.int32)[::2], ValueError, r"contiguous, got \(2,\), strides \(2,\)"),
        (torch.tensor([[3], [1]], dtype=torch.int32), ValueError, r"blocks must be \[n\]"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), ValueError, "blocks are on meta, rows on cpu"),
    ],
)
def test_block_numbers_that_a_kernel_would_misread_are_refused(
    blocks: Tensor, error: type[Exception], words: str
) -> None:
    pages = arrays(torch.float32)
    before = [array.clone() for array in pages]
    copy = PageCopy(pages)
    rows = torch.ones(2, copy.row_bytes, dtype=torch.uint8)
    with pytest.raises(error, match=words):
        copy.gather(blocks, rows)
    with pytest.raises(error, match=words):
        copy.scatter(rows, blocks)
    assert (rows == 1).all()
    assert all(torch.equal(x, y) for x, y in zip(pages, before, strict=True))


def test_rows_between_16_bytes_and_arrays_of_two_devices_are_refused() -> None:
    copy = PageCopy(arrays(torch.float32))
    rows = torch.zeros(1, copy.row_bytes + 16, dtype=torch.uint8)[:, 4 : 4 + copy.row_bytes]
    with pytest.raises(ValueError, match="rows must begin at multiples of 16 bytes"):
        copy.gather(torch.tensor([1], dtype=torch.int32), rows)
    with pytest.raises(ValueError, match=r"on one device, got \['cpu', 'meta'\]"):
        PageCopy([torch.zeros(4, 16), torch.zeros(4, 16, device="meta")])
