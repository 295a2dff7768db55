"""Slots that are never idle go round among adapters."""

import pytest

from server.engine.adapters import KEPT, STARTS, Adapter, AdapterTable


def table(max_loras: int, count: int) -> tuple[AdapterTable, list[Adapter]]:
    """The first ones run, a request each, and the others are wanted."""
    slots = AdapterTable(max_loras, count)
    adapters = []
    for number in range(count):
        slots.register(number, f"a{number}", "")
        adapter = slots.find(f"a{number}")
        assert adapter is not None
        slots.open(adapter)
        adapters.append(adapter)
    for adapter in adapters[:max_loras]:
        slots.start(adapter)
    return slots, adapters


def pass_by(slots: AdapterTable, adapter: Adapter, times: int = STARTS) -> None:
    """So many requests of an adapter that runs start, and end."""
    for _ in range(times):
        slots.start(adapter)
        slots.stop(adapter)


def starters(slots: AdapterTable, adapters: list[Adapter]) -> list[str]:
    return [adapter.name for adapter in adapters if slots.may_start(adapter)]


def test_after_so_many_requests_one_slot_comes_free_and_others_go_on() -> None:
    slots, adapters = table(3, 5)
    pass_by(slots, adapters[1], STARTS - 4)
    assert starters(slots, adapters) == ["a0", "a1", "a2"]
    pass_by(slots, adapters[1], 3)
    assert starters(slots, adapters) == ["a1", "a2"], "the first had its slot for longest"
    slots.stop(adapters[0])
    assert starters(slots, adapters) == ["a1", "a2", "a3"], "no other takes it"
    slots.start(adapters[3])
    assert starters(slots, adapters) == ["a1", "a2", "a3"]
    slots.stop(adapters[2])
    assert starters(slots, adapters) == ["a0", "a1", "a2", "a3", "a4"], "an idle slot is anybody's again"


def test_who_has_waited_for_longest_is_next() -> None:
    slots, adapters = table(1, 3)
    slots.close(adapters[1])
    pass_by(slots, adapters[0], 5)
    slots.open(adapters[1])
    pass_by(slots, adapters[0])
    slots.stop(adapters[0])
    assert starters(slots, adapters) == ["a2"]
    slots.start(adapters[2])
    pass_by(slots, adapters[2], STARTS - 2)
    assert starters(slots, adapters) == ["a2"]
    pass_by(slots, adapters[2], 1)
    slots.stop(adapters[2])
    assert starters(slots, adapters) == ["a1"], "which has waited since before the first lost its slot"


def test_nobody_gives_way_where_nobody_waits() -> None:
    slots, adapters = table(2, 2)
    pass_by(slots, adapters[0], 10 * STARTS)
    assert starters(slots, adapters) == ["a0", "a1"]


@pytest.mark.parametrize("retires", [False, True])
def test_who_wants_nothing_any_more_is_not_next(retires: bool) -> None:
    slots, adapters = table(1, 2)
    pass_by(slots, adapters[0])
    assert not starters(slots, adapters)
    if retires:
        slots.retire("a1")
    slots.close(adapters[1])
    assert starters(slots, adapters) == ["a0"]


def test_a_slot_is_not_kept_for_ever() -> None:
    """The requests that it is kept for may find no blocks, or not have their turn."""
    slots, adapters = table(1, 2)
    pass_by(slots, adapters[0])
    for _ in range(1000):
        slots.look()
    assert not starters(slots, adapters), "it runs still"
    slots.stop(adapters[0])
    for _ in range(KEPT):
        slots.look()
        assert starters(slots, adapters) == ["a1"]
    slots.look()
    assert starters(slots, adapters) == ["a0", "a1"]
