"""How one step is shared, for any set of prompts and decodes."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import copying_seconds, rehearsed

from models.batch import SamplingParams
from server.engine.burst import Burst
from server.engine.messages import AddRequest
from server.engine.prefill import (
    BURST_ROWS,
    BURST_STEP,
    CROWD,
    FEW_TILE,
    FLOORS,
    KEYS_SHARE,
    LARGEST_CUT,
    LONGEST_STEP,
    MIN_TIMED_CHUNK,
    OLDEST_SHARE,
    PATIENCE,
    PROMPTS_SHARE,
    TILES,
    PrefillPlan,
)
from server.engine.request import Request
from server.engine.step_time import StepTimeModel, StepWork, work_of
from server.engine.token_ids import TokenIds

TARGET = 0.028
MODEL = rehearsed()
COPYING = rehearsed(copying_seconds)  # float8 pages
NOW = 100.0


@dataclass(frozen=True)
class Prompt:
    remaining: int
    computed: int = 0
    tenant: bytes = b""


def make(number: int, prompt: Prompt, arrival: float = NOW) -> Request:
    tokens = TokenIds([1] * (prompt.computed + prompt.remaining))
    message = AddRequest(str(number), tokens, SamplingParams(), prompt.tenant)
    request = Request(message, sequence_number=number, eos_token_ids=(), max_model_len=10**7, now=arrival)
    request.num_computed = prompt.computed
    return request


def decoding(number: int, context: int, ttft: float = 0.1, arrival: float = NOW - 10) -> Request:
    request = make(number, Prompt(1, context), arrival=arrival)
    request.first_token_time = request.arrival_time + ttft
    return request


def plan_of(
    prompts: list[Request],
    decodes: list[Request] | None = None,
    *,
    max_tokens: int = 8192,
    target: float | None = TARGET,
    ranks: dict[bytes, int] | None = None,
    waiting: dict[bytes, int] | None = None,
    burst: Burst | None = None,
    model: StepTimeModel = MODEL,
) -> PrefillPlan:
    return PrefillPlan(
        prompts,
        decodes or [],
        work_of((request.num_computed, 1) for request in decodes or []),
        max_tokens=max_tokens,
        tpot_target=target,
        now=NOW,
        model=model,
        ranks={b"": 0} if ranks is None else ranks,
        waiting=waiting or {},
        burst=burst or Burst(),
    )


def counts(plan: PrefillPlan) -> dict[int, int]:
    return {request.sequence_number: count for request, count in plan.shares()[0]}


some_prompts = st.lists(
    st.builds(Prompt, st.integers(2, 200_000), st.integers(0, 200_000), st.sampled_from([b"a", b"b", b"c"])),
    max_size=12,
)


@given(
    prompts=some_prompts,
    contexts=st.lists(st.integers(1, 100_000), max_size=12),
    max_tokens=st.integers(16, 10_000),
    target=st.sampled_from([None, 0.005, 0.028, 1.0]),
    model=st.sampled_from([MODEL, COPYING]),
)
def test_any_step_keeps_to_its_limits_and_moves_somebody(
    prompts: list[Prompt], contexts: list[int], max_tokens: int, target: float | None, model: StepTimeModel
) -> None:
    requests = [make(number, prompt) for number, prompt in enumerate(prompts)]
    decodes = [decoding(100 + number, context) for number, context in enumerate(contexts)]
    ranks = {b"a": 0, b"b": 1, b"c": 5}
    plan = plan_of(requests, decodes, max_tokens=max_tokens, target=target, ranks=ranks, model=model)
    shares, work = plan.shares()
    given_tokens = sum(count for _, count in shares)
    assert given_tokens + len(decodes) <= max_tokens
    assert all(1 <= count <= request.num_remaining for request, count in shares)
    assert len({request.request_id for request, _ in shares}) == len(shares)
    assert bool(shares) == bool(prompts)
    running = [(request.num_computed, 1) for request in decodes]
    assert work.rows == given_tokens + len(decodes)
    assert work.pairs == work_of((request.num_computed, count) for request, count in shares).pairs
    if requests:
        oldest = min(shares, key=lambda share: share[0].sequence_number)
        assert oldest[0] is requests[0], "the oldest always moves"
    if target is not None and shares:
        alone = model.predict(work_of(running)) if running else 0.0
        keys = model.keys_read(min(request.num_computed for request in requests))
        limit = max(LONGEST_STEP * target, keys / KEYS_SHARE, FLOORS * (model.floor + keys))
        limit = max(limit, alone * PROMPTS_SHARE / (PROMPTS_SHARE - 1))
        first = requests[0]
        least = model.predict(work_of([*running, (first.num_computed, min(MIN_TIMED_CHUNK, first.num_remaining))]))
        assert model.predict(work) <= (limit + least) * 1.001


def test_a_prompt_alone_has_all_tokens_when_time_is_no_limit() -> None:
    assert counts(plan_of([make(0, Prompt(50_000))], target=None)) == {0: 8192}


def test_a_prompt_alone_may_take_several_targets_long() -> None:
    plan = plan_of([make(0, Prompt(100_000, 60_000))])
    work = plan.shares()[1]
    assert 0.7 * LONGEST_STEP * TARGET < MODEL.predict(work) <= LONGEST_STEP * TARGET


@pytest.mark.parametrize("context", [400_000, 700_000, 1_000_000])
def test_a_deep_prompt_alone_is_mostly_not_copied(context: int) -> None:
    """Its steps are longer where keys are copied, and no longer where they are not."""
    seconds = COPYING.predict(plan_of([make(0, Prompt(100_000, context))], model=COPYING).shares()[1])
    assert LONGEST_STEP * TARGET < seconds <= COPYING.keys_read(context) / KEYS_SHARE
    assert COPYING.keys_read(context) < 0.13 * seconds
    assert MODEL.predict(plan_of([make(0, Prompt(100_000, context))]).shares()[1]) <= LONGEST_STEP * TARGET


@pytest.mark.parametrize("context", [400_000, 1_000_000])
def test_beside_decodes_a_deep_prompt_has_most_of_what_is_not_copying(context: int) -> None:
    prompt, decodes = make(0, Prompt(100_000, context)), [decoding(1, 600) for _ in range(8)]
    seconds = COPYING.predict(plan_of([prompt], decodes, model=COPYING).shares()[1])
    longest = FLOORS * (COPYING.floor + COPYING.keys_read(context))
    assert 0.85 * longest < seconds <= longest


@pytest.mark.parametrize("deep_is_first", [True, False])
def test_what_a_deep_prompt_may_take_is_not_for_others(deep_is_first: bool) -> None:
    """Whoever of them came first: decodes wait for its own rows, not for longer steps of everybody's."""
    deep, other = make(0, Prompt(100_000, 1_000_000)), make(1, Prompt(4000))
    prompts = [deep, other] if deep_is_first else [other, deep]
    shares = counts(plan_of(prompts, [decoding(2, 600)], model=COPYING))
    assert shares[0] == MIN_TIMED_CHUNK
    assert COPYING.predict(work_of([(600, 1), (0, shares[1])])) <= TARGET


