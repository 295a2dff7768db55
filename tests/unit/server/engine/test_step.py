"""What a scheduled step says of its work is what the device will do."""

import random

import pytest
from cranked_engine import Engine, tokens
from fake_runner import QUOTES

from server.engine.drafting import DraftLimits
from server.engine.sharing import SharingLimits
from server.engine.step import ScheduledStep
from server.engine.step_time import work_of


def steps(engine: Engine) -> list[ScheduledStep]:
    """Of a run to the end."""
    seen: list[ScheduledStep] = []
    schedule = engine.scheduler.schedule

    def watched() -> ScheduledStep | None:
        step = schedule()
        if step is not None:
            assert step.work.rows == step.total_tokens
            seen.append(step)
        return step

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    engine.run()
    return seen


def test_work_is_that_of_the_rows() -> None:
    rng = random.Random(0)
    engine = Engine(budget=64)
    for number in range(6):
        engine.add(f"r{number}", tokens(rng, rng.randrange(1, 200)), max_tokens=10)
    works = []
    launched = engine.scheduler.launched

    def watched(step: ScheduledStep) -> object:
        works.append(work_of((r.num_computed, n) for r, n in zip(step.requests, step.num_tokens, strict=True)))
        return launched(step)

    engine.scheduler.launched = watched  # type: ignore[assignment, method-assign]
    assert [step.work for step in steps(engine)] == works
    assert len(works) > 10


def test_keys_that_decodes_share_are_read_once() -> None:
    rng = random.Random(0)
    engine = Engine(1024)
    sharing = engine.scheduler.assembly.sharing
    assert sharing is not None
    sharing.limits = SharingLimits(1)
    document = tokens(rng, 800)
    for number in range(4):
        engine.add(f"r{number}", document + tokens(rng, 16), max_tokens=12, ignore_eos=True)
    alone = [step for step in steps(engine) if len(step.requests) == 4 == step.work.rows]
    assert alone
    assert all(step.sharing.decodes for step in alone)
    assert all(800 + 4 * 16 < step.work.kv_tokens <= 800 + 4 * (16 + 12 + 16) for step in alone)


def test_keys_within_keys_that_decodes_share_are_read_once() -> None:
    rng = random.Random(0)
    engine = Engine(1024)
    sharing = engine.scheduler.assembly.sharing
    assert sharing is not None
    sharing.limits = SharingLimits(1, max_levels=2)
    instructions = tokens(rng, 160)
    documents = [instructions + tokens(rng, 320) for _ in range(2)]
    for document in documents:
        engine.add(f"first {document[-1]}", [*document, 7], max_tokens=1, ignore_eos=True)
        engine.run()
    for number in range(6):
        engine.add(f"r{number}", documents[number % 2] + tokens(rng, 16), max_tokens=12, ignore_eos=True)
    alone = [step for step in steps(engine) if len(step.requests) == 6 == step.work.rows]
    assert alone
    assert all(len(step.sharing.decodes) == 2 for step in alone)
    once = 160 + 2 * 320
    assert all(once + 6 * 16 < step.work.kv_tokens <= once + 6 * (16 + 12 + 16) for step in alone)


@pytest.mark.parametrize("prefills", [True, False])
def test_prompts_share_where_the_runner_reads_so(prefills: bool) -> None:
    rng = random.Random(0)
    engine = Engine(1024)
    sharing = engine.scheduler.assembly.sharing
    assert sharing is not None
    sharing.limits = SharingLimits(1, prefills=prefills)
    document = tokens(rng, 800)
    engine.add("first", [*document, 7], max_tokens=1, ignore_eos=True)
    engine.run()
    for number in range(4):
        engine.add(f"r{number}", document + tokens(rng, 16), max_tokens=12, ignore_eos=True)
    taken = steps(engine)
    assert any(step.sharing.prefills for step in taken) == prefills
    assert any(step.sharing.decodes for step in taken)


def test_halves_of_a_step_are_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "drafts", DraftLimits(step_cost=0.0, row_cost=0.0, max_rows=64))
    rng = random.Random(0)
    engine = Engine(1024)
    document = [QUOTES, *tokens(rng, 200)]
    for number in range(5):
        repeated = document[:8] if number % 2 else []
        engine.add(f"r{number}", document + tokens(rng, 16) + repeated, max_tokens=60)
    schedule = engine.scheduler.schedule
    num_uneven = 0

    def watched() -> ScheduledStep | None:
        nonlocal num_uneven
        step = schedule()
        if step is not None and len(step.requests) > 1:
            halves = step.halves()
            assert [request for half in halves for request in half.requests] == step.requests
            assert sum((half.batch().seqs for half in halves), ()) == step.batch().seqs
            assert [half.work for half in halves] == [
                work_of((r.num_computed, n) for r, n in zip(half.requests, half.num_tokens, strict=True))
                for half in halves
            ]
            assert {request: ids for half in halves for request, ids in half.drafts.items()} == step.drafts
            num_uneven += any(bool(half.drafts) != bool(step.drafts) for half in halves)
        return step

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    engine.run()
    assert num_uneven > 0


def test_a_step_without_rows_whose_requests_have_ended_is_that_of_the_others() -> None:
    rng = random.Random(0)
    engine = Engine()
    for number in range(4):
        engine.add(f"r{number}", tokens(rng, 20), max_tokens=10, ignore_eos=True)
    engine.run(until=lambda: len(engine.tokens) == 4)
    step = engine.scheduler.schedule()
    assert step is not None
    assert step.living().batch().seqs == step.batch().seqs
    engine.scheduler.open.abort(["r1", "r2"])
    assert [request.request_id for request in step.living().requests] == ["r0", "r3"]
    assert step.living().work.rows == 2
