"""When training rests, by a clock of the test's."""

import pytest

from models.training import Pacer
from models.training.pacing import LOOK_SECONDS


class Day:
    """A clock that goes on while somebody works or sleeps, and a sign that goes down at some time."""

    def __init__(self, share: float, *, work: float, ends: float = 1e9) -> None:
        self.now, self.worked, self.slept = 0.0, 0, 0.0
        self.ends = ends
        self.work = work
        self.pacer = Pacer(lambda: self.now < self.ends, share, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        assert 0 < seconds <= LOOK_SECONDS
        self.now += seconds
        self.slept += seconds

    def _work(self) -> None:
        self.now += self.work
        self.worked += 1

    def boundaries(self, count: int) -> None:
        for _ in range(count):
            self.pacer.boundary(self._work)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
def test_while_somebody_is_answering_work_takes_its_share_of_the_time(share: float) -> None:
    day = Day(share, work=0.07)
    day.boundaries(50)
    assert day.worked == 50
    assert day.worked * day.work / day.now == pytest.approx(share)


def test_while_nobody_is_answering_nothing_waits() -> None:
    day = Day(0.25, work=0.07, ends=0.0)
    day.boundaries(50)
    assert (day.worked, day.slept) == (0, 0)


def test_a_rest_ends_soon_after_the_last_answer() -> None:
    day = Day(0.01, work=1.0, ends=1.5)
    day.boundaries(2)
    assert day.worked == 1
    assert 0.5 <= day.slept <= 0.5 + LOOK_SECONDS + 1e-9


def test_what_was_queued_while_nobody_was_answering_counts_from_the_first_boundary_on() -> None:
    day = Day(0.5, work=0.02)
    day.boundaries(1)
    assert day.slept == pytest.approx(0.02)

    day.ends = day.now
    day.boundaries(1)
    day.now += 100.0  # nobody is answering for long
    day.ends = 1e9
    day.boundaries(1)
    assert day.slept == pytest.approx(0.04)


def test_work_outside_the_device_counts_too() -> None:
    """Between two boundaries, before the device is waited for: on a CPU that is all of it."""
    day = Day(0.25, work=0.0)
    day.boundaries(1)
    day.now += 0.4
    day.boundaries(1)
    assert day.slept == pytest.approx(1.2)


def test_what_was_before_work_begins_is_no_work() -> None:
    """A client that thinks, a checkpoint that is written."""
    day = Day(0.25, work=0.1)
    day.boundaries(1)
    day.now += 100.0
    day.pacer.begin()
    day.boundaries(1)
    assert day.slept == pytest.approx(0.6)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
        Pacer(lambda: True, share)
