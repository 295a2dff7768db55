"""What each slot asked for, as host arrays, so that a step gathers its rows without a Python loop. Knows no tensors."""

import os
from collections.abc import Sequence

import numpy as np

from models.batch import SamplingParams

#: Below this a request is greedy (vLLM's threshold).
GREEDY_TEMPERATURE = 1e-5
#: `num_logprobs` of a slot that wants none.
NO_LOGPROBS = -1


class SlotParameters:
    """One row per slot; arrays are indexed by slot numbers."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.prompt_len = np.zeros(max_num_seqs, np.int64)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.has_bias = np.zeros(max_num_seqs, np.bool_)
        self.stop_ids = np.full((max_num_seqs, 4), -1, np.int64)  # padded with -1

    def set(self, slot: int, sampling: SamplingParams, prompt_len: int, eos_token_ids: Sequence[int]) -> None:
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = max(sampling.top_k, 0)  # vLLM writes "off" as -1 too
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        self.seed[slot] = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self.num_logprobs[slot] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        self.prompt_len[slot] = prompt_len
        self.min_tokens[slot] = sampling.min_tokens
        self.has_bias[slot] = bool(sampling.logit_bias)
        self._set_stop_ids(slot, (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)))

    def need_more(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows, bool `[n]`, that ask for more than temperature and seed. `positions`: of the tokens to be sampled."""
        return (
            self.filtered(slots)
            | self.penalised(slots)
            | self.has_bias[slots]
            | (self.num_logprobs[slots] != NO_LOGPROBS)
            | (positions - self.prompt_len[slots] < self.min_tokens[slots])
        )

    def filtered(self, slots: np.ndarray) -> np.ndarray:
        """Greedy rows are not: the most likely token stays."""
        filters = (self.top_k[slots] > 0) | (self.top_p[slots] < 1) | (self.min_p[slots] > 0)
        return filters & ~self.greedy(slots)

    def greedy(self, slots: np.ndarray) -> np.ndarray:
        return self.temperature[slots] < GREEDY_TEMPERATURE

    def penalised(self, slots: np.ndarray) -> np.ndarray:
        return (
            (self.repetition_penalty[slots] != 1.0)
            | (self.presence_penalty[slots] != 0.0)
            | (self.frequency_penalty[slots] != 0.0)
        )

    def forbidden_stops(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row, token id) pairs that `min_tokens` forbids now. `positions`: of the tokens about to be sampled."""
        too_early = positions - self.prompt_len[slots] < self.min_tokens[slots]
        ids = self.stop_ids[slots]
        rows, columns = np.nonzero((ids >= 0) & too_early[:, None])
        return rows, ids[rows, columns]

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids
