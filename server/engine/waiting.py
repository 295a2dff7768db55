"""Requests without blocks, and which of them may start now. Knows blocks and the prefix cache, not what runs in a step.

Their order is that of prefill.py: least served tenant, then soonest done, with ageing; what is in the prefix cache is
done already. One that does not fit lets others pass. The oldest of tenants of one rank is always looked at first, and
others pass it up to a limit only: a giant prompt neither blocks the queue nor waits for ever. One whose adapter has no
slot lets others pass, too: when its turn comes is for adapters.py to say."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain, takewhile
from math import inf

from server.engine.adapters import AdapterTable
from server.engine.fairness import FairShare
from server.engine.kv_cache import Entry, KVCache
from server.engine.newcomers import Newcomers
from server.engine.prefill import PrefillPlan, Urgency, urgency
from server.engine.request import Request, by_age
from server.engine.step_time import StepTimeModel

MAX_BYPASSES = 64  # younger requests that may be admitted past one that waits for blocks
RETRY_STEPS = 16  # one that did not fit is matched against the prefix cache again after so many steps
LOOKAHEAD = 256  # requests looked at in one step
#: Of newcomers' prompts in one step, and of prompts that were matched and found not to fit (one of each is always):
#: running requests are not to wait.
HASHED_TOKENS, MATCHED_IN_VAIN = 262_144, 131_072
WATERMARK = 100  # at most 1 / WATERMARK of the blocks is kept for running requests to grow into

Place = tuple[Urgency, int]  # urgency when it was last looked at, sequence number


@dataclass(slots=True)
class _Passed:
    """Of those that find no blocks in a step, the first and all that came before their turn: who starts nevertheless is
    counted for them."""

    requests: list[Request] = field(default_factory=list)
    most: int = 0  # times that one of them was passed, in this step and before

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.most = max(self.most, request.num_bypassed)

    def count(self) -> None:
        for request in self.requests:
            request.num_bypassed += 1
        self.most += bool(self.requests)


class WaitingQueue:
    def __init__(self, cache: KVCache, adapters: AdapterTable, model: StepTimeModel, fairness: FairShare) -> None:
        self.cache = cache
        self.adapters = adapters
        self.model = model
        self.fairness = fairness
        self._by_age: dict[bytes, list[Request]] = {}  # of each tenant: oldest first
        self._newcomers = Newcomers()  # never matched against the prefix cache, so without a place
        self._by_tenant: dict[bytes, list[tuple[Place, Request]]] = {}  # most urgent first
        self._places: dict[str, Place] = {}
        self._moved: list[Request] = []  # their hits have changed since they were given their places
        self._fresh_hits: dict[str, list[Entry]] = {}  # of newcomers, until blocks change hands
        self._num_waiting = 0
        self._num_steps = 0
        self._matched_in_vain = 0  # tokens, in this step

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, request: Request) -> None:
        insort(self._by_age.setdefault(request.cache_salt, []), request, key=by_age)
        self._num_waiting += 1
        self.fairness.join(request.cache_salt)
        if request.last_hits < 0:
            self._newcomers.add(request)
        else:
            self._put(request)

    def remove(self, request: Request) -> None:
        same_tenant = self._by_age[request.cache_salt]
        del same_tenant[bisect_left(same_tenant, request.sequence_number, key=by_age)]
        if not same_tenant:
            del self._by_age[request.cache_salt]
        self._num_waiting -= 1
        self.fairness.leave(request.cache_salt)
        if request.request_id in self._places:
            self._take(request)
        else:
            self._newcomers.remove(request)

    def arrived_before(self, time: float) -> list[Request]:
        """Those that never ran. Numbers are given in the order of arrival, so the young ones are not looked at."""
        late: list[Request] = []
        for requests in self._by_age.values():
            early = takewhile(lambda request: request.arrival_time < time or request.was_admitted, requests)
            late += (request for request in early if not request.was_admitted)
        return late

    def first_of(self, tenant: bytes, arrived_before: float) -> Request | None:
        """Of those that came before then: the most urgent one that was looked at, or else the oldest."""
        looked_at = (request for _, request in self._by_tenant.get(tenant, []))
        requests = chain(looked_at, self._by_age[tenant][:1])
        return next((request for request in requests if request.arrival_time <= arrived_before), None)

    @property
    def first_arrival(self) -> float:
        """When the first of those that wait came; infinity when none does."""
        return min((requests[0].arrival_time for requests in self._by_age.values()), default=inf)

    def blocks_wanted(self, request: Request) -> int:
        """The whole prompt and one block more, as far as the request can ever use them."""
        most = self.cache.blocks_for(request.max_length - 1)
        return min(self.cache.blocks_for(len(request.token_ids)) + 1, most)

    def fitting(
        self, plan: PrefillPlan, running: Sequence[Request], num_slots: int
    ) -> Iterator[tuple[Request, list[Entry]]]:
        """At most `num_slots` requests that fit now, with their prefix hits. The caller starts each (taking blocks,
        adding it to `plan` and `running`, which are looked at again) before it asks for the next, and removes them from
        the queue afterwards."""
        self._num_steps += 1
        self.adapters.look()
        if num_slots == 0:
            return
        self._fresh_hits.clear()
        self._replace()
        self._match_newcomers(len(running))
        bypassed = _Passed()
        computing = [other for other in running if other.num_filled < other.num_prompt_tokens]
        num_looked_at = self._matched_in_vain = 0
        oldest = self._oldest(plan.ranks)
        held = Counter(other.cache_salt for other in running)
        part = (len(running) + num_slots) // len(self._by_age.keys() | held.keys())
        for request, is_before_its_turn in self._candidates(plan.ranks, held, part):
            if num_slots == 0 or bypassed.most >= MAX_BYPASSES:
                return
            if request.adapter is not None and not self.adapters.may_start(request.adapter):
                continue
            num_looked_at += 1
            if num_looked_at > LOOKAHEAD:
                return
            if not self._has_room(request, plan, request.last_hits, oldest):
                if is_before_its_turn:
                    continue
                return  # and the others come after it, or have their part already
            if self._twin_is_ahead(request, computing):
                continue
            hits = self._hits_if_it_fits(request, len(running))
            if hits is None:
                if is_before_its_turn or not bypassed.requests:
                    bypassed.add(request)
                continue
            self._fresh_hits.clear()  # from here on blocks may change hands
            # More of it may be coming back from slower memory, or what it had in the cache is gone.
            is_coming = self.cache.prepare(request, hits, self.blocks_wanted(request))
            if is_coming or not self._has_room(request, plan, len(hits), oldest):
                continue
            bypassed.count()
            num_slots -= 1
            held[request.cache_salt] += 1
            yield request, hits
            computing.append(request)

    def _oldest(self, ranks: Mapping[bytes, int]) -> Request:
        """Of the tenants whose turn it is."""
        least = min(ranks[tenant] for tenant in self._by_age)
        return min((requests[0] for t, requests in self._by_age.items() if ranks[t] == least), key=by_age)

    def _candidates(
        self, ranks: Mapping[bytes, int], held: Mapping[bytes, int], part: int
    ) -> Iterator[tuple[Request, bool]]:
        """In turn, tenants of one rank together: the oldest of their requests, which is true of it, then the others in
        their order, and those of tenants that have `part` slots by then, `held` being what they have, after all others:
        who was served least would have all that come free at once, and lose some of them again (reclaim.py)."""
        by_turn: dict[tuple[bool, int], list[bytes]] = {}
        for tenant in self._by_tenant:
            by_turn.setdefault((held[tenant] >= part, ranks[tenant]), []).append(tenant)
        last: list[Request] = []
        for (had_its_part, _), tenants in sorted(by_turn.items()):
            if had_its_part:
                yield from ((request, False) for request in last)
                last = []
            first = min((self._by_age[tenant][0] for tenant in tenants), key=by_age)
            if first.last_hits >= 0:
                yield first, True
            lists = [self._by_tenant[tenant] for tenant in tenants]
            for _, request in lists[0] if len(lists) == 1 else merge(*lists, key=_place):
                if request is first:
                    continue
                if held[request.cache_salt] >= part and not had_its_part:
                    last.append(request)
                else:
                    yield request, False
        yield from ((request, False) for request in last)

    def _has_room(self, request: Request, plan: PrefillPlan, num_hits: int, oldest: Request) -> bool:
        return plan.has_room(request, num_hits * self.cache.block_size, may_be_oldest=request is oldest)

    def _match_newcomers(self, num_running: int) -> None:
        """Gives newcomers their places, which need their prefix hits, and so the hashes of their prompts."""
        num_hashed = 0
        while self._newcomers:
            length = len(self._newcomers.next().token_ids)
            num_hashed += length
            if num_hashed > HASHED_TOKENS and num_hashed > length:
                return
            request = self._newcomers.take()
            hits = self._fresh_hits[request.request_id] = self.cache.match(request)
            request.last_hits = len(hits)
            request.blocks_needed = self._blocks_needed(request, hits, num_running)
            self._put(request)

    def _may_fit(self, request: Request, num_running: int) -> bool:
        """What is known from the last look saves a new one; now and then its prefix may have come into the cache."""
        is_time = (self._num_steps + request.sequence_number) % RETRY_STEPS == 0
        return is_time or not num_running or request.blocks_needed <= self.cache.num_free_blocks

    def _blocks_needed(self, request: Request, hits: Sequence[Entry], num_running: int) -> int:
        """Free blocks with which it could start."""
        needed = self.cache.blocks_to_admit(self.blocks_wanted(request), hits)
        if num_running:  # room for the running ones to grow, or the newcomer would be preempted at once
            needed += min(num_running, max(1, self.cache.pool.num_usable // WATERMARK))
        return needed

    def _replace(self) -> None:
        for request in self._moved:
            if request.request_id in self._places:
                self._take(request)
                self._put(request)
        self._moved = []

    def _put(self, request: Request) -> None:
        urgent = urgency(request, request.last_hits * self.cache.block_size, self.model)
        place = self._places[request.request_id] = (urgent, request.sequence_number)
        insort(self._by_tenant.setdefault(request.cache_salt, []), (place, request), key=_place)

    def _take(self, request: Request) -> None:
        places = self._by_tenant[request.cache_salt]
        del places[bisect_left(places, self._places.pop(request.request_id), key=_place)]
        if not places:
            del self._by_tenant[request.cache_salt]

    def _hits_if_it_fits(self, request: Request, num_running: int) -> list[Entry] | None:
        if self._matched_in_vain >= MATCHED_IN_VAIN or not self._may_fit(request, num_running):
            return None
        hits = self._fresh_hits.get(request.request_id)
        if hits is None:
            hits = self.cache.match(request)
        if len(hits) != request.last_hits:
            self._moved.append(request)
        request.last_hits = len(hits)
        request.blocks_needed = self._blocks_needed(request, hits, num_running)
        if request.blocks_needed <= self.cache.num_free_blocks:
            return hits
        self._matched_in_vain += len(request.token_ids)
        return None

    def _twin_is_ahead(self, request: Request, computing: Sequence[Request]) -> bool:
        """Whether an older prompt is just computing a block that this one needs too: then waiting for it is cheaper
        than computing it twice (n > 1, one document with many questions). Ends when the twin stands still."""
        usable = min(request.num_reusable // self.cache.block_size, len(request.block_hashes))
        if request.last_hits >= usable:
            return False
        for twin in computing:
            block = twin.num_filled // self.cache.block_size
            if (
                twin.sequence_number < request.sequence_number
                and request.last_hits <= block < min(len(twin.block_hashes), usable)
                and twin.block_hashes[block] == request.block_hashes[block]
            ):
                progress = twin.num_computed + twin.num_filled  # a step in flight is progress too
                stands_still = request.twin_progress == progress
                request.twin_progress = progress
                request.blocks_needed = 0  # fewer than at the last look, once the twin is done
                return not stands_still
        return False


def _place(entry: tuple[Place, Request]) -> Place:
    return entry[0]
