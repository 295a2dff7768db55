"""Sums over the batches of a step, kept on the device until the step is done. Knows no loss."""

from dataclasses import dataclass

from torch import Tensor

from models.training.objectives import Sums
from models.training.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class Means:
    """What a step, or a pass over the validation data, tells."""

    loss: float
    accuracy: float
    ranked: float | None


class Totals:
    """Adds without waiting for the device; `means` waits once."""

    def __init__(self) -> None:
        self.tokens = 0
        self.counted = 0
        self._sums: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def add(self, sums: Sums, batch: PackedBatch) -> None:
        self.tokens += batch.tokens
        self.counted += sums.counted
        self._sums.append((sums.loss.detach(), sums.correct, sums.ranked))

    def means(self, normaliser: int) -> Means:
        """`normaliser`: learnt tokens, or pairs."""
        loss = sum(float(loss) for loss, _, _ in self._sums)
        correct = sum(int(correct) for _, correct, _ in self._sums)
        ranked = [int(pairs) for _, _, pairs in self._sums if pairs is not None]
        return Means(loss / normaliser, correct / self.counted, sum(ranked) / normaliser if ranked else None)
