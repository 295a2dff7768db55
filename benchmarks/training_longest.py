"""The longest sequence that a training step fits into the GPU's memory: predicted from two lengths, then run.

Knows no command line.
"""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.training_steps import Contender, Results, Told, one_step, random_example
from models.training import OutOfMemoryError
from models.training.optimizer import Optimizer
from models.training.out_of_memory import room_for_training
from models.training.trainable import TrainableModel

GRANULE = 2048  # tokens
_STEP_DOWN = 0.96
_RESERVE = 0.97  # of the free memory: the allocator's blocks are never filled wholly
_CPU_BYTES = 2**30  # what is predicted for where there is no GPU: the script can be tried, the number means nothing


def longest(model: TrainableModel, racers: dict[str, Contender], tokens: int, told: Told) -> Results:
    """Per contender: the prediction from `tokens` / 2 and `tokens`, and the longest sequence whose step was run. `told`
    hears of every length that was tried, with all results so far."""
    optimizer = Optimizer(model.parameters, weight_decay=0.0, max_grad_norm=1.0)
    results: Results = {}
    for name, racer in racers.items():
        for found in _of_one(model, racer, optimizer, tokens):
            results[name] = found
            told(f"{name}: {found}", results)
    return results


def predict(short: tuple[int, int], long: tuple[int, int], capacity: int) -> int:
    """From two (tokens, peak bytes): memory grows by the token. A multiple of GRANULE, at least one."""
    slope = (long[1] - short[1]) / (long[0] - short[0])
    if slope <= 0:
        return long[0]
    return max(GRANULE, int((capacity - (long[1] - slope * long[0])) / slope) // GRANULE * GRANULE)


def _of_one(model: TrainableModel, racer: Contender, optimizer: Optimizer, tokens: int) -> Iterator[dict[str, Any]]:
    """What is known after each length that was tried; the last has the longest that fits."""
    cuda = model.device.type == "cuda"

    def peak(length: int) -> int:
        if cuda:
            torch.cuda.empty_cache()
        return one_step(model, racer, random_example(length, model.config.vocab_size), optimizer).peak_bytes

    peaks: list[tuple[int, int]] = []
    try:
        for length in (tokens // 2, tokens):
            peaks.append((length, peak(length)))
            yield {"peak_bytes": list(peaks)}
    except OutOfMemoryError as error:
        yield {"peak_bytes": peaks, "failed": str(error)}
        return
    capacity = int(_RESERVE * (room_for_training(model.device) or 0)) if cuda else _CPU_BYTES
    length = predict(peaks[0], peaks[1], capacity)
    found: dict[str, Any] = {"peak_bytes": peaks, "predicted_tokens": length}
    yield found
    if not cuda:
        return
    too_long: list[int] = []
    while length > tokens:
        try:
            taken = peak(length)
        except OutOfMemoryError:
            too_long.append(length)
            yield found | {"too_long_tokens": list(too_long)}
            length = int(length * _STEP_DOWN) // GRANULE * GRANULE
        else:
            found |= {"too_long_tokens": too_long, "longest_tokens": length, "longest_peak_gib": _gib(taken)}
            yield found
            return
    yield found | {"too_long_tokens": too_long, "longest_tokens": tokens, "longest_peak_gib": _gib(peaks[1][1])}


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 2)
