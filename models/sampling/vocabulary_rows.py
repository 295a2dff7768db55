"""Vocabulary-wide rows for the few requests that need one (token counts, biases), claimed and freed by slot.

A dense `[max_num_seqs, vocab_size]` table would cost hundreds of MB for a big vocabulary; most requests need no row.
"""

import numpy as np
import torch
from torch import Tensor

_FIRST_ROWS = 8


class VocabularyRows:
    """Grows by doubling, up to one row per slot. Rows are zero when claimed."""

    def __init__(self, max_num_seqs: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_rows = max_num_seqs
        self._row_of_slot = np.full(max_num_seqs, -1, np.int64)
        self._free: list[int] = []
        self.table = torch.zeros(0, vocab_size, dtype=dtype, device=device)

    def claim(self, slot: int) -> Tensor:
        """The row of `slot`, zeroed: `[vocab_size]`, a view."""
        self.release(slot)
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._row_of_slot[slot] = row
        return self.table[row].zero_()

    def release(self, slot: int) -> None:
        row = int(self._row_of_slot[slot])
        if row >= 0:
            self._free.append(row)
            self._row_of_slot[slot] = -1

    def find(self, slot: int) -> Tensor | None:
        row = int(self._row_of_slot[slot])
        return self.table[row] if row >= 0 else None

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """Row numbers of slots that all hold one."""
        return self._row_of_slot[slots]

    def _grow(self) -> None:
        old = self.table.shape[0]
        new = min(max(_FIRST_ROWS, 2 * old), self._max_rows)
        self.table = torch.cat([self.table, self.table.new_zeros(new - old, self.table.shape[1])])
        self._free.extend(range(old, new))
