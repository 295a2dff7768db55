"""How many deaths are too many."""

from server.engine.deaths import Deaths


def test_more_than_so_many_within_the_window_are_too_many() -> None:
    deaths = Deaths(2, 300.0)
    too_many = []
    for now in (0.0, 200.0, 301.0, 302.0):
        too_many.append(deaths.add(now))
        deaths.recover()
    assert too_many == [False, False, False, True]
    assert deaths.num == 4
    assert str(deaths) == "3 times in 300 s"


def test_as_many_with_no_life_between_are_too_many_however_long_they_took() -> None:
    deaths = Deaths(2, 300.0)
    assert [deaths.add(now) for now in (0.0, 1000.0, 2000.0)] == [False, False, True]
    assert str(deaths) == "3 times without being ready between"


def test_whoever_recovers_begins_anew() -> None:
    deaths = Deaths(2, 300.0)
    assert not any(deaths.add(now) for now in (0.0, 1000.0))
    deaths.recover()
    assert [deaths.add(now) for now in (2000.0, 3000.0, 4000.0)] == [False, False, True]
