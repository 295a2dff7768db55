"""The longest sequence that a training step fits into the GPU's memory: predicted from two lengths, then run.

Knows no command line.
"""

from typing import Any

import torch

from benchmarks.training_steps import Contender, Results, Told, one_step, random_example
from models.training import OutOfMemoryError
from models.training.optimizer import Optimizer
from models.training.trainable import TrainableModel

GRANULE = 2048  # tokens
_STEP_DOWN = 0.96
_RESERVE = 0.985  # of the free memory: the allocator's blocks are never filled wholly
_CPU_BYTES = 2**30  # what is predicted for where there is no GPU: the script can be tried, the number means nothing


def longest(model: TrainableModel, racers: dict[str, Contender], tokens: int, told: Told) -> Results:
    """Per contender: the prediction from `tokens` / 2 and `tokens`, and the longest sequence whose step was run. `told`
    hears of every contender, with all results so far."""
    results: Results = {}
    for name, racer in racers.items():
        results[name] = _of_one(model, racer, tokens)
        told(f"{name}: {results[name]}", results)
    return results


def predict(short: tuple[int, int], long: tuple[int, int], capacity: int) -> int:
    """From two (tokens, peak bytes): memory grows by the token. A multiple of GRANULE, at least one."""
    slope = (long[1] - short[1]) / (long[0] - short[0])
    if slope <= 0:
        return long[0]
    return max(GRANULE, int((capacity - (long[1] - slope * long[0])) / slope) // GRANULE * GRANULE)


def _of_one(model: TrainableModel, racer: Contender, tokens: int) -> dict[str, Any]:
    optimizer = Optimizer(model.parameters, weight_decay=0.0, max_grad_norm=1.0)
    cuda = model.device.type == "cuda"

    def peak(length: int) -> int:
        if cuda:
            torch.cuda.empty_cache()
        return one_step(model, racer, random_example(length, model.config.vocab_size), optimizer).peak_bytes

    try:
        peaks = [(length, peak(length)) for length in (tokens // 2, tokens)]
    except OutOfMemoryError as error:
        return {"failed": str(error)}
    if not cuda:
        return {"peak_bytes": peaks, "predicted_tokens": predict(peaks[0], peaks[1], _CPU_BYTES)}
    capacity = int(_RESERVE * (torch.cuda.mem_get_info(model.device)[0] + torch.cuda.memory_reserved(model.device)))
    predicted = length = predict(peaks[0], peaks[1], capacity)
    while length >= tokens:
        try:
            taken = peak(length)
        except OutOfMemoryError:
            length = int(length * _STEP_DOWN) // GRANULE * GRANULE
        else:
            return {
                "peak_bytes": peaks,
                "predicted_tokens": predicted,
                "longest_tokens": length,
                "longest_peak_gib": round(taken / 2**30, 2),
            }
    return {"peak_bytes": peaks, "predicted_tokens": predicted, "longest_tokens": tokens}
