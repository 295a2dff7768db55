"""By what a start is judged, and what is told of one that lasts."""

import math

import pytest

from server.engine import starts as starts_module
from server.engine.starts import START_TIMES, Starts


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(starts_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_first_start_may_be_silent_for_ever(clock: Clock) -> None:
    starts = Starts(least=100.0)
    starts.begin()
    clock.now += 100_000
    assert starts.max_silence == math.inf
    assert starts.seconds_left == 0.0


@pytest.mark.parametrize(("took", "may_be_silent"), [(2.0, 100.0), (90.0, START_TIMES * 90.0)])
def test_the_next_may_be_silent_for_several_times_as_long_as_that_took(
    clock: Clock, took: float, may_be_silent: float
) -> None:
    starts = Starts(least=100.0)
    starts.begin()
    clock.now += took
    starts.end()
    starts.begin()
    assert starts.max_silence == may_be_silent
    assert starts.seconds_left == took


def test_a_start_that_was_given_up_is_no_part_of_the_one_after_it(clock: Clock) -> None:
    starts = Starts(least=100.0)
    for seconds in (5000.0, 7.0):
        starts.begin()
        clock.now += seconds
    starts.end()
    starts.begin()
    assert starts.seconds_left == 7.0


def test_the_log_says_how_long_and_what_has_been_done(clock: Clock) -> None:
    starts = Starts()
    starts.begin()
    clock.now += 61
    assert str(starts) == "61 s so far, no stage of it has ended"
    starts.stages = {"imports": 5.31, "weights": 40.0}
    assert str(starts) == "61 s so far, of them imports 5.3, weights 40.0"
    starts.begin()
    assert str(starts) == "0 s so far, no stage of it has ended"
