"""A key that holds more than its part gives some of it to one that waits with less, and to nobody else."""

import random

import pytest
from seeds import seeds
from simulated_engine import SimulatedEngine

from server.engine.reclaim import PATIENCE

LONG = 4000  # tokens of an answer: half a minute


def preemptions(engine: SimulatedEngine, prefix: str) -> int:
    """So far, of those that are open."""
    return sum(request.num_preemptions for name, request in engine.scheduler.open.by_id.items() if prefix in name)


def test_a_chat_gets_a_slot_where_another_keys_long_answers_have_them_all() -> None:
    """It waited 24 seconds for the first of them to end."""
    engine = SimulatedEngine(max_num_seqs=16)
    for number in range(64):
        engine.ask(f"flood{number}", 0.0, 512, LONG, b"flood")
    for number in range(6):
        engine.ask(f"quiet{number}", 2.0 + 5 * number, 512, 64, b"quiet")
    engine.run()
    assert max(engine.ttfts("quiet")) < PATIENCE + 0.15
    assert engine.scheduler.num_preemptions == 6
    assert all(len(answer.token_times) == LONG for name, answer in engine.answers.items() if name.startswith("flood"))


def test_a_long_prompt_gets_blocks_where_another_keys_answers_have_them_all() -> None:
    engine = SimulatedEngine(num_blocks=1000)
    for number in range(60):
        engine.ask(f"flood{number}", 0.0, 200, 3000, b"flood")
    for number in range(4):
        engine.ask(f"quiet{number}", 6.0 + 5 * number, 4000, 200, b"quiet")
    engine.run()
    assert max(engine.ttfts("quiet")) < PATIENCE + 0.4
    assert max(engine.gaps("quiet")) < 0.1, "and keeps them: as the youngest it lost them when others grew"


def test_one_key_alone_takes_nothing_from_itself() -> None:
    engine = SimulatedEngine(max_num_seqs=16)
    for number in range(64):
        engine.ask(f"r{number}", number / 10, 512, 500, b"one")
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_two_keys_with_endless_work_do_not_take_places_back_and_forth() -> None:
    engine = SimulatedEngine(max_num_seqs=16)
    for number in range(64):
        engine.ask(f"first{number}", 0.0, 512, 2000, b"first")
        engine.ask(f"second{number}", 2.0, 512, 2000, b"second")
    engine.run()
    assert engine.scheduler.num_preemptions == 4  # a fourth of the slots at once; the others when answers end
    assert engine.ttfts("second")[7] < 13
    assert max(engine.gaps("second")) < 0.1
    pairs = zip(engine.ttfts("first"), engine.ttfts("second"), strict=True)
    assert all(-2 < second - first < 25 for first, second in pairs)


@pytest.mark.parametrize(("length", "taken"), [(40_000, 0), (16_000, 1)])
def test_no_more_is_taken_than_makes_room_and_nothing_for_one_that_would_have_none(length: int, taken: int) -> None:
    """1,000 blocks of 64: a part are 500."""
    engine = SimulatedEngine(num_blocks=1001)
    for number in range(4):
        engine.ask(f"flood{number}", 0.0, 15_000, 3000, b"flood")
    engine.ask("quiet", 4.0, length, 4, b"quiet")
    engine.run(until=8.0)
    assert preemptions(engine, "flood") == taken
    assert bool(engine.answers["quiet"].token_times) == bool(taken)


def test_who_was_served_more_takes_nothing() -> None:
    engine = SimulatedEngine(max_num_seqs=4)
    for number in range(8):
        engine.ask(f"slow{number}", 0.0, 512, LONG, b"slow")
    scheduler = engine.scheduler
    engine.ask("greedy", 1.0, 512, 64, b"greedy")
    scheduler.fairness.charge(b"greedy", outputs=10**7)
    engine.run(until=5.0)
    assert not engine.answers["greedy"].token_times
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_of_any_mixture_every_answer_is_whole_and_every_block_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    engine = SimulatedEngine(num_blocks=300, max_num_seqs=rng.choice([3, 16]))
    wanted = {}
    for number in range(150):
        tenant = rng.choice([b"a", b"a", b"a", b"b", b"c"])
        wanted[f"r{number}"] = rng.randrange(1, 900)
        engine.ask(f"r{number}", rng.uniform(0, 20), rng.choice((1, 300, 4000, 12_000)), wanted[f"r{number}"], tenant)
    engine.run()
    engine.scheduler.open.check_integrity()
    assert {name: len(answer.token_times) for name, answer in engine.answers.items()} == wanted
    assert engine.scheduler.num_preemptions > 0
