"""Losses of a packed batch as sums, so that how a step is packed does not change its mathematics.

Supervised cross-entropy, and DPO (Rafailov et al. 2023, equation 7). Knows no optimiser.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.training.packing import PackedBatch
from models.training.trainable import TrainableModel


@dataclass(frozen=True, slots=True)
class Sums:
    """Over one batch, on its device; the loss carries the graph."""

    loss: Tensor  # float32: of learnt tokens, or of pairs
    correct: Tensor  # learnt tokens (DPO: of the preferred answers) that are the model's likeliest
    counted: int  # how many of those there are
    ranked: Tensor | None = None  # DPO: pairs whose preferred answer gained more


def supervised(model: TrainableModel, batch: PackedBatch) -> Sums:
    logprobs, correct = model.logprobs(batch)
    return Sums(-logprobs.sum(), correct.sum(), correct.numel())


def dpo(model: TrainableModel, batch: PackedBatch, reference: Tensor, beta: float) -> Sums:
    """`reference`: float32 `[pairs, 2]`, the frozen model's log-probabilities of (chosen, rejected)."""
    logprobs, correct = model.logprobs(batch)
    gained = by_sequence(logprobs, batch).view(-1, 2) - reference
    margin = gained[:, 0] - gained[:, 1]
    chosen = torch.cat(correct.split(batch.learnt)[::2])
    return Sums(-functional.logsigmoid(beta * margin).sum(), chosen.sum(), chosen.numel(), (margin > 0).sum())


def by_sequence(logprobs: Tensor, batch: PackedBatch) -> Tensor:
    """`[learnt]` -> `[num_seqs]`, summed. Not by index_add, which adds in any order on a GPU."""
    return torch.stack([part.sum() for part in logprobs.split(batch.learnt)])


def reference_logprobs(model: TrainableModel, batch: PackedBatch) -> Tensor:
    """float32 `[pairs, 2]` of the model without its adapter (or, fully tuned, as it is now)."""
    with model.evaluating(adapter=False):
        return by_sequence(model.logprobs(batch)[0], batch).view(-1, 2)
