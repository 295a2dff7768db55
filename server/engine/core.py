"""The engine's loop: receive, schedule, run a step, send. Knows no sockets (a Link has them), no text, no tensors."""

from collections.abc import Callable, Sequence
from typing import Protocol

from models.stages import Stages
from server.engine.adapter_loading import AdapterLoading
from server.engine.drafting import DraftStats
from server.engine.executor import StepExecutor
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
from server.engine.open_requests import Event
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Scheduler

STATS_INTERVAL = 0.1  # seconds, while stepping
IDLE_INTERVAL = 1.0  # seconds between heartbeats with nothing to do
LOADING_INTERVAL = 0.01  # seconds between looks at adapters that are being read, with nothing else to do
STALLED_INTERVAL = 0.001  # seconds between looks at requests of which none could run
RUNNING_INTERVAL = 0.002  # seconds between looks at a step that runs, while the next one is not launched yet


class Link(Protocol):
    """The way to the API process. receive() waits up to `timeout` seconds for a first message, then takes all there
    are; a message that could not be read comes back as the RequestFailed to answer it with."""

    def receive(self, timeout: float) -> list[ToEngine | RequestFailed]: ...

    def send(self, messages: list[FromEngine]) -> None: ...


class EngineCore:
    def __init__(
        self,
        loaded: LoadedRunner,
        scheduler: Scheduler,
        link: Link,
        stages: Stages | None = None,
        expected_turn: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`expected_turn`: seconds that a large step would take, as far as is known now."""
        self.loaded = loaded
        self.runner = loaded.runner
        self.scheduler = scheduler
        self.link = link
        self._stages = stages or Stages()
        self.clock = scheduler.clock
        self.loading = AdapterLoading(self.runner.adapters, scheduler.adapters)
        self.draining = False
        self.executor = StepExecutor(loaded, scheduler)
        self._step_tokens = 0
        self._is_stalled = False  # the last turn had nothing to run and nothing to wait for
        self._next_stats = 0.0
        self._longest_turn = 0.0
        self._expected_turn = expected_turn
        self._checked = True  # integrity, since the last step
        self._prepared = False  # whether nothing was left to do in the last quiet moment

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
            stages=self._stages.seconds,
            sampling_defaults=loaded.sampling_defaults,
        )

    def run(self) -> None:
        """Until a Shutdown has come and all that was accepted before it is answered. Raises EngineLost."""
        self.link.send([self.ready()])
        while not self.draining or self.has_work:
            self.turn()
        self.scheduler.open.check_integrity()
        self.scheduler.cache.flush()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.executor.has_step_in_flight

    def turn(self) -> None:
        """One round: everything that has arrived, at most one step, one message back."""
        idle = not self.has_work
        timeout = max(0.0, self._next_stats - self.clock()) if idle else 0.0
        if not idle and self._is_stalled:  # all wait for copies, or for room
            timeout = STALLED_INTERVAL
        if self.loading.is_busy:
            timeout = min(timeout, LOADING_INTERVAL)
        if idle and not self._prepared:
            timeout = 0.0
        outbox: list[FromEngine] = []
        messages = self.link.receive(timeout)
        begin = self.clock()
        if idle and not messages:
            self._use_quiet_moment(begin)
        for message in messages:
            outbox += self._accept(message)
        waited = False
        while (patience := self.executor.patience) > 0.0:  # who comes until then is in the next step
            waited = True
            for message in self.link.receive(min(patience, RUNNING_INTERVAL)):
                outbox += self._accept(message)
        outbox += self.loading.finished()
        outbox += self.scheduler.open.expire()
        outbox += self._step(waited=waited)
        now = self.clock()
        self._longest_turn = max(self._longest_turn, now - begin)
        if idle and self.has_work:
            self._next_stats = min(self._next_stats, now + STATS_INTERVAL)
        is_last_word = bool(outbox) and not self.has_work  # whoever hears it finds it counted
        if is_last_word or now >= self._next_stats:
            outbox.append(self.stats())
            self._next_stats = now + (STATS_INTERVAL if self.has_work else IDLE_INTERVAL)
        if outbox:
            self.link.send(outbox)

    def _use_quiet_moment(self, now: float) -> None:
        """For what nobody waits for: one thing that is prepared, which may take 0.1 s, and a look at the books."""
        is_due = now >= self._next_stats
        if is_due or not self._prepared:
            self._prepared = not self.loaded.prepare()
        if is_due and not self._checked:
            self.scheduler.open.check_integrity()
            self._checked = True

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
            adapter_placements=self.executor.num_placements,
            offload=scheduler.cache.offload_stats(),
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            missing_graphs=self.loaded.missing_graphs(),
            longest_turn=max(self._longest_turn, self._expected_turn()),
            corrupted_requests=scheduler.corrupted_requests,
        )

    def _step(self, *, waited: bool) -> list[Event]:
        begun = self.clock()
        step = self.scheduler.schedule()
        self._step_tokens = 0 if step is None else step.total_tokens
        self._is_stalled = step is None and not self.executor.has_step_in_flight
        self._checked = self._checked and step is None
        return self.executor.advance(step, begun=begun, waited=waited)

    def _accept(self, message: ToEngine | RequestFailed) -> Sequence[FromEngine]:
        replies: Sequence[FromEngine] = []
        match message:
            case AddRequest(request_id=request_id) if self.draining:
                replies = [RequestFailed(request_id, "server_is_draining", "The server is shutting down.")]
            case AddRequest():
                replies = self.scheduler.add(message)
            case AbortRequests(request_ids=request_ids):
                replies = self.scheduler.open.abort(request_ids)
                self.executor.forget_slots()
            case LoadAdapter():
                replies = self.loading.load(message)
            case UnloadAdapter():
                replies = [self.loading.unload(message)]
                self.executor.forget_slots()
            case Shutdown():
                self.draining = True
            case RequestFailed():
                replies = [message]
        return replies
