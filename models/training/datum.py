"""What one call of a session learns from: token ids, the token wanted after each, and numbers for the loss.

Packs data into forwards. Knows no loss and no model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from models.training import packing
from models.training.calls import ALLOWED_INPUTS, REQUIRED_INPUTS, LossName
from models.training.errors import ExampleError
from models.training.examples import Example
from models.training.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class Datum:
    """`targets[i]` is wanted after `tokens[: i + 1]`. int64 and float32 `[n]`, on the host."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor | None = None
    logprobs: Tensor | None = None  # of the targets, when they were sampled
    advantages: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True, slots=True)
class DatumBatch:
    """One forward: the packed sequences, and their numbers, float32 `[tokens]` on the device."""

    packed: PackedBatch
    weights: Tensor
    logprobs: Tensor | None
    advantages: Tensor | None


def check(data: Sequence[Datum], loss: LossName, *, vocab_size: int, max_length: int) -> None:
    """Raises ExampleError for the first datum that the loss cannot be taken of."""
    if not data:
        raise ExampleError("there are no data")
    for index, datum in enumerate(data):
        problem = _problem(datum, loss, vocab_size, max_length)
        if problem is not None:
            raise ExampleError(f"data[{index}]: {problem}", index)


def _problem(datum: Datum, loss: LossName, vocab_size: int, max_length: int) -> str | None:
    length = len(datum)
    if not 0 < length <= max_length:
        return f"a sequence has 1 to {max_length} tokens here, not {length}"
    for name in ("targets", "weights", "logprobs", "advantages"):
        problem = _input_problem(name, getattr(datum, name), length, loss)
        if problem is not None:
            return problem
    for name in ("tokens", "targets"):
        ids: Tensor = getattr(datum, name)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            return f"a token id of its {name} is outside the vocabulary of {vocab_size}"
    return None


def _input_problem(name: str, values: Tensor | None, length: int, loss: LossName) -> str | None:
    if values is None:
        return f"{loss} needs {name}" if name in REQUIRED_INPUTS[loss] else None
    if name not in ("targets", *ALLOWED_INPUTS[loss]):
        return f"{loss} takes no {name}"
    return None if values.numel() == length else f"{length} tokens but {values.numel()} {name}"


def batches(data: Sequence[Datum], budget: int, device: torch.device) -> Iterator[DatumBatch]:
    """All data, packed into forwards of up to `budget` tokens; `packed.indices` says which are where."""
    sizes = [Example((0,) * len(datum), ()) for datum in data]
    for indices in packing.pack(sizes, range(len(data)), budget):
        yield _build([data[i] for i in indices], indices, device)


def _build(data: Sequence[Datum], indices: tuple[int, ...], device: torch.device) -> DatumBatch:
    lengths = [len(datum) for datum in data]
    total = sum(lengths)
    packed = PackedBatch(
        indices=indices,
        input_ids=torch.cat([datum.tokens for datum in data]).to(device)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths]).to(device)[None],
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device),
        max_length=max(lengths),
        rows=torch.arange(total, device=device),
        labels=torch.cat([datum.targets for datum in data]).to(device),
        learnt=tuple(lengths),
    )

    def gather(name: str) -> Tensor | None:
        parts: list[Tensor] = [values for datum in data if (values := getattr(datum, name)) is not None]
        return torch.cat(parts).to(device) if parts else None

    weights = torch.cat([torch.ones(len(d)) if d.weights is None else d.weights for d in data]).to(device)
    return DatumBatch(packed, weights, gather("logprobs"), gather("advantages"))
