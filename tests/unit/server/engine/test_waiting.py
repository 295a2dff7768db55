"""Who starts next: by what is left to compute, by age, by tenant; and what looking for it costs."""

import random
import time

import pytest

from models.batch import SamplingParams
from server.engine import kv_cache, waiting
from server.engine.adapters import AdapterTable
from server.engine.burst import Burst
from server.engine.fairness import QUANTUM, FairShare
from server.engine.kv_cache import KVCache
from server.engine.messages import AddRequest
from server.engine.prefill import PrefillPlan
from server.engine.request import Request
from server.engine.step_time import StepTimeModel, StepWork
from server.engine.token_ids import TokenIds
from server.engine.waiting import WaitingQueue

BLOCK_SIZE = 16


class Queue:
    """A waiting queue, and a step that admits from it."""

    def __init__(self, num_blocks: int = 4096) -> None:
        self.cache = KVCache(num_blocks, BLOCK_SIZE)
        self.fairness = FairShare()
        self.model = StepTimeModel()
        self.adapters = AdapterTable(max_loras=1, max_registered=9)
        self.waiting = WaitingQueue(self.cache, self.adapters, self.model, self.fairness)
        self.running: list[Request] = []
        self.num_added = 0

    def add(
        self, prompt: int | list[int], tenant: bytes = b"", *, entered_at: float = 0.0, adapter: str = ""
    ) -> Request:
        number = self.num_added
        if isinstance(prompt, int):
            prompt = random.Random(number).choices(range(30_000), k=prompt)
        message = AddRequest(f"r{number}", TokenIds(prompt), SamplingParams(max_tokens=8), tenant)
        request = Request(
            message, sequence_number=number, eos_token_ids=(), max_model_len=10**6, now=0.0,
            adapter=self.adapters.find(adapter),
        )  # fmt: skip
        request.entered_at = entered_at
        self.num_added += 1
        self.waiting.add(request)
        return request

    def admit(self, tokens: int, num_slots: int = 1000) -> list[str]:
        """The requests that start in a step of so many tokens, in the order in which they were chosen."""
        plan = PrefillPlan(
            [],
            [],
            StepWork(),
            max_tokens=tokens,
            tpot_target=None,
            now=0.0,
            model=self.model,
            ranks=self.fairness.ranks(self.fairness.waiting),
            waiting={},
            burst=Burst(),
        )
        admitted = []
        for request, hits in self.waiting.fitting(plan, self.running, num_slots):
            self.cache.allocate(request, self.waiting.blocks_wanted(request), hits)
            self.running.append(request)
            plan.add(request)
            admitted.append(request)
        for request in admitted:
            self.waiting.remove(request)
        return [request.request_id for request in admitted]

    def compute(self, request: Request) -> None:
        """The request has run: its blocks can be found."""
        request.num_computed = request.num_filled = len(request.token_ids)
        self.cache.register(request)
        self.cache.release(request)
        self.running.remove(request)


def test_the_oldest_then_those_that_are_soonest_done() -> None:
    queue = Queue()
    for length in (3000, 2000, 500, 1000, 40):
        queue.add(length)
    assert queue.admit(100_000) == ["r0", "r4", "r2", "r3", "r1"]


def test_equal_requests_start_in_the_order_in_which_they_came() -> None:
    queue = Queue()
    for number in range(6):
        queue.add(200, entered_at=0.01 * number)
    assert queue.admit(1000) == ["r0", "r1", "r2", "r3", "r4"]


def test_a_prompt_ages_past_shorter_ones_that_come_later() -> None:
    queue = Queue(20_000)
    queue.add(16)
    queue.add(20_000)
    queue.add(15_000, entered_at=10.0)
    assert queue.admit(100_000) == ["r0", "r1", "r2"]


def test_what_is_in_the_prefix_cache_is_not_left_to_do() -> None:
    queue = Queue()
    document = list(range(4000))
    seen = queue.add(document)
    assert queue.admit(8192) == ["r0"]
    queue.compute(seen)
    queue.add(10)
    queue.add(1000)
    queue.add([*document, *range(100)])
    assert queue.admit(8192) == ["r1", "r3", "r2"]


def test_a_prefix_that_comes_into_the_cache_later_counts_too() -> None:
    queue = Queue()
    document = list(range(4000))
    first = queue.add(document)
    question = queue.add([*document, *range(100)])
    assert queue.admit(2000) == ["r0"]
    queue.compute(first)
    assert queue.admit(200) == ["r1"]
    assert question.num_computed == 4000


