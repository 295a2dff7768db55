"""Repetition, presence and frequency penalties over the tokens of each request. Formulas: OpenAI, vLLM."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.copies import to_device
from models.sampling.parameters import SlotParameters
from models.sampling.vocabulary_rows import VocabularyRows


class Penalties:
    """Presence and frequency count generated tokens only; repetition looks at prompt and generated tokens."""

    def __init__(self, parameters: SlotParameters, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._parameters = parameters
        self._device = device
        self._generated = VocabularyRows(max_num_seqs, vocab_size, torch.int32, device)
        self._prompt = VocabularyRows(max_num_seqs, vocab_size, torch.bool, device)

    def add_request(self, slot: int, prompt_token_ids: Sequence[int]) -> None:
        if not self._parameters.penalised(np.array([slot]))[0]:
            return
        self._generated.claim(slot)
        ids = to_device(np.asarray(prompt_token_ids, np.int64), self._device)
        self._prompt.claim(slot).index_fill_(0, ids, True)

    def remove_request(self, slot: int) -> None:
        self._generated.release(slot)
        self._prompt.release(slot)

    def append_known(self, slot: int, token_ids: Sequence[int]) -> None:
        row = self._generated.find(slot)
        if row is not None:
            ids = to_device(np.asarray(token_ids, np.int64), self._device)
            row.index_add_(0, ids, torch.ones_like(ids, dtype=row.dtype))

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        """In place on the rows that asked. logits float32 `[n, vocab]`."""
        rows = np.flatnonzero(self._parameters.penalised(slots))
        if rows.size == 0:
            return
        slots = slots[rows]
        counts = self._generated.table[self._on_device(self._generated.rows(slots))]
        seen = self._prompt.table[self._on_device(self._prompt.rows(slots))] | (counts > 0)
        where = self._on_device(rows)
        values = logits[where]
        repetition = self._on_device(self._parameters.repetition_penalty[slots])[:, None]
        values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
        values -= self._on_device(self._parameters.frequency_penalty[slots])[:, None] * counts
        values -= self._on_device(self._parameters.presence_penalty[slots])[:, None] * (counts > 0)
        logits[where] = values

    def count(self, slots: np.ndarray, token_ids: Tensor) -> None:
        """Notes the tokens just sampled. token_ids int64 `[n]`."""
        rows = np.flatnonzero(self._parameters.penalised(slots))
        if rows.size:
            where = (self._on_device(self._generated.rows(slots[rows])), token_ids[self._on_device(rows)])
            self._generated.table.index_put_(where, self._generated.table.new_ones(()), accumulate=True)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)
