"""What /metrics says of low-level training: plain numbers, kept by whoever does the work. Knows no names of metrics."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TrainingStats:
    """Since this server started; `models` is the number of live ones now."""

    models: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind of call, and "succeeded" or "failed"
    tokens: int = 0  # of forward and forward_backward
    crashes: int = 0  # training processes that ended by themselves
