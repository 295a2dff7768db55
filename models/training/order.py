"""Which examples an optimiser step learns from: a pure function of (seed, step), the same on every machine for ever.

Knows no tensor and no random state.
"""

from functools import lru_cache
from hashlib import blake2b


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    return -(-num_examples // batch_size)


def step_examples(step: int, num_examples: int, batch_size: int, seed: int) -> tuple[int, ...]:
    """The indices of the examples of a step, counted from 0. No step crosses an epoch's end."""
    epoch, within = divmod(step, steps_per_epoch(num_examples, batch_size))
    return epoch_order(epoch, num_examples, seed)[within * batch_size : (within + 1) * batch_size]


@lru_cache(maxsize=2)
def epoch_order(epoch: int, num_examples: int, seed: int) -> tuple[int, ...]:
    """A permutation of range(num_examples): sorted by a hash, because no library promises its shuffles for ever."""
    prefix = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")

    def key(index: int) -> bytes:
        return blake2b(prefix + index.to_bytes(8, "little"), digest_size=16).digest()

    return tuple(sorted(range(num_examples), key=key))


def step_seed(step: int, seed: int) -> int:
    """Where every random number of a step (dropout) starts, so that a resumed run draws what it would have drawn."""
    digest = blake2b(f"dropout {seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
