"""The requests that are not done: how they come, and how they end. Knows no step.

Whatever a request holds (blocks, a slot, an adapter, a place in the queue) is free when it has ended."""

from collections.abc import Callable, Iterable, Sequence

from server.engine.adapters import AdapterTable
from server.engine.drafting import Drafter
from server.engine.limits import SchedulerConfig, refusal
from server.engine.messages import AddRequest, RequestFailed, RequestTimes, TokenDelta
from server.engine.request import Request, RequestState
from server.engine.running import RunningRequests
from server.engine.waiting import WaitingQueue

Event = TokenDelta | RequestFailed | RequestTimes


class OpenRequests:
    def __init__(
        self,
        config: SchedulerConfig,
        adapters: AdapterTable,
        waiting: WaitingQueue,
        running: RunningRequests,
        drafter: Drafter | None,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.adapters = adapters
        self.waiting = waiting
        self.running = running
        self.drafter = drafter
        self.clock = clock
        self.by_id: dict[str, Request] = {}
        self._num_seen = 0

    def add(self, message: AddRequest, entered_at: float) -> list[Event]:
        """Queues the request, or says at once why it can never run. `entered_at`: as prompts age by."""
        adapter = None if message.adapter is None else self.adapters.find(message.adapter)
        if adapter is None and message.adapter is not None:  # it was unloaded while the request was on its way
            text = f"The model `{message.adapter}` does not exist or you do not have access to it."
            return [RequestFailed(message.request_id, "model_not_found", text)]
        request = Request(
            message,
            sequence_number=self._num_seen,
            eos_token_ids=self.config.eos_token_ids,
            max_model_len=self.config.max_model_len,
            now=self.clock(),
            adapter=adapter,
        )
        if request.request_id in self.by_id:
            return [RequestFailed(request.request_id, "server_error", "A request with this id is already open.")]
        problem = refusal(request, self.config, self.running.cache)
        if problem is not None:
            return [problem]
        self._num_seen += 1
        request.entered_at = entered_at
        self.by_id[request.request_id] = request
        if adapter is not None:
            self.adapters.open(adapter)
        self.waiting.add(request)
        return []

    def abort(self, request_ids: Iterable[str]) -> list[Event]:
        """Unknown and finished ids are none of our business: aborts race."""
        events: list[Event] = []
        for request_id in request_ids:
            request = self.by_id.get(request_id)
            if request is not None:
                self.end(request)
                events += [TokenDelta(request_id, [], finish_reason="abort"), request.times()]
        self.running.sweep()
        return events

    def fail(self, requests: Sequence[Request], code: str, message: str) -> list[Event]:
        """Ends these requests without a result."""
        events: list[Event] = []
        for request in requests:
            self.end(request)
            events += [RequestFailed(request.request_id, code, message), request.times()]
        self.running.sweep()
        return events

    def expire(self) -> list[Event]:
        """Fails requests that waited for their first step longer than the queue's deadline."""
        limit = self.config.queue_timeout
        if limit is None or not self.waiting:
            return []
        late = self.waiting.arrived_before(self.clock() - limit)
        return self.fail(late, "server_is_overloaded", f"The request waited more than {limit:g} s for a free place.")

    def end(self, request: Request) -> None:
        """It holds nothing any more. It stays among the running ones until those are swept."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        self.running.release(request)
        del self.by_id[request.request_id]
        if request.adapter is not None:
            self.adapters.close(request.adapter)
        if self.drafter is not None:
            self.drafter.forget(request)

    def check_integrity(self) -> None:
        """Raises unless every block, slot and request is accounted for."""
        self.running.cache.check_integrity(list(self.by_id.values()))
        self.running.check_integrity()
        if len(self.waiting) + len(self.running) != len(self.by_id):
            raise AssertionError("a request is neither waiting nor running")
