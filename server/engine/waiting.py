"""Requests without blocks, and which of them may start now. Knows blocks and token budgets, not what runs in a step.

Oldest first, but one that does not fit lets younger ones pass, up to a limit: a giant prompt neither blocks the queue
nor waits for ever, and one whose adapter has no slot waits until running requests of another adapter have ended."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from server.engine.adapters import AdapterTable
from server.engine.kv_cache import Entry, KVCache
from server.engine.prefill import fits_budget
from server.engine.request import Request, by_age

MAX_BYPASSES = 64  # younger requests that may be admitted past one that waits for blocks
RETRY_STEPS = 16  # one that did not fit is matched against the prefix cache again after so many steps
LOOKAHEAD = 256  # requests looked at in one step
HASHED_TOKENS = 65_536  # of newcomers' prompts in one step (one is always taken): running requests are not to wait
WATERMARK = 100  # at most 1 / WATERMARK of the blocks is kept for running requests to grow into


class WaitingQueue:
    def __init__(self, cache: KVCache, adapters: AdapterTable) -> None:
        self.cache = cache
        self.adapters = adapters
        self._requests: list[Request] = []  # oldest first
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=by_age)

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, request.sequence_number, key=by_age)]

    def arrived_before(self, time: float) -> list[Request]:
        """Those that never ran."""
        return [request for request in self._requests if request.arrival_time < time and not request.was_admitted]

    def blocks_wanted(self, request: Request) -> int:
        """The whole prompt and one block more, as far as the request can ever use them."""
        most = self.cache.blocks_for(request.max_length - 1)
        return min(self.cache.blocks_for(len(request.token_ids)) + 1, most)

    def fitting(
        self, running: Sequence[Request], prefills: Sequence[Request], budget: int, num_slots: int
    ) -> Iterator[tuple[Request, list[Entry]]]:
        """At most `num_slots` requests that fit now, with their prefix hits. The caller starts each (taking blocks,
        adding it to `running` and `prefills`, which are looked at again) before it asks for the next, and removes them
        from the queue afterwards."""
        self._num_steps += 1
        bypassed: Request | None = None  # the oldest that found no blocks
        slotless: Request | None = None  # the oldest whose adapter found no slot
        block_size = self.cache.block_size
        computing = [other for other in running if other.num_filled < other.num_prompt_tokens]
        num_hashed = num_looked_at = 0
        for request in self._requests:
            if num_slots == 0 or (bypassed is not None and bypassed.num_bypassed >= MAX_BYPASSES):
                return
            if not self._may_have_slot(request, slotless):
                slotless = slotless or request
                continue
            num_looked_at += 1
            if num_looked_at > LOOKAHEAD:
                return
            length = len(request.token_ids)
            if request.last_hits < 0:
                if num_hashed and num_hashed + length > HASHED_TOKENS:
                    return
                num_hashed += length
            # What is known from the last look saves a new one; now and then its prefix may have come into the cache.
            looks_again = request.last_hits < 0 or (self._num_steps + request.sequence_number) % RETRY_STEPS == 0
            if not looks_again and not fits_budget(request, length - request.last_hits * block_size, prefills, budget):
                continue
            too_few = running and self.cache.num_free_blocks < request.blocks_missed
            hits = None if too_few and not looks_again else self._hits_if_it_fits(request, len(running))
            if hits is None:
                bypassed = bypassed or request
                continue
            remaining = length - len(hits) * block_size
            is_prepared = not self.cache.prepare(request, hits, self.blocks_wanted(request))
            if not is_prepared or not fits_budget(request, remaining, prefills, budget):
                continue
            if self._twin_is_ahead(request, len(hits), computing):
                continue
            if bypassed is not None:
                bypassed.num_bypassed += 1
            if slotless is not None and request.adapter is not None:
                slotless.num_slot_bypassed += 1
            num_slots -= 1
            yield request, hits
            computing.append(request)

    def _may_have_slot(self, request: Request, slotless: Request | None) -> bool:
        """Whether its adapter has a slot or can have one; not past an older request that has waited long for a slot, so
        that slots come free: requests of the base model take none."""
        if request.adapter is None:
            return True
        waits_too_long = slotless is not None and slotless.num_slot_bypassed >= MAX_BYPASSES
        return not waits_too_long and self.adapters.may_start(request.adapter)

    def _hits_if_it_fits(self, request: Request, num_running: int) -> list[Entry] | None:
        free = self.cache.num_free_blocks
        hits = self.cache.match(request)
        request.last_hits = len(hits)
        needed = self.cache.blocks_to_admit(self.blocks_wanted(request), hits)
        if num_running:  # room for the running ones to grow, or the newcomer would be preempted at once
            needed += min(num_running, max(1, self.cache.pool.num_usable // WATERMARK))
        request.blocks_missed = 0 if needed <= free else needed
        return hits if needed <= free else None

    def _twin_is_ahead(self, request: Request, num_hits: int, computing: Sequence[Request]) -> bool:
        """Whether an older prompt is just computing the very block that this one needs next: then waiting for it is
        cheaper than computing it twice (n > 1, one document with many questions). Ends when the twin stands still."""
        for twin in computing:
            if (
                twin.sequence_number < request.sequence_number
                and num_hits < min(len(twin.block_hashes), len(request.block_hashes))
                and twin.num_filled < (num_hits + 1) * self.cache.block_size
                and twin.block_hashes[num_hits][0] == request.block_hashes[num_hits][0]
            ):
                progress = twin.num_computed + twin.num_filled  # a step in flight is progress too
                stands_still = request.twin_progress == progress
                request.twin_progress = progress
                return not stands_still
        return False
