"""Requests with a slot and blocks: how they get both, how their blocks grow with their tokens, and who gives them up
when none is free. Knows no queue, no step and no time.

The youngest gives up first, so the oldest always goes on; and before anybody else's, the youngest of a tenant that
holds more than an equal part of the blocks, but for its oldest."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from server.engine.adapters import AdapterTable
from server.engine.kv_cache import Entry, KVCache
from server.engine.request import Request, RequestState, by_age
from server.engine.sharing import PrefixSharing


@dataclass(frozen=True, slots=True)
class Ready:
    """What may be in the next step, and who had to make room for it."""

    decodes: list[Request] = field(default_factory=list)  # one token is left to run, and there is a block for it
    prompts: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)  # they hold nothing any more


class RunningRequests:
    def __init__(
        self, cache: KVCache, adapters: AdapterTable, sharing: PrefixSharing | None, max_num_seqs: int
    ) -> None:
        self.cache = cache
        self.adapters = adapters
        self.sharing = sharing
        self.max_num_seqs = max_num_seqs
        self.oldest_first: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._released_slots: list[int] = []

    def __len__(self) -> int:
        return len(self.oldest_first)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.oldest_first)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_released_slots(self) -> int:
        """That are free as soon as the runner has forgotten them."""
        return len(self._released_slots)

    def start(self, request: Request, num_blocks: int, hits: Sequence[Entry]) -> None:
        """Gives a request a slot and its table. The caller has checked that there are so many blocks, and a slot."""
        request.slot = self._free_slots.pop()
        if request.adapter is not None:
            self.adapters.start(request.adapter)
        self.cache.allocate(request, num_blocks, hits)
        if self.sharing is not None:
            self.sharing.join(request)
        request.state = RequestState.RUNNING
        insort(self.oldest_first, request, key=by_age)

    def grow(self) -> Ready:
        """A block for each decode that is short of one."""
        ready = Ready()
        for request in list(self.oldest_first):
            if request.state is not RequestState.RUNNING:  # an older one has its blocks
                continue
            if request.num_remaining > 1:
                ready.prompts.append(request)
            elif request.awaits_its_end or request.num_drafts:
                continue
            elif request.num_computed < self._room(request) or self._find_block(request, ready.preempted):
                ready.decodes.append(request)
        return ready

    def grow_for(self, request: Request, num_tokens: int) -> int:
        """Blocks for so many tokens more, as far as they are free: for how many there is room then."""
        end = request.num_computed + num_tokens
        while end > self._room(request) and self.cache.grow(request):
            pass
        return min(num_tokens, self._room(request) - request.num_computed)

    def preempt(self, request: Request) -> None:
        """It gives up all that it holds, and waits again."""
        self.oldest_first.remove(request)
        self.release(request)
        request.num_preemptions += 1
        request.state = RequestState.WAITING

    def private_blocks(self, request: Request) -> int:
        """Blocks that come free when it gives them up."""
        references = self.cache.pool.references
        return sum(references[block] == 1 for block in request.block_ids)

    def release(self, request: Request) -> None:
        """Takes back what the request holds, if anything."""
        if self.sharing is not None:
            self.sharing.leave(request)
        self.cache.release(request)
        if request.slot >= 0:
            self._released_slots.append(request.slot)
            request.slot = -1
            if request.adapter is not None:
                self.adapters.stop(request.adapter)

    def sweep(self) -> None:
        """Forgets those that have ended."""
        self.oldest_first = [request for request in self.oldest_first if request.state is RequestState.RUNNING]

    def take_released_slots(self) -> list[int]:
        """Slots released since the last call: the runner must forget them before they are used again."""
        released, self._released_slots = self._released_slots, []
        self._free_slots += released
        return released

    def check_integrity(self) -> None:
        """Raises unless every slot is accounted for."""
        slots = [*(request.slot for request in self.oldest_first), *self._free_slots, *self._released_slots]
        if sorted(slots) != list(range(self.max_num_seqs)):
            raise AssertionError("a slot is lost or held twice")

    def _room(self, request: Request) -> int:
        """Tokens."""
        return len(request.block_ids) * self.cache.block_size

    def _find_block(self, request: Request, preempted: list[Request]) -> bool:
        """One more block, at the cost of younger requests. False: it was the request itself that gave up."""
        while not self.cache.grow(request):
            victim = self._victim(request)
            self.preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _victim(self, request: Request) -> Request:
        """Who gives up its blocks for the request: that itself, or a younger one."""
        oldest: dict[bytes, Request] = {}
        for other in self.oldest_first:
            oldest.setdefault(other.cache_salt, other)
        if len(oldest) > 1:
            part = self.cache.pool.num_usable / len(oldest)
            held: Counter[bytes] = Counter()
            for other in self.oldest_first:
                held[other.cache_salt] += self.private_blocks(other)
            for other in reversed(self.oldest_first):
                if other.sequence_number < request.sequence_number:
                    break
                if held[other.cache_salt] > part and other is not oldest[other.cache_salt]:
                    return other
        return self.oldest_first[-1]