@pytest.mark.parametrize("context", [0, 10_000, 60_000, 120_000])
def test_a_step_with_decodes_lasts_as_long_as_they_want(context: int) -> None:
    plan = plan_of([make(0, Prompt(100_000, context))], [decoding(1, 600) for _ in range(8)])
    assert 0.7 * TARGET < MODEL.predict(plan.shares()[1]) <= TARGET


def test_who_waited_long_for_the_first_token_waits_longer_for_the_next() -> None:
    plan = plan_of([make(0, Prompt(100_000))], [decoding(1, 600, ttft=0.1 * PATIENCE)])
    assert 0.07 < MODEL.predict(plan.shares()[1]) <= 0.1


def test_decodes_wait_longer_for_a_crowd_of_their_own_tenant_alone() -> None:
    decode, prompt = decoding(0, 1000), make(1, Prompt(131_072))
    for waiting, targets in (({b"": 1}, 1.0), ({b"": 100}, CROWD), ({b"other": 100}, 1.0)):
        plan = plan_of([prompt], [decode], waiting=waiting)
        seconds = MODEL.predict(plan.shares()[1])
        assert 0.7 * targets * TARGET < seconds <= targets * TARGET


def test_requests_of_a_burst_wait_longer_for_each_other() -> None:
    prompts, decodes = [make(n, Prompt(5000, 100_000)) for n in (8, 9)], [decoding(n, 1000) for n in range(4)]
    burst = Burst()
    burst.look({b"": 5}, {b"": 1}, NOW - 30, NOW - 20)  # before the first tokens of those that decode
    burst.look({b"": 5}, {b"": 1}, NOW - 30, NOW)
    seconds = MODEL.predict(plan_of(prompts, decodes, burst=burst).shares()[1])
    assert 0.7 * BURST_STEP * TARGET < seconds <= BURST_STEP * TARGET
    short = [make(n, Prompt(9000, 4000)) for n in (8, 9)]
    seconds = MODEL.predict(plan_of(short, decodes, burst=burst).shares()[1])
    assert seconds <= MODEL.predict(StepWork(4, 0, 4004).with_chunk(4000, BURST_ROWS)), "newcomers wait for it"
    stream = decoding(4, 1000, arrival=NOW - 40)  # since before the burst
    assert MODEL.predict(plan_of(prompts, [*decodes, stream], burst=burst).shares()[1]) <= TARGET


def test_prompts_have_a_share_of_the_time_however_long_decodes_take() -> None:
    decodes = [decoding(number, 30_000) for number in range(1, 65)]
    alone = MODEL.predict(StepWork(64, 0, 64 * 30_001))
    assert alone > 2 * TARGET
    plan = plan_of([make(0, Prompt(100_000))], decodes)
    seconds = MODEL.predict(plan.shares()[1])
    assert seconds - alone > 0.7 * seconds / PROMPTS_SHARE


