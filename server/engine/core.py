"""The engine's loop: receive, schedule, launch, collect, send. Knows no sockets (a Link has them), no text, and
nothing of the model but the Runner in front of it. Decides what a failure costs: a request, a batch or the process."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from server.engine.adapter_loading import AdapterLoading
from server.engine.drafting import DraftStats
from server.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineReady,
    EngineStats,
    FromEngine,
    LoadAdapter,
    RequestFailed,
    Shutdown,
    ToEngine,
    UnloadAdapter,
)
from server.engine.request import Request, RequestState
from server.engine.runner import LaunchedStep, LoadedRunner
from server.engine.scheduler import Event, Scheduler
from server.engine.step import LaunchedRow, ScheduledStep

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.1  # seconds, while stepping
IDLE_INTERVAL = 1.0  # seconds between heartbeats with nothing to do
LOADING_INTERVAL = 0.01  # seconds between looks at adapters that are being read, with nothing else to do
STALLED_INTERVAL = 0.001  # seconds between looks at requests of which none could run
MAX_FAILED_STEPS = 20  # in a row: an engine that only fails is to be replaced


class EngineLost(Exception):  # noqa: N818 - what happened, not what was asked
    """The process can not serve any more and must end."""


class Link(Protocol):
    """The way to the API process. receive() waits up to `timeout` seconds for a first message, then takes all there
    are; a message that could not be read comes back as the RequestFailed to answer it with."""

    def receive(self, timeout: float) -> list[ToEngine | RequestFailed]: ...

    def send(self, messages: list[FromEngine]) -> None: ...


@dataclass(frozen=True, slots=True)
class _InFlight:
    launched: LaunchedStep
    step: ScheduledStep
    rows: list[LaunchedRow]
    launched_at: float


class EngineCore:
    def __init__(self, loaded: LoadedRunner, scheduler: Scheduler, link: Link) -> None:
        self.loaded = loaded
        self.runner = loaded.runner
        self.scheduler = scheduler
        self.link = link
        self.clock = scheduler.clock
        self.loading = AdapterLoading(self.runner.adapters, scheduler.adapters)
        self.draining = False
        self._in_flight: _InFlight | None = None
        self._last_result = 0.0  # when it came; inf: what has run since then is not measured
        self._failed_steps = 0
        self._step_tokens = 0
        self._num_placements = 0
        self._next_stats = 0.0
        self._checked = True  # integrity, since the last step

    def ready(self) -> EngineReady:
        loaded = self.loaded
        return EngineReady(
            model=loaded.model,
            device=loaded.device,
            dtype=loaded.dtype,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=list(loaded.eos_token_ids),
            block_size=self.runner.block_size,
            num_blocks=self.runner.num_blocks,
            kernels=self.runner.kernels,
        )

    def run(self) -> None:
        """Until a Shutdown has come and all that was accepted before it is answered. Raises EngineLost."""
        self.link.send([self.ready()])
        while not self.draining or self.has_work:
            self.turn()
        self.scheduler.check_integrity()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def turn(self) -> None:
        """One round: everything that has arrived, at most one step, one message back."""
        idle = not self.has_work
        timeout = max(0.0, self._next_stats - self.clock()) if idle else 0.0
        if not idle and self._in_flight is None and not self._step_tokens:  # all wait for copies, or for room
            timeout = STALLED_INTERVAL
        if self.loading.is_busy:
            timeout = min(timeout, LOADING_INTERVAL)
        outbox: list[FromEngine] = []
        for message in self.link.receive(timeout):
            outbox += self._accept(message)
        outbox += self.loading.finished()
        outbox += self.scheduler.expire()
        outbox += self._advance()
        now = self.clock()
        if idle and self.has_work:
            self._next_stats = min(self._next_stats, now + STATS_INTERVAL)
        if now >= self._next_stats:
            if not self.has_work and not self._checked:
                self.scheduler.check_integrity()
                self._checked = True
            outbox.append(self.stats())
            self._next_stats = now + (STATS_INTERVAL if self.has_work else IDLE_INTERVAL)
        if outbox:
            self.link.send(outbox)

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        drafts = DraftStats() if scheduler.drafter is None else scheduler.drafter.stats
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=scheduler.cache.pool.num_usable,
            num_free_blocks=scheduler.cache.num_free_blocks,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=scheduler.generation_tokens,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            kernel_calls=self.loaded.kernel_calls(),
            step_tokens=self._step_tokens,
            max_loras=scheduler.adapters.max_loras,
            running_adapters=tuple(scheduler.adapters.running()),
            waiting_adapters=tuple(scheduler.adapters.waiting()),
            adapter_placements=self._num_placements,
            offload=scheduler.cache.offload_stats(),
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
        )

    def _accept(self, message: ToEngine | RequestFailed) -> Sequence[FromEngine]:
        replies: Sequence[FromEngine] = []
        match message:
            case AddRequest(request_id=request_id) if self.draining:
                replies = [RequestFailed(request_id, "server_is_draining", "The server is shutting down.")]
            case AddRequest():
                replies = self.scheduler.add(message)
            case AbortRequests(request_ids=request_ids):
                replies = self.scheduler.abort(request_ids)
                self._forget_slots()
            case LoadAdapter():
                replies = self.loading.load(message)
            case UnloadAdapter():
                replies = [self.loading.unload(message)]
                self._forget_slots()
            case Shutdown():
                self.draining = True
            case RequestFailed():
                replies = [message]
        return replies

    def _advance(self) -> list[Event]:
        """Launches a step, then takes the results of the one before, which ran meanwhile; without overlap, its own."""
        step = self.scheduler.schedule()
        self._step_tokens = 0 if step is None else step.total_tokens
        events: list[Event] = []
        launched: _InFlight | None = None
        if step is not None:
            self._checked = False
            step, events = self._introduce_all(step)
            if step.requests:
                launched, failures = self._launch(step)
                events += failures
            self._forget_slots()
        if not self.loaded.overlaps:
            events += self._collect(launched)
            launched = None
        events += self._collect(self._in_flight)
        self._in_flight = launched
        self._forget_slots()
        return events

    def _introduce_all(self, step: ScheduledStep) -> tuple[ScheduledStep, list[Event]]:
        events: list[Event] = []
        for request in step.admitted:
            try:
                self._introduce(request)
            except Exception as error:  # of this request alone: its parameters, or no memory for its tables
                events += self._fail([request], error)
        return step.living() if events else step, events

    def _introduce(self, request: Request) -> None:
        """Gives the runner what it must know of a request in a new slot."""
        adapter = request.adapter
        if adapter is not None and not adapter.is_placed:
            assert self.runner.adapters is not None  # or there would be no adapter
            self.runner.adapters.place(adapter.number, adapter.slot)
            adapter.is_placed = True
            self._num_placements += 1
        split = request.num_prompt_tokens
        self.runner.add_request(request.slot, request.sampling, request.token_ids[:split])
        if request.num_generated:  # it was preempted
            self.runner.append_known(request.slot, request.token_ids[split:])

    def _launch(self, step: ScheduledStep) -> tuple["_InFlight | None", list[Event]]:
        """Nothing of a step that was not launched counts as computed, so its rows can simply run again in smaller
        batches, after the step in flight."""
        launched_at = self.clock()
        try:
            launched = self.runner.launch(step.batch())
        except self.loaded.out_of_memory as error:
            logger.warning("out of memory in a step of %d rows: %s", len(step.requests), type(error).__name__)
        except Exception as error:
            self._count_failure(error)
            events = self._land()
            return None, events + self._fail(step.living().requests, error)
        else:
            return _InFlight(launched, step, self.scheduler.launched(step), launched_at), []
        # Outside the except block: the error's traceback would keep the failed step's tensors alive.
        events = self._land()
        self.loaded.free_memory()
        return None, events + self._run_in_halves(step.living())

    def _run_in_halves(self, step: ScheduledStep) -> list[Event]:
        if not step.requests:
            return []
        if len(step.requests) == 1:
            message = "The server has not enough memory for this request now."
            return self.scheduler.fail(step.requests, "server_is_overloaded", message)
        events: list[Event] = []
        for half in step.halves():
            launched, failures = self._launch(half)
            events += failures + self._collect(launched)
        return events

    def _land(self) -> list[Event]:
        """The results of the step in flight, if there is one: a launch that failed has kept them waiting."""
        self._last_result = inf
        in_flight, self._in_flight = self._in_flight, None
        return self._collect(in_flight)

    def _collect(self, step: "_InFlight | None") -> list[Event]:
        if step is None:
            return []
        try:
            output = step.launched.collect()
        except Exception as error:
            self._count_failure(error)
            return self._fail(
                [row.request for row in step.rows if row.request.state is not RequestState.FINISHED], error
            )
        self._failed_steps = 0
        self._measure(step)
        return self.scheduler.postprocess(step.rows, output)

    def _measure(self, step: "_InFlight") -> None:
        """The result of a step has come. On the device it began when the one before it ended: what this process does
        meanwhile counts only as far as results come later for it."""
        now = self.clock()
        begin, self._last_result = max(step.launched_at, self._last_result), now
        if begin < inf:
            self.scheduler.observe(step.step, now - begin)

    def _count_failure(self, error: Exception) -> None:
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineLost(f"{self._failed_steps} steps failed in a row: {type(error).__name__}") from error

    def _fail(self, requests: list[Request], error: Exception) -> list[Event]:
        """Fails these requests, if there are any left. Raises EngineLost instead when the device is past use."""
        self._last_result = inf  # probing waits for all that has been launched
        if requests:
            logger.error("%d requests failed", len(requests), exc_info=error)
        try:
            self.loaded.probe()
        except Exception as lost:
            raise EngineLost(f"the device is lost: {type(lost).__name__}") from lost
        return self.scheduler.fail(requests, "server_error", "The server failed while it ran this request.")

    def _forget_slots(self) -> None:
        for slot in self.scheduler.take_released_slots():
            self.runner.remove_request(slot)
        if self.runner.adapters is not None:
            for number in self.scheduler.adapters.take_dropped():
                self.runner.adapters.drop(number)
