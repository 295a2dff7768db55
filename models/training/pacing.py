"""Training that leaves time to others on its device: while somebody is answering, it works for a share of the time.

Knows neither who answers nor where a model's layers begin, and imports no torch.
"""

import time
from collections.abc import Callable

LOOK_SECONDS = 0.01  # between two looks, during a rest, whether it is still needed


class Pacer:
    """Work that a device has queued cannot be taken back. So while somebody is answering, every piece of work is waited
    for before the next one is queued, and followed by a rest of (1 - share) / share times as long.

    It changes when work is done, and nothing of the work.
    """

    def __init__(
        self,
        is_answering: Callable[[], bool],
        share: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`share`: above 0, at most 1. `is_answering` is asked often. Raises ValueError."""
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {share!r}")
        self.is_answering = is_answering
        self._rest_by_work = (1 - share) / share
        self._clock = clock
        self._sleep = sleep
        self._began: float | None = None  # the piece of work since the last boundary; None: nobody was answering there

    def begin(self) -> None:
        """Work begins. What was before it (a caller that thought, a checkpoint that was written) kept no device busy:
        no rest follows it."""
        self._began = None

    def boundary(self, synchronise: Callable[[], object]) -> None:
        """Between two pieces of work. `synchronise` returns when the device has done what is queued; it is called only
        while somebody is answering, and what was queued before counts from then on."""
        if not self.is_answering():
            self._began = None
            return
        began = self._clock() if self._began is None else self._began
        synchronise()
        self._rest((self._clock() - began) * self._rest_by_work)
        self._began = self._clock()

    def _rest(self, seconds: float) -> None:
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0 and self.is_answering():
            self._sleep(min(left, LOOK_SECONDS))
