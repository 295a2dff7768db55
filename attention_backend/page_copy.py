"""Whole blocks of a KV cache as rows of bytes: all pages of one number, gathered from every layer and put back.

Knows no transfer and nothing of what is in a page."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes that a thread moves at once


class PageCopy:
    """Over the arrays of a KV cache, each `[num_blocks, ...]` of any dtype. `row_bytes` are the bytes of a block."""

    def __init__(self, arrays: Sequence[Tensor]) -> None:
        """Raises ValueError for arrays whose pages are not contiguous, or not made of 16-byte pieces, and for arrays of
        several devices."""
        self._arrays = list(arrays)
        self._pages = [_as_bytes(array) for array in arrays]
        self.device = arrays[0].device
        if any(array.device != self.device for array in arrays):
            raise ValueError(f"arrays must lie on one device, got {sorted({str(array.device) for array in arrays})}")
        self.row_bytes = 0
        table = []
        for array, pages in zip(arrays, self._pages, strict=True):
            size, stride = pages.shape[1], pages.stride(0)
            if size % _ALIGNMENT or stride % _ALIGNMENT or array.data_ptr() % _ALIGNMENT:
                raise ValueError(f"pages of shape {tuple(array.shape[1:])} are not made of {_ALIGNMENT}-byte pieces")
            table.append((array.data_ptr(), stride, size, self.row_bytes))
            self.row_bytes += size
        self._table = torch.tensor(table, dtype=torch.int64, device=self.device)

    def gather(self, blocks: Tensor, rows: Tensor) -> None:
        """Row i of `rows` (uint8 `[n, row_bytes]`) becomes block `blocks[i]` (int32 `[n]`, contiguous).

        Both are on the arrays' device, and each row begins at a multiple of 16 bytes.
        Raises TypeError for dtypes, ValueError for shapes, strides and devices.
        """
        self._copy(blocks, rows, to_pages=False)

    def scatter(self, rows: Tensor, blocks: Tensor) -> None:
        """The other way. No block may be named twice."""
        self._copy(blocks, rows, to_pages=True)

    def _copy(self, blocks: Tensor, rows: Tensor, *, to_pages: bool) -> None:
        if blocks.dtype != torch.int32:
            raise TypeError(f"blocks must be torch.int32, got {blocks.dtype}")
        if blocks.dim() != 1 or not blocks.is_contiguous():
            raise ValueError(f"blocks must be [n], contiguous, got {tuple(blocks.shape)}, strides {blocks.stride()}")
        if blocks.device != self.device or rows.device != self.device:
            raise ValueError(f"blocks are on {blocks.device}, rows on {rows.device}, the pages on {self.device}")
        if rows.dtype != torch.uint8 or rows.shape != (blocks.shape[0], self.row_bytes) or rows.stride(1) != 1:
            raise ValueError(f"rows must be uint8 [{blocks.shape[0]}, {self.row_bytes}], got {tuple(rows.shape)}")
        if rows.stride(0) % _ALIGNMENT or rows.data_ptr() % _ALIGNMENT:
            raise ValueError(f"rows must begin at multiples of {_ALIGNMENT} bytes, got strides {rows.stride()}")
        if self.device.type == "cuda":
            from attention_backend.kernels.copy_pages import copy_pages

            copy_pages(self._table, blocks, rows, to_pages=to_pages)
            return
        start = 0
        for pages in self._pages:
            part = rows[:, start : start + pages.shape[1]]
            start += pages.shape[1]
            if to_pages:
                pages[blocks] = part
            else:
                part.copy_(pages[blocks])


def _as_bytes(array: Tensor) -> Tensor:
    """uint8 `[num_blocks, bytes of a page]`, of the same memory."""
    if not array[0].is_contiguous():
        raise ValueError(f"the pages of an array of strides {array.stride()} are not contiguous")
    flat = torch.as_strided(array, (array.shape[0], array[0].numel()), (array.stride(0), 1))
    return flat.view(torch.uint8)
