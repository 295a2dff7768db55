"""One batch of logits in, one token per row out. What requests choose is data in rows, never a branch in a loop."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.batch import SamplingParams, StepOutput
from models.copies import to_device
from models.sampling.choice import MAX_LOGITS_PER_PIECE, choose
from models.sampling.filters import apply_min_p, apply_top_k_top_p
from models.sampling.launched import LaunchedSample, WantedLogprobs
from models.sampling.logprobs import logprob_rows
from models.sampling.noise import row_keys
from models.sampling.parameters import NO_LOGPROBS, SlotParameters
from models.sampling.penalties import Penalties
from models.sampling.vocabulary_rows import VocabularyRows


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
        #: Of which the logits are worked on at once.
        self.rows_per_piece = max(1, MAX_LOGITS_PER_PIECE // vocab_size)

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
            ids = self._on_device(np.fromiter(sampling.logit_bias, np.int64))
            values = self._on_device(np.fromiter(sampling.logit_bias.values(), np.float32))
            self._bias.claim(slot).index_put_((ids,), values)

    def append_known(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens that the request generated before it was added (again)."""
        self._penalties.append_known(slot, token_ids)

    def remove_request(self, slot: int) -> None:
        self._penalties.remove_request(slot)
        self._bias.release(slot)

    def sample(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> StepOutput:
        """As `launch`, and waits for the tokens."""
        return self.launch(logits, slots, positions)[1].collect()

    def launch(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> tuple[Tensor, LaunchedSample]:
        """The tokens on the device, int64 `[n]`, and on their way back. Waits for nothing, unless a CPU computes.

        logits `[n, vocab]` (any float dtype, not changed), slots and positions of the new tokens int64 `[n]`.
        """
        temperature, keys = self.choice_parameters(slots, positions)
        temperature[self._parameters.need_more(slots, positions)] = 0  # chosen again by `complete`
        token_ids, finite = choose(logits, temperature, keys)
        return token_ids, self.complete(logits, token_ids, finite, slots, positions)

    def choice_parameters(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a choice by temperature and noise alone needs: float32 `[n]`, and keys int32 `[n, 2]`."""
        return self._parameters.temperature[slots], row_keys(self._parameters.seed[slots], positions)

    def complete(
        self, logits: Tensor, token_ids: Tensor, finite: Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> LaunchedSample:
        """Chooses anew, in place, for the rows that ask for more than temperature and noise."""
        special = np.flatnonzero(self._parameters.need_more(slots, positions))
        logprobs = []
        for start in range(0, len(special), self.rows_per_piece):
            rows = special[start : start + self.rows_per_piece]
            wanted = self._choose_again(logits, token_ids, rows, slots[rows], positions[rows])
            if wanted is not None:
                logprobs.append(wanted)
        launched = LaunchedSample(token_ids, finite, logprobs)
        self._penalties.count(slots, token_ids)  # only now: what fails must leave no trace, for it may be tried again
        return launched

    def _choose_again(
        self, logits: Tensor, token_ids: Tensor, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> WantedLogprobs | None:
        parameters = self._parameters
        where = self._on_device(rows)
        values = logits[where].float()
        wants = np.flatnonzero(parameters.num_logprobs[slots] != NO_LOGPROBS)
        raw = values[self._on_device(wants)] if wants.size else None

        self._forbid_and_bias(values, slots, positions)
        self._penalties.apply(values, slots)
        temperature, keys = self.choice_parameters(slots, positions)
        filtered = np.flatnonzero(parameters.filtered(slots))
        if filtered.size:
            # Filters look at probabilities, so these rows are divided here; a division by one then changes nothing.
            picked = self._on_device(filtered)
            values[picked] = self._filter(
                values[picked] / self._on_device(temperature[filtered])[:, None], slots[filtered]
            )
            temperature[filtered] = 1
        chosen, _ = choose(values, temperature, keys)
        token_ids.index_copy_(0, where, chosen)
        if raw is None:
            return None
        most = int(parameters.num_logprobs[slots].max())
        logprobs = logprob_rows(raw, chosen[self._on_device(wants)], most).on_host()
        return WantedLogprobs(rows[wants].tolist(), parameters.num_logprobs[slots[wants]].tolist(), logprobs)

    def _forbid_and_bias(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        rows, ids = self._parameters.forbidden_stops(slots, positions)
        if rows.size:
            logits[self._on_device(rows), self._on_device(ids)] = -torch.inf
        biased = np.flatnonzero(self._parameters.has_bias[slots])
        if biased.size:
            bias = self._bias.table[self._on_device(self._bias.rows(slots[biased]))]
            logits.index_add_(0, self._on_device(biased), bias)

    def _filter(self, logits: Tensor, slots: np.ndarray) -> Tensor:
        """In place. Rows are divided by their temperature."""
        parameters = self._parameters
        if (parameters.min_p[slots] > 0).any():
            apply_min_p(logits, self._on_device(parameters.min_p[slots]))
        top_k, top_p = parameters.top_k[slots], parameters.top_p[slots]
        if not ((top_k > 0) | (top_p < 1)).any():
            return logits
        bounded = bool((top_k > 0).all())
        top_k = np.where(top_k > 0, np.minimum(top_k, self._vocab_size), self._vocab_size)
        largest_k = int(top_k.max()) if bounded else None
        return apply_top_k_top_p(logits, self._on_device(top_k), self._on_device(top_p), largest_k=largest_k)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)
