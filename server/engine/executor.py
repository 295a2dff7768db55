"""Runs scheduled steps, on a device one ahead of their results, and measures them. Decides what a failure costs: a
request, a batch or the process. Knows the scheduler, and nothing of the model but the Runner in front of it."""

import logging
from dataclasses import dataclass
from math import inf

from server.engine.launch_timing import LaunchTiming
from server.engine.open_requests import Event
from server.engine.request import Request, RequestState
from server.engine.runner import LaunchedStep, LoadedRunner
from server.engine.scheduler import Scheduler
from server.engine.step import LaunchedRow, ScheduledStep

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 20  # in a row: an engine that only fails is to be replaced


class EngineLost(Exception):  # noqa: N818 - what happened, not what was asked
    """The process can not serve any more and must end."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    launched: LaunchedStep
    step: ScheduledStep
    rows: list[LaunchedRow]
    launched_at: float


class StepExecutor:
    """Its methods raise EngineLost."""

    def __init__(self, loaded: LoadedRunner, scheduler: Scheduler) -> None:
        self.loaded = loaded
        self.runner = loaded.runner
        self.scheduler = scheduler
        self.clock = scheduler.clock
        self.num_placements = 0  # of adapters in slots
        self.timing = LaunchTiming()
        self._in_flight: _InFlight | None = None
        self._last_result = 0.0  # when it came; inf: what has run since then is not measured
        self._failed_steps = 0

    @property
    def has_step_in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def patience(self) -> float:
        """Seconds for which the next step need not be launched, as one runs that is not about to end; 0: at once."""
        running = self._in_flight
        if running is None or self._last_result == inf or _is_done(running.launched):
            return 0.0
        begin = max(running.launched_at, self._last_result)
        return self.timing.patience(self.scheduler.step_time.predict(running.step.work), self.clock() - begin)

    def advance(self, step: ScheduledStep | None, *, begun: float, waited: bool) -> list[Event]:
        """Launches a step, then takes the results of the one before, which ran meanwhile; without overlap, its own.

        `begun`: when it began to be scheduled; `waited`: that was put off by `patience`.
        """
        events: list[Event] = []
        launched: _InFlight | None = None
        if step is not None:
            step, events = self._introduce_all(step)
            if step.requests:
                launched, failures = self._launch(step)
                events += failures
            if launched is not None:
                self.timing.launched(self.clock() - begun)
                if waited and self._in_flight is not None:
                    self.timing.waited(too_long=_is_done(self._in_flight.launched))
            self.forget_slots()
        if not self.loaded.overlaps:
            events += self._collect(launched)
            launched = None
        events += self._collect(self._in_flight)
        self._in_flight = launched
        self.forget_slots()
        return events

    def forget_slots(self) -> None:
        """Tells the runner of slots and adapters that nobody uses any more."""
        for slot in self.scheduler.running.take_released_slots():
            self.runner.remove_request(slot)
        if self.runner.adapters is not None:
            for number in self.scheduler.adapters.take_dropped():
                self.runner.adapters.drop(number)

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
            self.num_placements += 1
        split = request.num_prompt_tokens
        self.runner.add_request(request.slot, request.sampling, request.token_ids[:split])
        if request.num_generated:  # it was preempted
            self.runner.append_known(request.slot, request.token_ids[split:])

    def _launch(self, step: ScheduledStep) -> tuple[_InFlight | None, list[Event]]:
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
            return self.scheduler.open.fail(step.requests, "server_is_overloaded", message)
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

    def _collect(self, in_flight: _InFlight | None) -> list[Event]:
        if in_flight is None:
            return []
        rows = in_flight.rows
        try:
            output = in_flight.launched.collect()
        except Exception as error:
            self._count_failure(error)
            return self._fail([row.request for row in rows if row.request.state is not RequestState.FINISHED], error)
        self._failed_steps = 0
        self._measure(in_flight)
        return self.scheduler.postprocess(rows, output)

    def _measure(self, collected: _InFlight) -> None:
        """A step's result has just come. The device began it when it was launched, or when it was done with the one
        before: what this process did meanwhile counts only as far as the result had to wait for it."""
        now = self.clock()
        begin, self._last_result = max(collected.launched_at, self._last_result), now
        if begin < inf:
            self.scheduler.observe(collected.step, now - begin)

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
        return self.scheduler.open.fail(requests, "server_error", "The server failed while it ran this request.")


def _is_done(launched: LaunchedStep) -> bool:
    try:
        return launched.is_done()
    except Exception:  # so it is over; collect() says how
        return True