def test_a_chat_is_whole_in_the_step_of_a_giant_which_goes_on() -> None:
    shares = counts(plan_of([make(0, Prompt(131_072, 50_000)), make(1, Prompt(512))], [decoding(2, 600)]))
    assert shares[1] == 512
    assert shares[0] >= MIN_TIMED_CHUNK


def test_a_prompts_first_token_does_not_wait_for_a_giants_long_step() -> None:
    plan = plan_of([make(0, Prompt(131_072)), make(1, Prompt(512))])
    assert MODEL.predict(plan.shares()[1]) <= TARGET


@pytest.mark.parametrize("context", [0, 20_000, 60_000, 120_000])
def test_chunks_that_time_cuts_fill_whole_tiles(context: int) -> None:
    for decodes in ([], [decoding(n, 600) for n in range(1, 8)]):
        rows = plan_of([make(0, Prompt(100_000, context))], decodes).shares()[1].rows
        assert rows % TILES[-1] == 0 or rows % TILES[-1] > LARGEST_CUT * (rows - len(decodes))
        assert rows < TILES[0] / LARGEST_CUT or rows % TILES[0] == 0
        assert rows < 384 or rows % 128 != 64


@pytest.mark.parametrize("context", [85_000, 100_000, 115_000, 127_000])
def test_a_small_chunk_of_a_deep_prompt_fills_tiles_of_attention(context: int) -> None:
    decodes = [decoding(n, 600) for n in range(1, 8)]
    (chunk,) = counts(plan_of([make(0, Prompt(131_072, context))], decodes)).values()
    assert chunk + len(decodes) == 256 or (chunk + len(decodes) < 256 and chunk % FEW_TILE == 0)


def test_of_giants_the_one_that_is_soonest_done_runs_alone() -> None:
    giants = [make(0, Prompt(60_000)), make(1, Prompt(60_000)), make(2, Prompt(30_000, 10_000))]
    shares = counts(plan_of(giants))
    assert shares.keys() == {0, 2}, "it, and the oldest"
    assert shares[2] > shares[0]
    assert counts(plan_of(giants[:2])).keys() == {0}


def test_the_oldest_has_its_share_beside_shorter_ones() -> None:
    shares = counts(plan_of([make(0, Prompt(100_000)), *(make(n, Prompt(1000)) for n in range(1, 30))], target=None))
    assert shares[0] >= 8192 // OLDEST_SHARE
    assert sum(shares.values()) == 8192


def test_the_tenant_that_was_served_less_goes_first() -> None:
    prompts = [make(0, Prompt(4000, 0, b"a")), make(1, Prompt(20_000, 0, b"b"))]
    assert counts(plan_of(prompts, target=None, max_tokens=4096, ranks={b"a": 1, b"b": 0})) == {0: 1024, 1: 3072}
    assert counts(plan_of(prompts, target=None, max_tokens=4096, ranks={b"a": 0, b"b": 0})) == {0: 4000, 1: 96}


def test_a_newcomer_is_let_in_when_it_would_have_a_share() -> None:
    giant = make(0, Prompt(131_072))
    plan = plan_of([giant], [decoding(9, 600)])
    assert plan.has_room(make(1, Prompt(512)), 0)
    assert not plan.has_room(make(2, Prompt(131_072)), 0)
    assert plan.has_room(make(3, Prompt(131_072)), 131_000), "the rest is in the prefix cache"


def test_one_older_than_all_that_run_is_let_in_when_it_may_be_the_oldest() -> None:
    plan = plan_of([make(5, Prompt(512)), make(6, Prompt(90_000))])
    assert plan.has_room(make(4, Prompt(131_072)), 0, may_be_oldest=True)
    assert not plan.has_room(make(4, Prompt(131_072)), 0)


@given(prompts=some_prompts.filter(bool), newcomer=st.builds(Prompt, st.integers(2, 100_000), tenant=st.just(b"a")))
def test_who_is_let_in_has_tokens_in_the_step(prompts: list[Prompt], newcomer: Prompt) -> None:
    plan = plan_of([make(n, prompt) for n, prompt in enumerate(prompts)], ranks={b"a": 0, b"b": 1, b"c": 5})
    request = make(len(prompts), newcomer)
    if plan.has_room(request, 0):
        plan.add(request)
        shares = counts(plan)
        assert len(prompts) in shares


def test_letting_many_in_takes_no_look_at_each_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, number = plan_of([], target=None), 0
    with_chunk, looks = StepWork.with_chunk, []
    monkeypatch.setattr(StepWork, "with_chunk", lambda *args, **kwargs: looks.append(0) or with_chunk(*args, **kwargs))
    while plan.has_room(make(number, Prompt(30)), 0):
        plan.add(make(number, Prompt(30)))
        number += 1
    assert number > 200
    assert len(looks) < 10 * number
