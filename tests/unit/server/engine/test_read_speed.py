"""How long reading takes is told by the reads of late, whatever ran beside what."""

import pytest

from server.engine.read_speed import MEASURED_FOR, ReadSpeed


def test_it_is_not_known_before_a_sample_has_ended_and_is_forgotten_after_a_while() -> None:
    speed = ReadSpeed(2)
    assert (speed.seconds(1, 0.0), speed.missing(0.0)) == (None, 2)
    speed.begin(0.0)
    assert speed.missing(0.0) == 1
    speed.begin(0.0)
    assert speed.missing(0.0) == 0
    speed.end(100, 1.0)
    assert (speed.seconds(100, 1.0), speed.missing(1.0)) == (None, 0)
    speed.end(100, 1.0)
    assert speed.seconds(1000, 1.0) == pytest.approx(5, rel=0.02)
    assert speed.seconds(1000, 1.0 + MEASURED_FOR) is not None
    later = 1.1 + MEASURED_FOR
    assert (speed.seconds(1000, later), speed.missing(later)) == (None, 2)
    speed.begin(later)
    speed.end(100, later + 4.0)
    assert speed.seconds(100, later + 4.0) is None  # one read is no sample, and those before no longer count
    speed.begin(later + 4.0)
    speed.end(100, later + 8.0)
    assert speed.seconds(100, later + 8.0) == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("beside", [1, 4])
def test_reads_beside_each_other_share_their_time_and_pauses_do_not_count(beside: int) -> None:
    speed, now = ReadSpeed(4), 0.0
    for _ in range(20):
        now += 7.0  # nothing to read
        for _ in range(beside):
            speed.begin(now)
        for number in range(beside):
            speed.end(100, now + 1.0 + 0.1 * number)
        now += 2.0
    seconds = speed.seconds(beside * 100, now)
    assert seconds == pytest.approx(1.0 + 0.1 * (beside - 1), rel=0.05)


def test_it_follows_a_disk_that_becomes_slow() -> None:
    speed, now = ReadSpeed(4), 0.0
    for seconds in [0.001] * 1000 + [1.0] * 50:
        speed.begin(now)
        now += seconds
        speed.end(100, now)
    found = speed.seconds(100, now)
    assert found is not None
    assert 0.5 < found <= 1.0


def test_where_every_read_fails_reading_takes_for_ever() -> None:
    speed = ReadSpeed(2)
    for _ in range(2):
        speed.begin(0.0)
        speed.end(0, 0.1)
    assert speed.seconds(1, 0.1) == float("inf")
