"""The calls of one model as futures: in the order of their sequence numbers, each once, however often it is sent.

Pure bookkeeping on one event loop: knows no process and no HTTP.
"""

import asyncio
import time

from server.errors import InvalidRequest, LongwaveError, SequenceConflict, ServerOverloaded
from server.training.calls import Call, Outcome, digest


class Future:
    """A call that was taken, and what came of it."""

    def __init__(self, model_id: str, seq_id: int, call: Call) -> None:
        self.request_id = f"{model_id}:{seq_id}"
        self.seq_id = seq_id
        self.digest = digest(call)
        self.call: Call | None = call  # until it has ended: calls are large
        self.outcome: Outcome | LongwaveError | None = None
        self.ended_at = 0.0  # time.monotonic()
        self.ended = asyncio.Event()

    def end(self, outcome: Outcome | LongwaveError) -> None:
        """The first end counts."""
        if self.outcome is None:
            self.outcome, self.call, self.ended_at = outcome, None, time.monotonic()
            self.ended.set()


class CallSequence:
    def __init__(self, model_id: str, *, max_pending: int, max_results: int) -> None:
        self.next_seq_id = 1
        self._model_id = model_id
        self._max_pending = max_pending
        self._max_results = max_results
        self._futures: dict[int, Future] = {}
        self._changed = asyncio.Event()

    @property
    def pending(self) -> list[Future]:
        """Those that have not ended, in their order."""
        return [self._futures[seq] for seq in sorted(self._futures) if self._futures[seq].outcome is None]

    @property
    def free_seq_id(self) -> int:
        """The lowest number that no call has had: with it, whoever has lost count goes on."""
        free = self.next_seq_id
        while free in self._futures:
            free += 1
        return free

    def find(self, seq_id: int) -> Future | None:
        return self._futures.get(seq_id)

    def submit(self, seq_id: int | None, call: Call) -> Future:
        """The call's future: the one it has already, when it was sent before. Without `seq_id` it is the last one.

        Raises SequenceConflict, InvalidRequest for a number too far ahead, ServerOverloaded when too many wait.
        """
        if seq_id is None:
            seq_id = max(self.next_seq_id, max(self._futures, default=0) + 1)
        known = self._futures.get(seq_id)
        if known is not None:
            if known.digest != digest(call):
                raise SequenceConflict(f"seq_id {seq_id} was used for another call.", param="seq_id")
            return known
        if seq_id < self.next_seq_id:
            raise SequenceConflict(
                f"seq_id {seq_id} was used before, and its result is no longer kept; the next is {self.next_seq_id}.",
                param="seq_id",
            )
        if len(self.pending) >= self._max_pending:  # before the reach: a number that was not sent is never to blame
            raise ServerOverloaded(f"{self._max_pending} calls of this model have not ended. Try again later.")
        if seq_id >= self.next_seq_id + self._max_pending:
            raise InvalidRequest(
                f"seq_id {seq_id} is too far ahead: the next is {self.next_seq_id}, and {self._max_pending} calls may "
                "wait.",
                param="seq_id",
            )
        return self.add(seq_id, call)

    def add(self, seq_id: int, call: Call) -> Future:
        future = self._futures[seq_id] = Future(self._model_id, seq_id, call)
        self._changed.set()
        return future

    async def next(self, gap_seconds: float) -> Future:
        """Waits for the call whose turn it is. Where one does not come within `gap_seconds`, those that wait for it
        fail; it may still come later."""
        deadline = None  # of the gap that calls wait behind
        while True:
            while (future := self._futures.get(self.next_seq_id)) is not None:
                if future.outcome is None:
                    return future
                self.next_seq_id += 1  # it failed while it waited for its turn
            self._changed.clear()
            if not any(future.seq_id > self.next_seq_id for future in self.pending):  # others run already
                deadline = None
            elif deadline is None:
                deadline = asyncio.get_running_loop().time() + gap_seconds
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                self._fail_behind_gap(f"within {gap_seconds:g} s")

    def pass_on(self, future: Future) -> None:
        """The next one may run; this one has ended, or ends by itself."""
        self.next_seq_id = max(self.next_seq_id, future.seq_id + 1)

    def close(self) -> None:
        """No call comes any more: those that wait for one fail."""
        self._fail_behind_gap("before the server was shut down")

    def _fail_behind_gap(self, limit: str) -> None:
        missing = self.free_seq_id
        for future in self.pending:
            if future.seq_id > missing:
                text = f"The call waited for the one with seq_id {missing}, which has not come {limit}."
                future.end(InvalidRequest(text, param="seq_id"))

    def fail(self, error: LongwaveError) -> None:
        """Everything that has not ended."""
        for future in self.pending:
            future.end(error)

    def forget(self, before: float) -> None:
        """Results from before that moment, and the oldest beyond what is kept."""
        ended = [future for future in self._futures.values() if future.outcome is not None]
        ended.sort(key=lambda future: future.ended_at)
        surplus = len(ended) - self._max_results
        for at, future in enumerate(ended):
            if (at < surplus or future.ended_at < before) and future.seq_id < self.next_seq_id:
                del self._futures[future.seq_id]
