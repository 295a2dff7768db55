"""What /metrics says of fine-tuning: plain numbers, kept by whoever does the work. Knows no names of metrics."""

from collections import Counter
from dataclasses import dataclass, field

from server.finetune.records import Status


@dataclass(slots=True)
class FineTuningStats:
    """`jobs` is as the store last said; the others count since this server started."""

    jobs: dict[str, int] = field(default_factory=dict)  # by status
    steps: int = 0
    tokens: int = 0
    crashes: int = 0
    waits: int = 0  # of jobs that were put off for want of room
    storage_failures: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # by status

    def end(self, status: Status) -> None:
        self.ended[status.value] += 1
