"""A tenant that holds less than half an equal part of the slots or blocks, and waits, gets them from one that holds
more than a whole one.

fairness.py orders those that wait; this is for when nothing comes free: a key whose long answers run in every slot, or
fill the memory, would keep another key's chat waiting until one of them ends. Who gives up is computed again later and
answers the same. Nobody is taken below an equal part, nobody who was served less gives up for one who was served
more, and what is missing of half a part and more comes when answers end: so places do not go back and forth. Knows no
step.
"""

from collections import Counter

from server.engine.adapters import AdapterTable
from server.engine.fairness import QUANTUM, FairShare
from server.engine.request import Request, by_age
from server.engine.running import RunningRequests
from server.engine.waiting import WaitingQueue

PATIENCE = 0.25  # seconds that a request has waited before another gives up its place
PAUSE = 0.1  # between two looks


class Reclaim:
    def __init__(
        self, adapters: AdapterTable, waiting: WaitingQueue, running: RunningRequests, fairness: FairShare
    ) -> None:
        self.adapters = adapters
        self.waiting = waiting
        self.running = running
        self.fairness = fairness
        self._next_look = 0.0

    def preempt(self, now: float) -> list[Request]:
        """Those that have given up what they held, for one request that waits. They wait now, in no queue yet."""
        if now < self._next_look or now - self.waiting.first_arrival < PATIENCE:
            return []
        tenants = {*self.fairness.waiting, *(request.cache_salt for request in self.running)}
        if len(tenants) == 1:
            return []
        self._next_look = now + PAUSE
        slots = Counter(request.cache_salt for request in self.running)
        for tenant in sorted(self.fairness.waiting, key=self.fairness.served):
            request = self.waiting.first_of(tenant, arrived_before=now - PATIENCE)
            if request is None or not (request.adapter is None or self.adapters.may_start(request.adapter)):
                continue
            if self.running.num_free_slots == self.running.num_released_slots == 0:
                given = self._slot(tenant, slots, max(1, self.running.max_num_seqs // len(tenants)))
            else:
                given = self._blocks(request, self.running.cache.pool.num_usable // len(tenants))
            for other in given:
                self.running.preempt(other)
            if given:
                return given
        return []

    def _slot(self, tenant: bytes, slots: Counter[bytes], part: int) -> list[Request]:
        """Whose slot the tenant gets."""
        if 2 * slots[tenant] >= part:
            return []
        others = [other for other in slots if slots[other] > part and self._was_served_more(other, tenant)]
        if not others:
            return []
        most = max(others, key=slots.__getitem__)
        return sorted(self._may_give_up(most), key=by_age)[-1:]

    def _blocks(self, request: Request, part: int) -> list[Request]:
        """Who gives up blocks so that the request fits: nobody if it would not, all the same."""
        missing = request.blocks_needed - self.running.cache.num_free_blocks
        if missing <= 0:
            return []
        held: Counter[bytes] = Counter()
        for other in self.running:
            held[other.cache_salt] += self.running.private_blocks(other)
        had = held[request.cache_salt]
        if 2 * had >= part or had + request.blocks_needed > part:
            return []
        given: list[Request] = []
        for tenant, _ in held.most_common():
            if not self._was_served_more(tenant, request.cache_salt):
                continue
            for other in sorted(self._may_give_up(tenant), key=by_age, reverse=True):
                blocks = self.running.private_blocks(other)
                if held[tenant] - blocks < part:
                    continue
                given.append(other)
                held[tenant] -= blocks
                missing -= blocks
                if missing <= 0:
                    return given
        return []

    def _was_served_more(self, tenant: bytes, than: bytes) -> bool:
        """By so much that the other is before it in the queue."""
        return self.fairness.served(tenant) >= self.fairness.served(than) + QUANTUM

    def _may_give_up(self, tenant: bytes) -> list[Request]:
        return [other for other in self.running if other.cache_salt == tenant and not other.awaits_its_end]
