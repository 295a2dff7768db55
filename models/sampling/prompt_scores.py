"""Log-probabilities and ranks of prompts' own tokens: of a step's rows after which the next token is known. Knows no
model.

As those of sampled tokens, they are of the model's own distribution (logprobs.py).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from models.batch import PromptLogprobs, ScoredRows
from models.copies import to_device
from models.sampling.logprobs import LogprobRows, logprob_rows


class PromptScores:
    """Of one step, a few rows at a time: the logits of all of them never exist together."""

    def __init__(self, scored: Sequence[ScoredRows], device: torch.device) -> None:
        self._scored = scored
        targets = np.concatenate([np.asarray(rows.targets, np.int64) for rows in scored])
        self._targets = to_device(targets, device)
        self._most = max(rows.num_top for rows in scored)
        self._pieces: list[LogprobRows] = []
        self._num_added = 0

    def add(self, logits: Tensor) -> None:
        """Of the next rows: `[m, vocab]`, any float dtype. Their copies to the host are under way afterwards."""
        targets = self._targets[self._num_added : self._num_added + len(logits)]
        self._num_added += len(logits)
        self._pieces.append(logprob_rows(logits.float(), targets, self._most).on_host())

    def collect(self) -> list[PromptLogprobs | None]:
        """Of each sequence, once the copies are there; None where a number is not finite."""
        logprobs = _joined(piece.chosen for piece in self._pieces).astype(np.float32)
        ranks = _joined(piece.rank for piece in self._pieces).astype(np.int32)
        top_ids = _joined(piece.top_ids for piece in self._pieces).astype(np.int32)
        top_logprobs = _joined(piece.top_logprobs for piece in self._pieces).astype(np.float32)
        found: list[PromptLogprobs | None] = []
        end = 0
        for rows in self._scored:
            start, end = end, end + len(rows.targets)
            of_tokens, of_top = logprobs[start:end], top_logprobs[start:end, : rows.num_top]
            if not (np.isfinite(of_tokens).all() and np.isfinite(of_top).all()):
                found.append(None)
                continue
            arrays = of_tokens, ranks[start:end], top_ids[start:end, : rows.num_top], of_top
            found.append(PromptLogprobs(of_top.shape[1], *(array.tobytes() for array in arrays)))
        return found


def _joined(pieces: Iterable[Tensor]) -> np.ndarray:
    return np.concatenate([piece.numpy() for piece in pieces])
