"""The engine's loop: receive, schedule, execute, postprocess, send. Knows no sockets (a Link has them), no text, and
nothing of the model but the Runner in front of it. Decides what a failure costs: a request, a batch or the process."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Protocol

from models.batch import NO_ADAPTER, ScheduledSeq, StepBatch
from server.engine.adapter_loading import AdapterLoading
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
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Event, ScheduledStep, Scheduler

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.1  # seconds, while stepping
IDLE_INTERVAL = 1.0  # seconds between heartbeats with nothing to do
LOADING_INTERVAL = 0.01  # seconds between looks at adapters that are being read, with nothing else to do
MAX_FAILED_STEPS = 20  # in a row: an engine that only fails is to be replaced


class EngineLost(Exception):  # noqa: N818 - what happened, not what was asked
    """The process can not serve any more and must end."""


class Link(Protocol):
    """The way to the API process. receive() waits up to `timeout` seconds for a first message, then takes all there
    are; a message that could not be read comes back as the RequestFailed to answer it with."""

    def receive(self, timeout: float) -> list[ToEngine | RequestFailed]: ...

    def send(self, messages: list[FromEngine]) -> None: ...


class EngineCore:
    def __init__(
        self, loaded: LoadedRunner, scheduler: Scheduler, link: Link, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.loaded = loaded
        self.runner = loaded.runner
        self.scheduler = scheduler
        self.link = link
        self.clock = clock
        self.loading = AdapterLoading(self.runner.adapters, scheduler.adapters)
        self.draining = False
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
        while not self.draining or self.scheduler.has_work:
            self.turn()
        self.scheduler.check_integrity()

    def turn(self) -> None:
        """One round: everything that has arrived, at most one step, one message back."""
        idle = not self.scheduler.has_work
        timeout = max(0.0, self._next_stats - self.clock()) if idle else 0.0
        if self.loading.is_busy:
            timeout = min(timeout, LOADING_INTERVAL)
        outbox: list[FromEngine] = []
        for message in self.link.receive(timeout):
            outbox += self._accept(message)
        outbox += self.loading.finished()
        outbox += self.scheduler.expire()
        outbox += self._step()
        now = self.clock()
        if idle and self.scheduler.has_work:
            self._next_stats = min(self._next_stats, now + STATS_INTERVAL)
        if now >= self._next_stats:
            if not self.scheduler.has_work and not self._checked:
                self.scheduler.check_integrity()
                self._checked = True
            outbox.append(self.stats())
            self._next_stats = now + (STATS_INTERVAL if self.scheduler.has_work else IDLE_INTERVAL)
        if outbox:
            self.link.send(outbox)

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
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

    def _step(self) -> list[Event]:
        step = self.scheduler.schedule()
        if step is None:
            self._step_tokens = 0
            return []
        self._checked = False
        self._step_tokens = step.total_tokens
        events: list[Event] = []
        for request in step.admitted:
            try:
                self._introduce(request)
            except Exception as error:  # of this request alone: its parameters, or no memory for its tables
                events += self._fail([request], error)
        if events:
            step = _rows(step, [request.state is RequestState.RUNNING for request in step.requests])
        if step.requests:
            events += self._execute(step)
        self._forget_slots()
        return events

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

    def _execute(self, step: ScheduledStep) -> list[Event]:
        """Nothing of a step that failed counts as computed, so its rows can simply run again in smaller batches."""
        try:
            output = self.runner.execute(_batch(step))
        except self.loaded.out_of_memory as error:
            logger.warning("out of memory in a step of %d rows: %s", len(step.requests), type(error).__name__)
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise EngineLost(f"{self._failed_steps} steps failed in a row: {type(error).__name__}") from error
            return self._fail(step.requests, error)
        else:
            self._failed_steps = 0
            return self.scheduler.postprocess(step, output)
        # Outside the except block: the error's traceback would keep the failed step's tensors alive.
        self.loaded.free_memory()
        if len(step.requests) == 1:
            message = "The server has not enough memory for this request now."
            return self.scheduler.fail(step.requests, "server_is_overloaded", message)
        first_half = [row < len(step.requests) // 2 for row in range(len(step.requests))]
        return self._execute(_rows(step, first_half)) + self._execute(_rows(step, [not row for row in first_half]))

    def _fail(self, requests: list[Request], error: Exception) -> list[Event]:
        """Fails these requests. Raises EngineLost instead when the device is past use."""
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


def _batch(step: ScheduledStep) -> StepBatch:
    """Block tables are passed by reference: the step is over before the scheduler touches them again."""
    seqs = []
    for request, count in zip(step.requests, step.num_tokens, strict=True):
        start = request.num_computed
        end = start + count
        tokens = request.token_ids
        adapter_slot = NO_ADAPTER if request.adapter is None else request.adapter.slot
        samples = end == len(tokens)
        seqs.append(ScheduledSeq(request.slot, tokens[start:end], start, request.block_ids, samples, adapter_slot))
    return StepBatch(tuple(seqs))


def _rows(step: ScheduledStep, wanted: Sequence[bool]) -> ScheduledStep:
    return replace(
        step, requests=list(compress(step.requests, wanted)), num_tokens=list(compress(step.num_tokens, wanted))
    )
