"""The mask rule of `AttentionArgs` as one interval of keys `[low, high)` per query row. Knows no scores."""

import torch
from torch import Tensor

from attention_backend.problem import (
    DESC_CHUNK,
    DESC_LEFT,
    DESC_Q_OFFSET,
    DESC_RIGHT,
    DESC_START,
    DESC_STOP,
    AttentionArgs,
)


def row_intervals(
    args: AttentionArgs, sequences: Tensor | slice, num_rows: int, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(low, high, position), int64 `[n, num_rows]`, of the n sequences picked; row i stands at `position[i]`.

    `num_keys` is how many key slots each of them has; `high <= low` means that the row sees nothing.
    """
    device = args.q.device
    left: Tensor | int
    right: Tensor | int
    chunk: Tensor | int
    if args.mask_desc is not None:
        desc = args.mask_desc[sequences].long().unsqueeze(-1)  # [n, 8, 1]
        start, stop, q_offset = desc[:, DESC_START].clamp_min(0), desc[:, DESC_STOP], desc[:, DESC_Q_OFFSET]
        left, right, chunk = desc[:, DESC_LEFT], desc[:, DESC_RIGHT], desc[:, DESC_CHUNK]
    else:
        count = _count(args, sequences)
        stop = _column(args.seqused_k, sequences, count, num_keys, device).clamp_max(num_keys)
        start = _column(args.leftpad_k, sequences, count, 0, device)
        q_offset = stop - num_rows
        left, right, chunk = args.window_left, args.window_right, args.chunk_size
    position = torch.arange(num_rows, device=device) + q_offset
    low, high = start.clamp_min(0).expand_as(position), stop.clamp_max(num_keys).expand_as(position)
    if isinstance(left, int):
        low = torch.maximum(low, position - left) if left >= 0 else low
    else:
        low = torch.where(left >= 0, torch.maximum(low, position - left), low)
    if isinstance(right, int):
        high = torch.minimum(high, position + (right + 1)) if right >= 0 else high
    else:
        high = torch.where(right >= 0, torch.minimum(high, position + right + 1), high)
    if isinstance(chunk, Tensor) or chunk > 0:
        size = chunk.clamp_min(1) if isinstance(chunk, Tensor) else chunk
        first = start + (position - start).div(size, rounding_mode="floor") * size
        chunk_low, chunk_high = torch.maximum(low, first), torch.minimum(high, first + size)
        if isinstance(chunk, Tensor):
            chunk_low, chunk_high = torch.where(chunk > 0, chunk_low, low), torch.where(chunk > 0, chunk_high, high)
        low, high = chunk_low, chunk_high
    return low, high, position


def _count(args: AttentionArgs, sequences: Tensor | slice) -> int:
    if isinstance(sequences, slice):
        return len(range(*sequences.indices(args.batch)))
    return sequences.shape[0]


def _column(values: Tensor | None, sequences: Tensor | slice, count: int, default: int, device: torch.device) -> Tensor:
    """int64 `[n, 1]`"""
    if values is None:
        return torch.full((count, 1), default, dtype=torch.int64, device=device)
    return values[sequences].long().unsqueeze(-1)