def test_a_prompt_that_another_is_computing_waits_for_it() -> None:
    queue = Queue()
    document = list(range(4000))
    queue.add(document)
    queue.add(document)
    queue.add(300)
    assert queue.admit(100_000) == ["r0", "r2"]


def test_one_that_finds_no_blocks_lets_others_pass() -> None:
    queue = Queue(100)
    queue.add(1000)
    assert queue.admit(8192) == ["r0"]
    queue.add(1500)
    queue.add(100)
    assert queue.admit(8192) == ["r2"]


def test_the_tenant_that_was_served_less_starts_first() -> None:
    queue = Queue()
    for tenant in (b"served", b"served", b"other"):
        queue.add(100, tenant)
    queue.fairness.charge(b"served", inputs=2 * QUANTUM)
    assert queue.admit(100) == ["r2"], "though others are older"
    assert queue.admit(100) == ["r0"]


def test_newcomers_of_a_tenant_are_not_looked_at_behind_all_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "HASHED_TOKENS", 2000)  # two prompts a step
    queue = Queue()
    for _ in range(8):
        queue.add(1000, b"flood")
    queue.add(500, b"quiet")
    assert sorted(queue.admit(100_000)) == ["r0", "r8"]
    assert sorted(queue.admit(100_000)) == ["r1", "r2"], "the others in the steps after"


def test_a_short_newcomer_is_not_looked_at_behind_the_long_ones_of_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "HASHED_TOKENS", 2000)
    queue = Queue()
    for _ in range(8):
        queue.add(1000)
    queue.add(100)
    assert queue.admit(100_000) == ["r0", "r8"]


def test_a_long_newcomer_is_looked_at_though_short_ones_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "HASHED_TOKENS", 2000)
    queue = Queue()
    for _ in range(4):
        queue.add(1500)
    admitted = []
    for _ in range(8):
        for _ in range(20):
            queue.add(100)
        admitted += queue.admit(100_000)
    assert {"r0", "r1", "r2", "r3"} <= set(admitted)


def test_looking_at_those_that_do_not_fit_takes_little_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have a long prefix in the cache, in any step: all of them at once would hold up whoever runs."""
    queue = Queue(1000)
    document = random.Random(1).choices(range(30_000), k=4000)
    first = queue.add(document)
    assert queue.admit(8192) == ["r0"]
    queue.compute(first)
    for _ in range(100):
        queue.add([*document, *range(6000)])
    assert len(queue.admit(10**9)) == 1, "two do not fit"
    while queue.waiting._newcomers:
        assert not queue.admit(10**9)
    matched: list[int] = []
    match = queue.cache.match

    def counted(request: Request) -> list[kv_cache.Entry]:
        matched.append(len(request.token_ids))
        return match(request)

    monkeypatch.setattr(queue.cache, "match", counted)
    monkeypatch.setattr(waiting, "MATCHED_IN_VAIN", 20_000)
    for _ in range(20):
        matched.clear()
        assert not queue.admit(10**9)
        assert len(matched) <= 2
        assert sum(matched) <= 20_000 + 10_000


def test_a_request_can_leave_before_and_after_it_was_looked_at() -> None:
    queue = Queue()
    requests = [queue.add(100) for _ in range(4)]
    queue.waiting.remove(requests[1])
    assert queue.admit(100) == ["r0"]
    queue.waiting.remove(requests[2])
    assert queue.admit(100) == ["r3"]
    assert not queue.waiting
    assert not queue.fairness.waiting


def test_those_that_never_ran_are_found_by_their_age() -> None:
    queue = Queue()
    requests = [queue.add(100) for _ in range(4)]
    for number, request in enumerate(requests):
        request.arrival_time = float(number)
    requests[0].num_cached_tokens = 0
    assert queue.waiting.arrived_before(2.0) == [requests[1]]


@pytest.mark.parametrize("tenants", [1, 100])
def test_a_step_costs_no_more_with_ten_thousand_waiting(tenants: int) -> None:
    few, many = _aged(300, tenants), _aged(10_000, tenants)
    pairs = [(_seconds(few), _seconds(many)) for _ in range(60)]
    assert min(seconds for _, seconds in pairs) < 3 * min(seconds for seconds, _ in pairs)


def _aged(num_waiting: int, tenants: int) -> Queue:
    """A queue in which nobody is new."""
    queue = Queue()
    for number in range(num_waiting):
        queue.add(64, b"%d" % (number % tenants))
    while queue.waiting._newcomers:
        assert len(queue.admit(64)) == 1
    return queue


def _seconds(queue: Queue) -> float:
    begin = time.perf_counter()
    assert len(queue.admit(200)) == 3
    return time.perf_counter() - begin
