"""Which blocks each slot's tokens are in, on host and device. Only what changed is copied. Knows no model."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.batch import ScheduledSeq


class BlockTables:
    """A row per slot, and one more, of zeros: rows of a padded step go to block 0, which belongs to nobody."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, device: torch.device) -> None:
        self.host = np.zeros((max_num_seqs + 1, max_blocks_per_seq), np.int32)
        self.device = torch.from_numpy(self.host) if device.type == "cpu" else torch.from_numpy(self.host).to(device)
        self._written = np.zeros(max_num_seqs, np.int64)  # entries of each row that are valid
        self._next_position = np.full(max_num_seqs, -1, np.int64)  # where a slot goes on if nothing interrupted it

    @property
    def padding_slot(self) -> int:
        return len(self.host) - 1

    def forget(self, slot: int) -> None:
        """The next sequence in this slot has other blocks."""
        self._next_position[slot] = -1

    def update(
        self, seqs: Sequence[ScheduledSeq], slots: np.ndarray, computed: np.ndarray, totals: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Takes over new entries: of a slot that does not go on where it stopped (preempted, reused) all of them.

        Returns what `apply` must write on the device before the step: places int64 `[n]` and blocks int32 `[n]`.
        """
        self._written[slots[self._next_position[slots] != computed]] = 0
        self._next_position[slots] = totals
        lengths = np.fromiter((len(seq.block_ids) for seq in seqs), np.int64, len(seqs))
        first = self._written[slots]
        width = self.host.shape[1]
        places: list[np.ndarray] = []
        for i in np.flatnonzero(lengths - first):
            slot, start, end = int(slots[i]), int(first[i]), int(lengths[i])
            self.host[slot, start:end] = seqs[int(i)].block_ids[start:]
            self._written[slot] = end
            places.append(np.arange(slot * width + start, slot * width + end))
        if not places:
            return _NOTHING
        changed = np.concatenate(places)
        return changed, self.host.reshape(-1)[changed]

    def apply(self, places: Tensor, blocks: Tensor) -> None:
        """In the order of the current stream. On a CPU the device's table is the host's."""
        if self.device.is_cuda and len(places):
            self.device.view(-1).index_copy_(0, places, blocks)


_NOTHING = (np.empty(0, np.int64), np.empty(0, np.int32))
