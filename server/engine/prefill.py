"""How prompts share one step: its tokens, and its time when others wait for it. Knows requests, not the queue.

Between tenants the least served goes first (fairness.py); then whoever is soonest done, older by AGEING seconds a
second: so short prompts pass giant ones, and giants are finished one after another, not all at the end. The oldest
prompt always has a quarter, so that nobody is passed for ever.

A step with decodes in it lasts no longer than they want (--tpot-target-ms), unless prompts would have too little of it
or it would do little but copy keys for a deep one; limits bind only under contention. It may last half as long again
where more of the same tenant's requests wait for their first token than decode, and up to BURST_STEP targets in a burst
(burst.py). One without decodes is so long that reading weights and keys is a small part of it, and no longer."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple

from server.engine.burst import Burst
from server.engine.request import Request
from server.engine.step_time import StepTimeModel, StepWork

MIN_CHUNK = 16  # tokens: less of a long prompt costs a step more than it gives the prompt
MIN_TIMED_CHUNK = 64  # the same where time is what is short,
MIN_CHUNK_TIME = 1.5  # and so many rows at most as take that many reads of all weights: on a CPU no row is free
#: Rows that leave no tile of a matrix product half empty. Not 64: odd multiples of it are what cuBLAS is slowest at:
#: 448 rows take it 1.4 times as long as 512 (Llama 8B's layers, an H200).
TILES = (512, 128)
FEW_ROWS = 256  # of a step: fewer take the products as long,
#: so tiles of attention count: with 193 rows of a deep chunk a step lasts 1.2 to 1.3 times as long as with 192.
FEW_TILE = 64
LARGEST_CUT = 0.3  # of a chunk that is made smaller for that
OLDEST_SHARE = 4  # the oldest prompt has at least 1 / OLDEST_SHARE of what prompts have
PROMPTS_SHARE = 4  # and they have at least 1 / PROMPTS_SHARE of the time of a step, whatever the decodes take
#: A step may last so many reads of its chunk's keys and of all weights, or most of it would be reading. Beside decodes
#: weights count as far as the target goes.
FLOORS = 3
LONGEST_STEP = 5  # TPOT targets that a step without decodes may last: a newcomer may wait for most of two,
#: and longer where reading a chunk's keys (copying them, where pages are float8) would be more than this part of it,
KEYS_SHARE = 0.1
WEIGHTS_SHARE = 0.05  # or reading all weights more than this, where that is not done beneath the products (a CPU);
LONGEST_WAIT = 1.0  # but no longer than so many seconds, or two targets where tokens come as slowly as that
CROWD = 1.5  # TPOT targets that a step may last for decodes whose tenant has more requests that wait
BURST_STEP = 6  # TPOT targets that a step may last for the requests of a burst,
BURST_ROWS = 4096  # while it is as long as so many rows of a prompt take: another tenant's newcomer waits for it
PATIENCE = 32  # who waited s seconds for the first token may wait s / PATIENCE for each further one
SHORT = 0.1  # seconds of work left: such prompts pass longer ones, however old those are
AGEING = 0.25  # seconds of its own work that a second of others' work makes up for


Urgency = tuple[bool, float]


class Turn(NamedTuple):
    """Where a prompt stands among others. Smaller is first."""

    rank: int  # of its tenant
    urgency: Urgency
    sequence_number: int


def urgency(request: Request, num_computed: int, model: StepTimeModel) -> Urgency:
    """Short prompts first; then by the seconds of work that are left, and by when it came: an order that stays the same
    while a request waits. Time is that of the engine, predicted: it stands still when nothing runs, and is right in
    proportion on any device."""
    seconds = model.prompt_seconds(num_computed, request.num_tokens - num_computed, is_scored=request.is_to_be_scored)
    return seconds > SHORT, seconds + AGEING * request.entered_at


class PrefillPlan:
    """One step's prompts: those that run, then those that are admitted one by one, then shares()."""

    def __init__(
        self,
        prefills: Iterable[Request],
        decodes: Sequence[Request],
        decode_work: StepWork,
        *,
        max_tokens: int,
        tpot_target: float | None,
        now: float,
        model: StepTimeModel,
        ranks: Mapping[bytes, int],
        waiting: Mapping[bytes, int],
        burst: Burst,
    ) -> None:
        """`max_tokens` of the step, decodes included. `tpot_target` in seconds; None: only tokens limit the step.
        `waiting`: requests of each tenant that have no token yet."""
        self.ranks = ranks
        self._waiting = waiting
        self._burst = burst
        self.model = model
        self._target = tpot_target
        self._now = now
        self._decodes = decodes
        self._free_tokens = max_tokens - decode_work.rows
        self._decode_work = decode_work
        self._limit = inf  # seconds of the step
        self._decodes_limit = inf  # what the decodes want of it
        self._turns: list[tuple[Turn, Request]] = []
        self._ahead = [decode_work]  # of the decodes and the first prompts, whole; as far as anybody has asked
        self._oldest: Request | None = None
        for request in prefills:
            self.add(request)

    def add(self, request: Request) -> None:
        """One more prompt, which has its blocks."""
        if self._target is not None:
            self._limit = min(self._limit, self._limit_with(request, self._target))
        turn = self._turn(request, request.num_computed)
        place = bisect_left(self._turns, turn, key=_turn_of)
        self._turns.insert(place, (turn, request))
        del self._ahead[place + 1 :]
        if self._oldest is None or request.sequence_number < self._oldest.sequence_number:
            self._oldest = request

    def has_room(self, newcomer: Request, num_computed: int, *, may_be_oldest: bool = False) -> bool:
        """Whether a waiting request would get a useful share beside those that have one already; if it may, as the
        oldest of them."""
        oldest = self._oldest
        if oldest is None or (may_be_oldest and newcomer.sequence_number < oldest.sequence_number):
            return self._free_tokens > 0
        turn = self._turn(newcomer, num_computed)
        work = self._ahead_of(bisect_left(self._turns, turn, key=_turn_of))
        is_behind_oldest = self._turn(oldest, oldest.num_computed) < turn  # who then has what is kept for it
        reserved_tokens, reserved_seconds = (0, 0.0) if is_behind_oldest else self._reserve()
        remaining = newcomer.num_tokens - num_computed
        tokens = self._free_tokens - (work.rows - self._decode_work.rows)
        if tokens - reserved_tokens < min(remaining, MIN_CHUNK):
            return False
        count = min(remaining, self._min_timed_chunk)
        work = work.with_chunk(num_computed, count, is_scored=newcomer.is_to_be_scored)
        return self._limit == inf or self.model.predict(work) <= self._limit - reserved_seconds

    def shares(self) -> tuple[list[tuple[Request, int]], StepWork]:
        """Tokens for each prompt, those without any left out, and what the whole step runs. If there is a prompt, one
        at least has some."""
        work, tokens = self._decode_work, self._free_tokens
        reserved_tokens, reserved_seconds = self._reserve()
        shares: list[tuple[Request, int]] = []
        is_full = False  # somebody wanted more: what is left is the oldest's
        for _, request in self._turns:
            if request is self._oldest:
                reserved_tokens, reserved_seconds = 0, 0.0
            elif is_full:
                continue
            most = min(request.num_remaining, tokens - reserved_tokens)
            count = self._chunk(work, request, most, self._limit - reserved_seconds)
            if request is self._oldest:
                count = max(count, min(most, self._min_timed_chunk))
            is_full = is_full or count < request.num_remaining
            if count < min(request.num_remaining, MIN_CHUNK) and request is not self._oldest:
                continue
            shares.append((request, count))
            tokens -= count
            work = work.with_chunk(request.num_computed, count, is_scored=request.is_to_be_scored)
        return shares, work

    @cached_property  # as most steps have no prompts
    def _num_decodes(self) -> Counter[bytes]:
        """Of each tenant."""
        return Counter(request.cache_salt for request in self._decodes)

    @cached_property
    def _min_timed_chunk(self) -> int:
        """Tokens: less of a long prompt costs a step more time than it gives the prompt."""
        model = self.model
        return max(MIN_CHUNK, model.largest_chunk(StepWork(), 0, MIN_CHUNK_TIME * model.floor, MIN_TIMED_CHUNK))

    def _ahead_of(self, place: int) -> StepWork:
        """What decodes and the prompts in front of `place` do, each to its end: it may be more than fits the step."""
        while len(self._ahead) <= place:
            _, other = self._turns[len(self._ahead) - 1]
            work = self._ahead[-1].with_chunk(other.num_computed, other.num_remaining, is_scored=other.is_to_be_scored)
            self._ahead.append(work)
        return self._ahead[place]

    def _turn(self, request: Request, num_computed: int) -> Turn:
        rank = self.ranks[request.cache_salt]
        return Turn(rank, urgency(request, num_computed, self.model), request.sequence_number)

    def _limit_with(self, prompt: Request, target: float) -> float:
        """Seconds that a step with this prompt, and the decodes, may last."""
        model = self.model
        keys = model.keys_read(prompt.num_computed)
        reading = 0.0 if model.hides_reading else model.floor
        longest = BURST_STEP if prompt in self._burst else LONGEST_STEP
        limit = max(longest * target, reading / WEIGHTS_SHARE, keys / KEYS_SHARE)
        limit = min(limit, max(LONGEST_WAIT, 2 * target))
        with_burst = self._decode_work.with_chunk(prompt.num_computed, BURST_ROWS)
        in_burst = min(BURST_STEP * target, model.predict(with_burst))
        if self._seconds(prompt) <= target:
            limit = self._patience(prompt, target, in_burst)  # its first token comes soon, if nothing is in the way
        if self._oldest is None:  # the first prompt: once a step
            for request in self._decodes:
                self._decodes_limit = min(self._decodes_limit, self._patience(request, target, in_burst))
        weights, decode_seconds = FLOORS * model.floor, 0.0
        if self._decodes:
            weights, decode_seconds = min(weights, target - model.floor), model.predict(self._decode_work)
        least = max(weights + FLOORS * keys, decode_seconds / (1 - 1 / PROMPTS_SHARE))
        return max(min(limit, self._decodes_limit), least)

    def _patience(self, request: Request, target: float, in_burst: float) -> float:
        """Seconds; `in_burst`: if it is of a burst."""
        tenant = request.cache_salt
        crowd = self._waiting.get(tenant, 0) / max(1, self._num_decodes[tenant])
        waited = (request.first_token_time or self._now) - request.arrival_time
        burst = in_burst if request in self._burst else 0.0
        return max(target * min(max(1.0, crowd), CROWD), burst, waited / PATIENCE)

    def _reserve(self) -> tuple[int, float]:
        """Tokens and seconds that are kept for the oldest prompt while others choose before it."""
        oldest = self._oldest
        if oldest is None:
            return 0, 0.0
        tokens = min(oldest.num_remaining, -(-self._free_tokens // OLDEST_SHARE))
        if self._limit == inf:
            return tokens, 0.0
        spare = max(0.0, self._limit - self.model.predict(self._decode_work))
        return tokens, min(spare / OLDEST_SHARE, self._seconds(oldest))

    def _seconds(self, prompt: Request) -> float:
        """What is left of it, in large steps."""
        return self.model.prompt_seconds(prompt.num_computed, prompt.num_remaining, is_scored=prompt.is_to_be_scored)

    def _chunk(self, work: StepWork, request: Request, most: int, limit: float) -> int:
        if limit == inf:
            return most
        count = self.model.largest_chunk(work, request.num_computed, limit, most, is_scored=request.is_to_be_scored)
        return count if count == most else _whole_tiles(work.rows, count)


def _turn_of(entry: tuple[Turn, Request]) -> Turn:
    return entry[0]


def _whole_tiles(rows: int, count: int) -> int:
    """A part of `count` with which a step of `rows` others has a multiple of some TILES rows, and not much less; of few
    rows, one that is a multiple of FEW_TILE itself."""
    for tile in TILES:
        over = (rows + count) % tile
        if _is_worth_it(over, count):
            return count - over
    over = count % FEW_TILE
    return count - over if rows + count < FEW_ROWS and _is_worth_it(over, count) else count


def _is_worth_it(over: int, count: int) -> bool:
    return over <= LARGEST_CUT * count and count - over >= MIN_TIMED_CHUNK
