from server.equal_parts import EqualParts


def test_a_tenant_may_have_all_of_the_room_while_nobody_else_wants_any() -> None:
    parts = EqualParts(8)
    parts.hold("one", 8)
    assert not parts.has_room("one", 1)
    assert parts.has_room("one", 0)
    parts.hold("one", -8)
    assert parts.has_room("another", 8)
    assert not parts.has_room("another", 9)


def test_when_it_is_full_whoever_has_less_than_an_equal_part_gets_more() -> None:
    parts = EqualParts(8)
    parts.hold("one", 8)
    parts.hold("another", 3)
    assert parts.has_room("another", 1)
    assert not parts.has_room("another", 2)
    assert parts.has_room("third", 2)
    assert not parts.has_room("third", 3)
    assert not parts.has_room("one", 1)


def test_who_holds_nothing_any_more_takes_no_part() -> None:
    parts = EqualParts(8)
    parts.hold("one", 8)
    for number in range(100):
        parts.hold(str(number), 1)
        parts.hold(str(number), -1)
    assert parts.has_room("another", 4)


def test_however_many_tenants_come_what_they_hold_is_bounded() -> None:
    parts = EqualParts(12)
    held = 0
    for number in range(100):
        while parts.has_room(str(number), 1):
            parts.hold(str(number), 1)
            held += 1
    assert held == 12 + 6 + 4 + 3 + 2 + 2 + 1 + 1 + 1 + 1 + 1 + 1
