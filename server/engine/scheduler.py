"""Which tokens run in the next step, and what their results mean: schedule(), launched() and postprocess(). Plain data
structures: knows no tensors, no sockets, no clock but the one it is given, and nothing asynchronous.

A step may be scheduled while the one before still runs: its tokens count as there, though nobody knows them yet.

Every running decode has its token in every step (and guesses of further ones, see drafting.py: then none until those
are compared with what the step sampled); prompts share what is left of the step's token budget (prefill.py).
A request is admitted only when its whole prompt and one more block fit. When a decode finds no block, the youngest
request gives up its blocks and is computed again later: its generated tokens are kept, so its answer is the same. So
does one of a tenant that holds more than its part while another waits for its own (reclaim.py)."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from models.batch import StepOutput
from server.engine.adapters import AdapterTable
from server.engine.burst import Burst
from server.engine.drafting import Drafter, num_equal
from server.engine.fairness import FairShare
from server.engine.kv_cache import KVCache
from server.engine.limits import SchedulerConfig
from server.engine.messages import AddRequest, TokenDelta
from server.engine.open_requests import Event, OpenRequests
from server.engine.prefill import PrefillPlan
from server.engine.reclaim import Reclaim
from server.engine.request import Request, RequestState
from server.engine.running import RunningRequests
from server.engine.sharing import PrefixSharing
from server.engine.step import LaunchedRow, ScheduledStep, StepAssembly
from server.engine.step_time import StepTimeModel, StepWork
from server.engine.waiting import WaitingQueue


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        adapters: AdapterTable | None = None,
        clock: Callable[[], float] = time.monotonic,
        sharing: PrefixSharing | None = None,
        drafter: Drafter | None = None,
        step_time: StepTimeModel | None = None,
    ) -> None:
        """`sharing`: who finds common prefixes, where the runner can read them once. `drafter`: who guesses tokens.
        Whoever runs the steps measures them, by the same clock."""
        self.config = config
        self.cache = cache
        self.adapters = AdapterTable() if adapters is None else adapters
        self.clock = clock
        self.drafter = drafter
        self.assembly = StepAssembly(cache.block_size, sharing)
        self.step_time = StepTimeModel() if step_time is None else step_time
        self.fairness = FairShare()
        self.burst = Burst()
        self.waiting = WaitingQueue(cache, self.adapters, self.step_time, self.fairness)  # preempted ones included
        self.running = RunningRequests(cache, self.adapters, sharing, config.max_num_seqs)
        self.reclaim = Reclaim(self.adapters, self.waiting, self.running, self.fairness)
        self.open = OpenRequests(config, self.adapters, self.waiting, self.running, drafter, clock)
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.corrupted_requests = 0  # failed since their output was not finite
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._scheduled_seconds = 0.0  # predicted, of all steps: the time by which prompts age

    @property
    def has_work(self) -> bool:
        return bool(self.open.by_id)

    def add(self, message: AddRequest) -> list[Event]:
        """Queues the request, or says at once why it can never run."""
        return self.open.add(message, self._scheduled_seconds)

    def schedule(self) -> ScheduledStep | None:
        self.cache.settle()
        preempted = self.reclaim.preempt(self.clock()) if self.waiting else []
        ready = self.running.grow()
        decodes = ready.decodes
        preempted += ready.preempted
        for request in preempted:
            self.waiting.add(request)
        self.num_preemptions += len(preempted)
        drafts = {} if preempted else self._draft(decodes, beside_prompts=bool(ready.prompts))
        plan = self._plan(decodes, ready.prompts, self.assembly.decode_work(decodes, drafts))
        admitted = self._admit(plan) if self.waiting and not preempted else []  # their last step may be in flight
        self.cache.queue_transfers()  # no block is taken after this
        shares, work = plan.shares()
        if not decodes and not shares:
            return None
        for tenant, count in Counter(request.cache_salt for request in decodes).items():
            self.fairness.charge(tenant, outputs=count)
        for request, count in shares:
            self.fairness.charge(request.cache_salt, inputs=count)
        step = self.assembly.assemble(decodes, drafts, shares, admitted, work)
        self._scheduled_seconds += self.step_time.predict(step.work)
        return step

    def _plan(self, decodes: Sequence[Request], prefills: Sequence[Request], work: StepWork) -> PrefillPlan:
        """`work`: of the decodes."""
        waiting = Counter(request.cache_salt for request in prefills)
        decoding = Counter(request.cache_salt for request in self.running) - waiting
        for tenant in self.fairness.waiting:
            waiting[tenant] += self.fairness.num_waiting(tenant)
        now = self.clock()
        target = self.config.tpot_target
        first_arrival = min([self.waiting.first_arrival, *(request.arrival_time for request in prefills)])
        self.burst.look(waiting, decoding, first_arrival, now)
        return PrefillPlan(
            prefills,
            decodes,
            work,
            max_tokens=self.config.max_num_batched_tokens,
            tpot_target=None if target is None else target.of(self.step_time.floor),
            now=now,
            model=self.step_time,
            ranks=self.fairness.ranks(waiting.keys()),
            waiting=waiting,
            burst=self.burst,
        )

    def launched(self, step: ScheduledStep) -> list[LaunchedRow]:
        """Counts the step's tokens as computed: from here on the device does what it was told, in order."""
        rows = []
        for request, count in zip(step.requests, step.num_tokens, strict=True):
            drafts = step.drafts.get(request, ())
            first_scored = request.num_computed + 1 if request in step.scored else 0
            request.num_computed += count - len(drafts)
            request.num_drafts = len(drafts)
            samples = request.num_remaining == 0
            request.num_in_flight += samples
            end, preemptions = request.num_computed, request.num_preemptions
            rows.append(LaunchedRow(request, end, samples, preemptions, drafts, first_scored))
        return rows

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """The step took so long. One with drafts may take longer than its work says, which is for the drafter to learn;
        one with prompts takes long for other reasons than drafts."""
        if not step.drafts:
            self.step_time.observe(step.work, seconds)
        if self.drafter is not None and not step.has_prompts:
            self.drafter.observe(len(step.requests), sum(map(len, step.drafts.values())), seconds)

    def postprocess(self, rows: Sequence[LaunchedRow], output: StepOutput) -> list[Event]:
        """Takes a step's results: appends the sampled tokens, offers full blocks for reuse, ends what is finished.

        `output` has a token for every row that samples, and one more for each of its drafts. Rows whose request has
        ended meanwhile are dropped; one that lost its blocks keeps its tokens, and what its prompt was scored."""
        events: list[Event] = []
        now = self.clock()
        at = 0
        all_scores = iter(output.prompt_logprobs)
        ended = False
        for request, end, samples, num_preemptions, drafts, first_scored in rows:
            first, at = at, at + samples + len(drafts)
            request.num_in_flight -= samples
            request.num_drafts -= len(drafts)
            scores = next(all_scores) if first_scored else None
            if request.state is RequestState.FINISHED:
                continue
            num_right = num_equal(drafts, output.token_ids[first:at]) if drafts else 0
            last = first + num_right + samples  # what was sampled after a wrong draft means nothing
            if not all(output.finite[first:last]) or (first_scored and scores is None):
                self.cache.withdraw(request)
                self.corrupted_requests += 1
                events += self.open.fail(
                    [request], "server_error", "The model's output for this request was not finite."
                )
                continue
            token_ids, reason = request.append(output.token_ids[first:last])
            if num_preemptions == request.num_preemptions:
                right = min(num_right, len(token_ids))
                request.num_filled = end + right
                request.num_computed += right
                self.cache.register(request)
            prompt_logprobs = None if scores is None else request.take_scores(first_scored, scores)
            if not samples:
                if prompt_logprobs is not None:
                    events.append(TokenDelta(request.request_id, [], prompt_logprobs=prompt_logprobs))
                continue
            if drafts and self.drafter is not None:
                self.drafter.count(len(drafts), num_right)
                self.fairness.charge(request.cache_salt, outputs=len(token_ids) - 1)  # one was when it was scheduled
            request.last_token_time = now
            if request.num_generated == len(token_ids):
                request.first_token_time = now
            self.generation_tokens += len(token_ids)
            logprobs = None
            if request.sampling.logprobs is not None:
                logprobs = [entry for entry in output.logprobs[first : first + len(token_ids)] if entry is not None]
            events.append(
                TokenDelta(
                    request.request_id,
                    token_ids,
                    logprobs,
                    reason,
                    token_ids[-1] if reason == "stop" else None,
                    request.num_cached_tokens,
                    prompt_logprobs,
                )
            )
            if reason is not None:
                ended = True
                self.open.end(request)
                events.append(request.times())
        if ended:
            self.running.sweep()
        return events

    def _draft(self, decodes: list[Request], *, beside_prompts: bool) -> dict[Request, list[int]]:
        """Guesses that have room in free blocks: they take none from others. None while any wait to be compared: then
        all who draft miss the same turns, and the steps between are as short as ever."""
        if self.drafter is None or not decodes or any(request.num_drafts for request in self.running):
            return {}
        max_rows = self.config.max_num_batched_tokens // 2  # the rest is for prompts
        drafts = self.drafter.propose(decodes, max_rows=max_rows, beside_prompts=beside_prompts)
        for request, token_ids in drafts.items():
            del token_ids[self.running.grow_for(request, 1 + len(token_ids)) - 1 :]
        return {request: token_ids for request, token_ids in drafts.items() if token_ids}

    def _admit(self, plan: PrefillPlan) -> list[Request]:
        """Moves waiting requests that get tokens in this step into `running` and the plan. Returns them."""
        admitted: list[Request] = []
        for request, hits in self.waiting.fitting(plan, self.running.oldest_first, self.running.num_free_slots):
            self.running.start(request, self.waiting.blocks_wanted(request), hits)
            plan.add(request)
            admitted.append(request)
            self._count_admission(request)
        for request in admitted:
            self.waiting.remove(request)
        return admitted

    def _count_admission(self, request: Request) -> None:
        if request.was_admitted:  # before a preemption: these hits are its own blocks
            return
        request.num_cached_tokens = request.num_computed
        request.scheduled_time = self.clock()
        self.prompt_tokens += request.num_prompt_tokens
        if self.cache.enable_prefix_caching and not request.wants_scores:
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_computed
