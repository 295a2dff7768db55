"""What is prepared for later steps is prepared between requests, one thing at a time."""

import random
from dataclasses import replace

import pytest
from cranked_engine import Engine, ListLink, tokens
from fake_runner import expected

from server.engine.messages import RequestFailed, ToEngine


class TimedLink(ListLink):
    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float] = []

    def receive(self, timeout: float) -> list[ToEngine | RequestFailed]:
        self.timeouts.append(timeout)
        return super().receive(timeout)


def engine_with(count: int) -> tuple[Engine, TimedLink, list[bool]]:
    """With so many things to prepare, and whether there was work when each call came."""
    engine = Engine()
    link = engine.link = engine.core.link = TimedLink()
    calls: list[bool] = []

    def prepare() -> bool:
        calls.append(engine.core.has_work)
        return len(calls) <= count

    engine.core.loaded = replace(engine.core.loaded, prepare=prepare)
    return engine, link, calls


def test_one_thing_is_prepared_a_turn_without_waiting_until_all_is_there() -> None:
    engine, link, calls = engine_with(3)
    for turn in range(1, 8):
        engine.turn()
        assert len(calls) == min(turn, 4)
        engine.now -= 1.0  # the next statistics are not due
    assert link.timeouts[:4] == [0.0] * 4
    assert link.timeouts[-1] > 0


def test_whether_there_is_more_to_prepare_is_asked_with_each_sign_of_life() -> None:
    engine, link, calls = engine_with(0)
    for turn in range(1, 8):
        engine.turn()
        assert len(calls) == turn == len(engine.stats)
    assert link.timeouts[1:] == [0.0] * 6


def test_nothing_is_prepared_while_there_is_work_or_a_last_word_to_say() -> None:
    engine, _, calls = engine_with(100)
    engine.turn()
    prompt = tokens(random.Random(0), 40)
    engine.add("r", prompt)
    engine.run(until=lambda: "r" in engine.reasons)
    assert engine.tokens["r"] == expected(prompt, 8)
    assert len(calls) == 1
    engine.turn()
    assert len(calls) == 2
    assert not any(calls)


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.usefixtures("_overlaps")
def test_who_hears_the_last_word_finds_it_counted(max_tokens: int) -> None:
    engine = Engine()
    engine.turn()
    engine.now -= 1.0
    rng = random.Random(0)
    for number in range(1, 4):
        before = len(engine.stats)
        engine.add(f"r{number}", tokens(rng, 40), max_tokens)
        while f"r{number}" not in engine.reasons:
            engine.turn()
            engine.now -= 1.0  # no statistics are due
        assert len(engine.stats) == before + 1
        last = engine.stats[-1]
        assert (last.generation_tokens, last.num_running, last.num_waiting) == (number * max_tokens, 0, 0)
        assert last.num_free_blocks == engine.cache.num_free_blocks
