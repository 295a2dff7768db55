"""The kernel copies just what the CPU's path copies, through strided pages and layers of different sizes."""

import pytest
import torch
from torch import Tensor

from attention_backend.page_copy import PageCopy

SHAPES = (((8, 64, 128), (8, 64, 128)), ((1, 16, 8), (3, 16, 80)), ((4, 128, 192), (4, 128, 128)))
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


def arrays(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, num_blocks: int) -> list[Tensor]:
    """The last array is the odd half of a larger one. Built of bytes, NaN patterns included."""
    g = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        raw = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=g, dtype=torch.uint8)
        return raw.view(dtype)

    return [*(make(num_blocks, *shape) for shape in shapes), make(num_blocks, 2, *shapes[-1])[:, 1]]


def on_device(pages: list[Tensor], device: torch.device) -> list[Tensor]:
    """With the strides kept."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x) for x in pages]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 64])
def test_rows_and_pages_are_what_the_cpu_makes_of_them(
    dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], count: int, device: torch.device
) -> None:
    pages = arrays(shapes, dtype, 2 * count + 1)
    ours = on_device(pages, device)
    expected, got = PageCopy(pages), PageCopy(ours)
    order = torch.randperm(2 * count + 1, generator=torch.Generator().manual_seed(1)).int()
    source, target = order[:count].contiguous(), order[count : 2 * count].contiguous()
    rows = torch.zeros(count, expected.row_bytes, dtype=torch.uint8)
    rows_there = rows.to(device)
    expected.gather(source, rows)
    got.gather(source.to(device), rows_there)
    assert torch.equal(rows_there.cpu(), rows)
    expected.scatter(rows, target)
    got.scatter(rows_there, target.to(device))
    for x, y in zip(pages, ours, strict=True):
        assert torch.equal(y.cpu().contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))


@pytest.mark.gpu
def test_no_rows_are_no_launch(device: torch.device) -> None:
    copy = PageCopy([torch.zeros(2, 1, 16, 8, device=device)])
    copy.gather(
        torch.empty(0, dtype=torch.int32, device=device),
        torch.empty(0, copy.row_bytes, dtype=torch.uint8, device=device),
    )
