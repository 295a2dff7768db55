"""One batch of logits in, one token per row out. What requests choose is data in rows, never a branch in a loop."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.batch import SamplingParams, StepOutput, TokenLogprobs
from models.sampling.filters import apply_min_p, apply_top_k_top_p
from models.sampling.logprobs import LogprobRows, logprob_rows, to_host
from models.sampling.noise import log_exponential, row_keys
from models.sampling.parameters import SlotParameters
from models.sampling.penalties import Penalties
from models.sampling.vocabulary_rows import VocabularyRows

#: Rows are sampled in pieces of at most this many logits, which bounds the float32 temporaries (128 MiB each).
MAX_LOGITS_PER_PIECE = 1 << 25


@dataclass(frozen=True, slots=True)
class _Piece:
    token_ids: Tensor  # int64 [n]
    finite: Tensor  # bool [n]
    logprob_rows: np.ndarray  # rows of the batch that want log probabilities
    logprobs: LogprobRows | None


class Sampler:
    """Holds what outlives a step: the parameters of every slot, token counts and biases of those that use them."""

    def __init__(
        self, *, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._parameters = SlotParameters(max_num_seqs)
        self._penalties = Penalties(self._parameters, max_num_seqs, vocab_size, device)
        self._bias = VocabularyRows(max_num_seqs, vocab_size, torch.float32, device)
        self._rows_per_piece = max(1, MAX_LOGITS_PER_PIECE // vocab_size)

    def add_request(self, slot: int, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """`prompt_token_ids`: the prompt alone, also when the request comes back after a preemption.

        Raises ValueError for a biased token outside of the vocabulary.
        """
        outside = [token for token in sampling.logit_bias if not 0 <= token < self._vocab_size]
        if outside:
            raise ValueError(f"logit_bias names token {outside[0]}, but the vocabulary has {self._vocab_size} tokens")
        self._parameters.set(slot, sampling, len(prompt_token_ids), self._eos_token_ids)
        self._penalties.add_request(slot, prompt_token_ids)
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64, device=self._device)
            values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=self._device)
            self._bias.claim(slot).index_put_((ids,), values)

    def append_known(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens that the request generated before it was added (again)."""
        self._penalties.append_known(slot, token_ids)

    def remove_request(self, slot: int) -> None:
        self._penalties.remove_request(slot)
        self._bias.release(slot)

    def sample(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> StepOutput:
        """logits `[n, vocab]` (any float dtype; may be overwritten), slots and positions of the new tokens int64 `[n]`.

        Waits for the device once, when the tokens are read.
        """
        starts = range(0, len(slots), self._rows_per_piece)
        pieces = [
            self._sample_piece(logits[a : (b := a + self._rows_per_piece)], slots[a:b], positions[a:b]) for a in starts
        ]
        for start, piece in zip(starts, pieces, strict=True):  # only now: a piece that fails must leave no trace
            self._penalties.count(slots[start : start + len(piece.token_ids)], piece.token_ids)
        token_ids = [token for piece in pieces for token in piece.token_ids.tolist()]
        finite = [ok for piece in pieces for ok in piece.finite.tolist()]
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for start, piece in zip(starts, pieces, strict=True):
            if piece.logprobs is not None:
                wanted = self._parameters.num_logprobs[slots[start + piece.logprob_rows]].tolist()
                for row, value in zip(piece.logprob_rows, to_host(piece.logprobs, wanted), strict=True):
                    logprobs[start + row] = value
        return StepOutput(token_ids=token_ids, logprobs=logprobs, finite=finite)

    def _sample_piece(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> _Piece:
        parameters = self._parameters
        finite = logits.sum(-1, dtype=torch.float32).isfinite()  # NaN and Inf both survive a sum
        logits = logits.float()
        wants_logprobs = np.flatnonzero(parameters.num_logprobs[slots] >= 0)
        raw = logits[self._on_device(wants_logprobs)] if wants_logprobs.size else None

        self._forbid_and_bias(logits, slots, positions)
        self._penalties.apply(logits, slots)
        token_ids = self._choose(logits, slots, positions)

        logprobs = None
        if raw is not None:
            chosen = token_ids[self._on_device(wants_logprobs)]
            logprobs = logprob_rows(raw, chosen, int(parameters.num_logprobs[slots].max()))
        return _Piece(token_ids, finite, wants_logprobs, logprobs)

    def _forbid_and_bias(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        rows, ids = self._parameters.forbidden_stops(slots, positions)
        if rows.size:
            logits[self._on_device(rows), self._on_device(ids)] = -torch.inf
        biased = np.flatnonzero(self._parameters.has_bias[slots])
        if biased.size:
            bias = self._bias.table[self._on_device(self._bias.rows(slots[biased]))]
            logits.index_add_(0, self._on_device(biased), bias)

    def _choose(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        greedy = self._parameters.greedy(slots)
        if greedy.all():
            return logits.argmax(-1)
        if not greedy.any():
            return self._draw(logits, slots, positions)
        token_ids = logits.argmax(-1)
        random = np.flatnonzero(~greedy)
        where = self._on_device(random)
        return token_ids.index_copy_(0, where, self._draw(logits[where], slots[random], positions[random]))

    def _draw(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        parameters = self._parameters
        logits.div_(self._on_device(parameters.temperature[slots])[:, None])
        if (parameters.min_p[slots] > 0).any():
            apply_min_p(logits, self._on_device(parameters.min_p[slots]))
        self._filter(logits, slots)
        keys = self._on_device(row_keys(parameters.seed[slots], positions))
        return logits.sub_(log_exponential(keys, self._vocab_size)).argmax(-1)

    def _filter(self, logits: Tensor, slots: np.ndarray) -> None:
        top_k, top_p = self._parameters.top_k[slots], self._parameters.top_p[slots]
        filtered = np.flatnonzero((top_k > 0) | (top_p < 1))
        if filtered.size == 0:
            return
        top_k, top_p = top_k[filtered], top_p[filtered]
        bounded = bool((top_k > 0).all())
        top_k = np.where(top_k > 0, np.minimum(top_k, self._vocab_size), self._vocab_size)
        arguments = (self._on_device(top_k), self._on_device(top_p))
        largest_k = int(top_k.max()) if bounded else None
        if filtered.size == len(slots):
            apply_top_k_top_p(logits, *arguments, largest_k=largest_k)
        else:
            where = self._on_device(filtered)
            logits[where] = apply_top_k_top_p(logits[where], *arguments, largest_k=largest_k)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
