"""Many waits, mostly short, each with a limit, and one timer for all of them: asyncio.timeout sets one for each, which
takes longer than to write a token. Must not know what is waited for."""

import asyncio
from math import inf
from types import TracebackType
from typing import Self


class Patience:
    """For one wait at a time, `with patience.limit(seconds): await ...`. To be closed when there are no more."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._rings = inf  # when the timer does, on the loop's clock,
        self._due = inf  # and when the wait is to end: mostly later, for the timer was set for an earlier one
        self._waiting: asyncio.Task[object] | None = None
        self._cancelled_before = 0
        self._is_over = False

    def limit(self, seconds: float | None) -> Self:
        """None: the wait may last for ever. Raises TimeoutError at the end of the block when it took longer."""
        self._due = inf if seconds is None else asyncio.get_running_loop().time() + seconds
        return self

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings = None, inf

    def __enter__(self) -> None:
        self._waiting = asyncio.current_task()
        assert self._waiting is not None
        self._cancelled_before = self._waiting.cancelling()
        if self._due < self._rings:
            self._set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._due = inf
        waited, self._waiting = self._waiting, None
        if self._is_over and waited is not None:
            self._is_over = False
            # As in asyncio.timeout: who else has cancelled the task is to see it end.
            if waited.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _set(self) -> None:
        self.close()
        self._rings = self._due
        self._timer = asyncio.get_running_loop().call_at(self._due, self._ring)

    def _ring(self) -> None:
        now, self._timer, self._rings = self._rings, None, inf
        if self._waiting is None or self._due == inf:
            return
        if self._due > now:
            self._set()
        else:
            self._is_over = True
            self._waiting.cancel()
