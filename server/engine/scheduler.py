"""Which tokens run in the next step, and what their results mean: schedule() and postprocess(). Plain data structures:
knows no tensors, no sockets, no clock but the one it is given, and nothing asynchronous.

Every running decode has its token in every step; prompts share what is left of the step's token budget (prefill.py).
A request is admitted only when its whole prompt and one more block fit. When a decode finds no block, the youngest
request gives up its blocks and is computed again later: its generated tokens are kept, so its answer is the same."""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from models.batch import StepOutput
from server.engine.kv_cache import Entry, KVCache
from server.engine.messages import AddRequest, RequestFailed, RequestTimes, TokenDelta
from server.engine.prefill import fits_budget, share_budget
from server.engine.request import Request, RequestState

MAX_BYPASSES = 64  # younger requests that may be admitted past one that waits for blocks
RETRY_STEPS = 16  # a request that found no blocks is matched against the prefix cache again after so many steps
LOOKAHEAD = 256  # waiting requests looked at in one step

Event = TokenDelta | RequestFailed | RequestTimes


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    queue_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Rows with one token first. `admitted` are new to the runner: their slots must be set up before the step runs."""

    requests: list[Request]
    num_tokens: list[int]  # aligned with requests
    admitted: list[Request]

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class Scheduler:
    def __init__(self, config: SchedulerConfig, cache: KVCache, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.cache = cache
        self.clock = clock
        self.waiting: list[Request] = []  # oldest first, preempted ones included
        self.running: list[Request] = []  # oldest first
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._released_slots: list[int] = []
        self._num_seen = 0
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, message: AddRequest) -> list[Event]:
        """Queues the request, or says at once why it can never run."""
        request = Request(
            message,
            sequence_number=self._num_seen,
            eos_token_ids=self.config.eos_token_ids,
            max_model_len=self.config.max_model_len,
            now=self.clock(),
        )
        refusal = self._refusal(request)
        if refusal is not None:
            return [refusal]
        self._num_seen += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)  # the youngest there is
        return []

    def abort(self, request_ids: Iterable[str]) -> list[Event]:
        """Frees at once what the requests hold. Unknown and finished ids are none of our business: aborts race."""
        events: list[Event] = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request)
                events += [TokenDelta(request_id, [], finish_reason="abort"), request.times()]
        self._sweep()
        return events

    def fail(self, requests: Sequence[Request], code: str, message: str) -> list[Event]:
        """Ends these requests without a result."""
        events: list[Event] = []
        for request in requests:
            self._finish(request)
            events += [RequestFailed(request.request_id, code, message), request.times()]
        self._sweep()
        return events

    def expire(self) -> list[Event]:
        """Fails requests that waited for their first step longer than the queue's deadline."""
        limit = self.config.queue_timeout
        if limit is None or not self.waiting:
            return []
        oldest = self.clock() - limit
        late = [r for r in self.waiting if r.arrival_time < oldest and not r.was_admitted]
        return self.fail(late, "server_is_overloaded", f"The request waited more than {limit:g} s for a free place.")

    def take_released_slots(self) -> list[int]:
        """Slots whose requests ended since the last call: the runner must forget them before they are used again."""
        released, self._released_slots = self._released_slots, []
        self._free_slots += released
        return released

    def schedule(self) -> ScheduledStep | None:
        self._num_steps += 1
        before = self.num_preemptions
        decodes, prefills = self._grow_decodes()
        budget = self.config.max_num_batched_tokens - len(decodes)
        short_of_blocks = self.num_preemptions > before
        admitted = self._admit(prefills, budget) if self.waiting and not short_of_blocks else []
        if not decodes and not prefills:
            return None
        counts = [1] * len(decodes)
        if prefills:
            for request, count in share_budget(prefills, budget, self.cache.block_size):
                decodes.append(request)
                counts.append(count)
            if 1 in counts[-len(prefills) :]:  # last tokens of prompts belong to the one-token rows
                order = sorted(range(len(counts)), key=lambda row: counts[row] != 1)
                decodes, counts = [decodes[row] for row in order], [counts[row] for row in order]
        return ScheduledStep(decodes, counts, admitted)

    def postprocess(self, step: ScheduledStep, output: StepOutput) -> list[Event]:
        """Takes the step's results: marks tokens as computed, appends the sampled ones, ends what is finished."""
        events: list[Event] = []
        now = self.clock()
        block_size = self.cache.block_size
        row = 0  # of output: rows that sampled
        ended = False
        for request, count in zip(step.requests, step.num_tokens, strict=True):
            before = request.num_computed
            request.num_computed = before + count
            samples = request.num_computed == len(request.token_ids)
            if samples and not output.finite[row]:
                row += 1
                self.cache.withdraw(request)
                events += self.fail([request], "server_error", "The model's output for this request was not finite.")
                continue
            if request.num_computed // block_size != before // block_size:
                self.cache.register(request)
            if not samples:
                continue
            token_id, logprobs = output.token_ids[row], output.logprobs[row]
            row += 1
            request.token_ids.append(token_id)
            request.last_token_time = now
            if request.num_generated == 1:
                request.first_token_time = now
            self.generation_tokens += 1
            reason = request.finish_reason()
            events.append(
                TokenDelta(
                    request.request_id,
                    [token_id],
                    None if logprobs is None else [logprobs],
                    reason,
                    token_id if reason == "stop" else None,
                    request.num_cached_tokens,
                )
            )
            if reason is not None:
                ended = True
                self._finish(request)
                events.append(request.times())
        if ended:
            self._sweep()
        return events

    def check_integrity(self) -> None:
        """Raises unless every block, slot and request is accounted for."""
        self.cache.check_integrity(list(self.requests.values()))
        held = [request.slot for request in self.requests.values() if request.slot >= 0]
        slots = [*held, *self._free_slots, *self._released_slots]
        if sorted(slots) != list(range(self.config.max_num_seqs)):
            raise AssertionError("a slot is lost or held twice")
        if len(self.waiting) + len(self.running) != len(self.requests):
            raise AssertionError("a request is neither waiting nor running")

    def _refusal(self, request: Request) -> RequestFailed | None:
        request_id, length, limit = request.request_id, request.num_prompt_tokens, self.config.max_model_len
        if request_id in self.requests:
            return RequestFailed(request_id, "server_error", "A request with this id is already open.")
        if length == 0:
            return RequestFailed(request_id, "server_error", "The prompt has no tokens.")
        vocab_size, bias = self.config.vocab_size, request.sampling.logit_bias
        if min(request.token_ids) < 0 or max(request.token_ids) >= vocab_size:
            return RequestFailed(request_id, "unsupported_parameter", f"Token ids must be 0 to {vocab_size - 1}.")
        if bias and (min(bias) < 0 or max(bias) >= vocab_size):
            return RequestFailed(request_id, "unsupported_parameter", f"logit_bias ids must be 0 to {vocab_size - 1}.")
        if length >= limit:
            text = f"The prompt has {length} tokens; this server's maximum context length is {limit}."
            return RequestFailed(request_id, "context_length_exceeded", text)
        needed, usable = self.cache.blocks_for(request.max_length - 1), self.cache.pool.num_usable
        if needed > usable:
            text = (
                f"The prompt and its completion need {request.max_length - 1} tokens of KV cache; this server has room "
                f"for {usable * self.cache.block_size}."
            )
            return RequestFailed(request_id, "context_length_exceeded", text)
        return None

    def _grow_decodes(self) -> tuple[list[Request], list[Request]]:
        """Running rows with one token left, each with a block for it, and running prompts. May preempt."""
        running, block_size = self.running, self.cache.block_size
        decodes: list[Request] = []
        prefills: list[Request] = []
        index = 0
        while index < len(running):  # preemption takes from the end, and rows before `index` are older
            request = running[index]
            index += 1
            if len(request.token_ids) - request.num_computed > 1:
                prefills.append(request)
            elif request.num_computed < len(request.block_ids) * block_size or self._find_block(request):
                decodes.append(request)
        return decodes, prefills

    def _find_block(self, request: Request) -> bool:
        """One more block, at the cost of the youngest requests. False: the request itself was the youngest."""
        while not self.cache.grow(request):
            victim = self.running.pop()
            self.cache.release(victim)
            victim.state = RequestState.WAITING
            insort(self.waiting, victim, key=lambda waiting: waiting.sequence_number)
            self.num_preemptions += 1
            if victim is request:
                return False
        return True

    def _admit(self, prefills: list[Request], budget: int) -> list[Request]:
        """Moves waiting requests that get tokens in this step into running and `prefills`. Returns the new ones."""
        new: list[Request] = []
        admitted: list[Request] = []
        bypassed: Request | None = None  # the oldest that found no blocks
        for request in self.waiting[:LOOKAHEAD]:
            if request.slot < 0 and not self._free_slots:
                continue
            if bypassed is not None and bypassed.num_bypassed >= MAX_BYPASSES:
                break
            hits = self._hits_if_it_fits(request)
            if hits is None:
                bypassed = bypassed or request
                continue
            remaining = len(request.token_ids) - len(hits) * self.cache.block_size
            if not fits_budget(request, remaining, prefills, budget, self.cache.block_size):
                continue
            if self._twin_is_ahead(request, len(hits), prefills):
                continue
            if bypassed is not None:
                bypassed.num_bypassed += 1
            if request.slot < 0:
                request.slot = self._free_slots.pop()
                new.append(request)
            self._start(request, hits)
            admitted.append(request)
            prefills.append(request)
        if admitted:
            self.waiting = [request for request in self.waiting if request.state is RequestState.WAITING]
        return new

    def _blocks_wanted(self, request: Request) -> int:
        """The whole prompt and one block more, as far as the request can ever use them."""
        most = self.cache.blocks_for(request.max_length - 1)
        return min(self.cache.blocks_for(len(request.token_ids)) + 1, most)

    def _hits_if_it_fits(self, request: Request) -> list[Entry] | None:
        free = self.cache.num_free_blocks
        looks_again = (self._num_steps + request.sequence_number) % RETRY_STEPS == 0  # its prefix may be there now
        if self.running and free < request.blocks_missed and not looks_again:
            return None
        hits = self.cache.match(request)
        needed = self.cache.blocks_to_admit(self._blocks_wanted(request), hits)
        if self.running:  # room for the running ones to grow, or the newcomer would be preempted at once
            needed += min(len(self.running), max(1, self.cache.pool.num_usable // 100))
        request.blocks_missed = needed
        return hits if needed <= free else None

    def _start(self, request: Request, hits: list[Entry]) -> None:
        self.cache.allocate(request, self._blocks_wanted(request), hits)
        request.state = RequestState.RUNNING
        request.blocks_missed = 0
        insort(self.running, request, key=lambda running: running.sequence_number)
        if not request.was_admitted:  # later hits, after a preemption, are its own blocks
            request.num_cached_tokens = request.num_computed
            request.scheduled_time = self.clock()
            self.prompt_tokens += request.num_prompt_tokens
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_computed

    def _twin_is_ahead(self, request: Request, num_hits: int, prefills: list[Request]) -> bool:
        """Whether an older prompt is just computing the very block that this one needs next: then waiting for it is
        cheaper than computing it twice (n > 1, one document with many questions). Ends when the twin stands still."""
        for twin in prefills:
            if (
                twin.sequence_number < request.sequence_number
                and num_hits < min(len(twin.block_hashes), len(request.block_hashes))
                and twin.num_computed < (num_hits + 1) * self.cache.block_size
                and twin.block_hashes[num_hits][0] == request.block_hashes[num_hits][0]
            ):
                stands_still = request.twin_progress == twin.num_computed
                request.twin_progress = twin.num_computed
                return not stands_still
        return False

    def _finish(self, request: Request) -> None:
        """Frees all that the request holds. It stays in `running` until _sweep()."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        self.cache.release(request)
        del self.requests[request.request_id]
        if request.slot >= 0:
            self._released_slots.append(request.slot)
            request.slot = -1

    def _sweep(self) -> None:
        self.running = [request for request in self.running if request.state is RequestState.RUNNING]
