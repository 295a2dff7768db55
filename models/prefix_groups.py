"""Shared runs of a step's sequences -> the groups of the attention's passes: arrays first, then tensors of a device.

In a CUDA graph shapes are fixed: as many groups as sequences are always enough, and empty ones cost next to nothing.
Knows no requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from attention_backend.heuristics.decode import DECODE_ROWS
from attention_backend.heuristics.prefix import TILE_ROWS, least_saved_keys
from attention_backend.metadata import SharedPages
from attention_backend.shared_prefix import PrefixGroups
from models.attention_sites import AttentionSite
from models.shared_runs import MOST_LEVELS, Levels, SharedRun, SharingLimits

_LEADERS, _STARTS, _LENS, _CU_ROWS = range(4)
#: Rows of `GroupArrays.groups`.
NUM_FIELDS = 4


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """Read-only. Every query row is in one group of every level; what shares nothing is in groups of length 0."""

    # int32 [levels, 4, groups + 1]: a sequence with the group's table; first key; one past the last; cumulated rows.
    groups: np.ndarray
    own_starts: np.ndarray  # int32 [num_seqs]: the first key of each sequence that no level covers
    max_rows: int  # no group has more


def sharing_limits(
    sites: Sequence[AttentionSite], kv_dtype: torch.dtype, block_size: int, device_type: str
) -> SharingLimits | None:
    """For the layers without windows and chunks; None where no layer could share, or its kernel takes too few rows."""
    shared = [site for site in sites if not site.window and not site.chunk_size]
    if not shared:
        return None
    bytes_per_key = min(site.num_kv_heads * (site.head_dim + site.head_dim_v) for site in shared) * kv_dtype.itemsize
    group = max(site.num_heads // site.num_kv_heads for site in shared)
    # Of float8 pages only the kernel of few rows reads what is shared.
    fp8 = kv_dtype == torch.float8_e4m3fn
    most = DECODE_ROWS if fp8 and device_type == "cuda" else 0
    tile_rows = max(1, TILE_ROWS // group) if most == 0 else most // group
    if most and tile_rows < 2:
        return None
    least_saved_blocks = -(-least_saved_keys(device_type, bytes_per_key) // block_size)
    return SharingLimits(least_saved_blocks, MOST_LEVELS, tile_rows, tile_rows if most else 0, not fp8)


@lru_cache(maxsize=64)
def group_arrays(
    levels: Levels,
    rows: int | tuple[int, ...],
    *,
    block_size: int,
    num_levels: int | None = None,
    num_groups: int | None = None,
    max_rows: int | None = None,
) -> GroupArrays:
    """`rows`: query rows of each sequence, or how many sequences of one row there are (padding included).

    `num_levels` and `num_groups` fix the shape. With `max_rows` larger groups are cut into several, which read the same
    pages. Raises ValueError for what does not fit.
    """
    per_sequence = np.ones(rows, np.int32) if isinstance(rows, int) else np.array(rows, np.int32)
    ends = np.concatenate(([0], np.cumsum(per_sequence)))
    num_seqs, most = len(per_sequence), int(ends[-1]) if max_rows is None else max_rows
    if num_seqs and int(per_sequence.max()) > most:
        raise ValueError(f"a sequence has {per_sequence.max()} query rows, more than a group's {most}")
    cut = [[piece for run in _filled(level, num_seqs) for piece in _pieces(run, ends, most)] for level in levels]
    depth = len(levels) if num_levels is None else num_levels
    width = max(map(len, cut), default=1) if num_groups is None else num_groups
    if len(cut) > depth or max(map(len, cut), default=1) > width:
        raise ValueError(f"{len(cut)} levels of {list(map(len, cut))} groups do not fit {depth} levels of {width}")
    cut += [_pieces(SharedRun(0, num_seqs, 0, 0), ends, most)] * (depth - len(cut))
    groups = np.zeros((depth, NUM_FIELDS, width + 1), np.int32)
    own_starts = np.zeros(num_seqs, np.int32)
    for level, runs in zip(groups, cut, strict=True):
        level[_CU_ROWS] = ends[-1]
        level[_CU_ROWS, 0] = 0
        for g, run in enumerate(runs):
            level[_LEADERS, g], level[_CU_ROWS, g + 1] = run.first, ends[run.end]
            level[_STARTS, g], level[_LENS, g] = run.start * block_size, run.stop * block_size
            if run.stop:
                own_starts[run.first : run.end] = run.stop * block_size
    largest = max((int(ends[run.end] - ends[run.first]) for runs in cut for run in runs), default=0)
    groups.flags.writeable = own_starts.flags.writeable = False
    return GroupArrays(groups, own_starts, largest if num_groups is None else most)


def shared_pages(groups: Tensor, own_starts: Tensor, block_table: Tensor, max_rows: int) -> SharedPages:
    """`GroupArrays` on the device of `block_table` int32 `[num_seqs, max_blocks]`, the table of the same sequences.

    Reads no value, so a CUDA graph may hold it.
    """
    width = groups.shape[2] - 1
    return SharedPages(
        tuple(
            PrefixGroups(
                block_table.index_select(0, level[_LEADERS, :width]),
                level[_LENS, :width],
                level[_CU_ROWS],
                max_rows,
                level[_STARTS, :width],
            )
            for level in groups.unbind(0)
        ),
        own_starts,
    )


def _filled(runs: tuple[SharedRun, ...], num_seqs: int) -> list[SharedRun]:
    """With runs of length 0 for the sequences between."""
    bounds = [SharedRun(0, 0, 0, 0), *runs, SharedRun(num_seqs, num_seqs, 0, 0)]
    filled = []
    for before, after in pairwise(bounds):
        if before.end < after.first:
            filled.append(SharedRun(before.end, after.first, 0, 0))
        if after.first < after.end:
            filled.append(after)
    return filled


def _pieces(run: SharedRun, ends: np.ndarray, max_rows: int) -> list[SharedRun]:
    """As few parts as possible, of whole sequences and at most `max_rows` rows."""
    pieces, first = [], run.first
    while first < run.end:
        end = min(int(np.searchsorted(ends, ends[first] + max_rows, side="right")) - 1, run.end)
        pieces.append(SharedRun(first, end, run.start, run.stop))
        first = end
    return pieces
