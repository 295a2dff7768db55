"""Requests that begin with the same blocks are found, stand side by side, and are grouped where it pays."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.batch import SamplingParams
from models.shared_runs import Levels, SharedRun, SharingLimits
from server.engine.messages import AddRequest
from server.engine.request import Request
from server.engine.sharing import PrefixSharing
from server.engine.token_ids import TokenIds

FREE = SharingLimits(least_saved_blocks=1, max_levels=3, tile_rows=1000)


def request(blocks: Sequence[int], name: int = 0) -> Request:
    message = AddRequest(str(name), TokenIds([1]), SamplingParams(), b"")
    made = Request(message, sequence_number=name, eos_token_ids=(), max_model_len=10, now=0.0)
    made.block_ids = list(blocks)
    return made


def joined(tables: Sequence[Sequence[int]], limits: SharingLimits = FREE) -> tuple[PrefixSharing, list[Request]]:
    sharing = PrefixSharing(limits)
    requests = [request(table, i) for i, table in enumerate(tables)]
    for one in requests:
        sharing.join(one)
    return sharing, requests


def common(tables: Sequence[Sequence[int]]) -> int:
    return next(
        (i for i, blocks in enumerate(zip(*tables, strict=False)) if len(set(blocks)) > 1), min(map(len, tables))
    )


def check(requests: list[Request], arranged: list[Request], levels: Levels) -> None:
    """Every run is true of the tables, runs follow one another, and lie within runs of the level before."""
    assert sorted(map(id, requests)) == sorted(map(id, arranged))
    for depth, level in enumerate(levels):
        assert level
        assert all(before.end <= after.first for before, after in pairwise(level))
        for run in level:
            assert run.end - run.first >= 2
            assert run.start < run.stop <= common([one.block_ids for one in arranged[run.first : run.end]])
            if depth == 0:
                assert run.start == 0
            else:
                assert any(
                    outer.first <= run.first and run.end <= outer.end and run.start == outer.stop
                    for outer in levels[depth - 1]
                )


def saved(levels: Levels) -> int:
    return sum((run.end - run.first - 1) * (run.stop - run.start) for level in levels for run in level)


def most_saved(tables: Sequence[Sequence[int]]) -> int:
    """Of any grouping with as many levels as one likes: blocks in the tables, less different beginnings of them."""
    beginnings = {tuple(table[: i + 1]) for table in tables for i in range(len(table))}
    return sum(map(len, tables)) - len(beginnings)


def test_one_document_is_one_run_of_all_who_read_it() -> None:
    document = list(range(1, 21))
    sharing, requests = joined([[*document, 100 + i] for i in range(5)])
    arranged, levels = sharing.arrange(requests)
    assert levels == ((SharedRun(0, 5, 0, 20),),)
    assert sorted(map(id, arranged)) == sorted(map(id, requests))


def test_requests_that_share_come_first_and_side_by_side() -> None:
    a, b = [1, 2, 3, 4], [5, 6, 7]
    tables = [[*a, 10], [50], [*b, 11], [*a, 12], [60], [*b, 13]]
    sharing, requests = joined(tables)
    arranged, levels = sharing.arrange(requests)
    check(requests, arranged, levels)
    assert levels == ((SharedRun(0, 2, 0, 4), SharedRun(2, 4, 0, 3)),)
    assert {one.block_ids[0] for one in arranged[4:]} == {50, 60}


def test_nested_prefixes_are_levels_and_one_level_takes_what_saves_most() -> None:
    tables = [[1, 2, 3, 4, 5, 6, 10 + i] for i in range(4)] + [[1, 2, 20 + i] for i in range(4)]
    sharing, requests = joined(tables, SharingLimits(1, max_levels=2, tile_rows=1000))
    arranged, levels = sharing.arrange(requests)
    check(requests, arranged, levels)
    assert saved(levels) == 7 * 2 + 3 * 4
    sharing, requests = joined(tables, SharingLimits(1, max_levels=1, tile_rows=1000))
    arranged, levels = sharing.arrange(requests)
    check(requests, arranged, levels)
    assert saved(levels) == 3 * 6  # more than 7 * 2


def test_a_level_that_saves_too_little_is_left_out() -> None:
    tables = [[1, 2, 10 + i] for i in range(4)]
    for least, found in ((6, True), (7, False)):
        sharing, requests = joined(tables, SharingLimits(least, max_levels=2, tile_rows=1000))
        arranged, levels = sharing.arrange(requests)
        assert bool(levels) is found
        assert found or arranged == requests


def test_a_second_level_must_earn_its_own_cost() -> None:
    tables = [[*range(1, 101), 200, 300 + i] for i in range(3)] + [[*range(1, 101), 210, 310 + i] for i in range(3)]
    sharing, requests = joined(tables, SharingLimits(5, max_levels=2, tile_rows=1000))
    _, levels = sharing.arrange(requests)
    assert len(levels) == 1  # the second would save 4
    assert saved(levels) == 500


def test_a_second_level_is_chosen_as_soon_as_it_saves_what_it_costs() -> None:
    """Documents of 30 blocks behind instructions of 10, three readers each: read apart, the instructions cost 10 blocks
    a document but the first."""
    for documents, cost, levels in ((5, 39, 2), (5, 40, 1), (5, 41, 1), (6, 41, 2), (2, 9, 2), (1, 1, 1)):
        tables = [
            [*range(1, 11), *range(100 * d, 100 * d + 30), 10_000 + 10 * d + i]
            for d in range(1, documents + 1)
            for i in range(3)
        ]
        sharing, requests = joined(tables, SharingLimits(cost, max_levels=2, tile_rows=1000))
        arranged, found = sharing.arrange(requests)
        check(requests, arranged, found)
        assert len(found) == levels
        instructions = 3 * documents - 1 if levels == 2 else 2 * documents
        assert saved(found) == 2 * 30 * documents + 10 * instructions


def test_rows_that_fill_a_tile_alone_save_nothing() -> None:
    tables = [[*range(1, 101), 200 + i] for i in range(4)]
    sharing, requests = joined(tables, SharingLimits(1, tile_rows=32))
    assert sharing.arrange(requests, [512, 512, 512, 512])[1] == ()
    assert saved(sharing.arrange(requests, [8, 8, 8, 8])[1]) == 300
    assert sharing.arrange(requests, [32, 33, 32, 33])[1] != ()  # 6 tiles apart, 5 together


def test_the_same_requests_get_the_same_answer_and_their_own_list() -> None:
    sharing, requests = joined([[1, 2, 3, 10 + i] for i in range(3)])
    first, levels = sharing.arrange(requests)
    expected = list(first)
    first.clear()
    again, same = sharing.arrange(list(requests))
    assert again == expected
    assert same is levels


def test_requests_that_are_not_in_the_step_do_not_part_those_that_are() -> None:
    tables = [[1, 2, 3, 10], [1, 2, 3, 4, 11], [1, 2, 3, 4, 12], [1, 2, 13]]
    sharing, requests = joined(tables)
    arranged, levels = sharing.arrange([requests[0], requests[2]])
    assert levels == ((SharedRun(0, 2, 0, 3),),)
    check([requests[0], requests[2]], arranged, levels)


def test_who_has_not_joined_is_not_overlooked() -> None:
    sharing, requests = joined([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(ValueError, match="has not joined"):
        sharing.arrange([*requests, request([1, 2, 5])])


def test_leaving_twice_or_without_joining_changes_nothing() -> None:
    sharing, requests = joined([[1, 2, 10], [1, 2, 11], [1, 2, 12]])
    sharing.leave(requests[1])
    sharing.leave(requests[1])
    sharing.leave(request([1, 2, 13]))
    assert sharing.arrange([requests[0], requests[2]])[1] == ((SharedRun(0, 2, 0, 2),),)


def best_after_cost(tables: Sequence[Sequence[int]], limits: SharingLimits) -> int:
    """Of any choice of beginnings that are read once, prefixes within prefixes on the next level."""
    readers = Counter(tuple(table[: i + 1]) for table in tables for i in range(len(table)))
    shared = [begin for begin, count in readers.items() if count > 1]
    forks = [one for one in shared if all(readers[o] < readers[one] for o in shared if o[:-1] == one)]
    best = 0
    for picked in chain.from_iterable(combinations(forks, count) for count in range(1, len(forks) + 1)):
        gain, depth = 0, 0
        for one in picked:
            outer = [len(o) for o in picked if len(o) < len(one) and one[: len(o)] == o]
            gain += (readers[one] - 1) * (len(one) - max(outer, default=0))
            depth = max(depth, len(outer) + 1)
        if depth <= limits.max_levels:
            best = max(best, gain - depth * limits.least_saved_blocks)
    return best


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_choice_of_levels_saves_more_after_its_cost(data: Any) -> None:
    paths = data.draw(st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=2, max_size=8))
    length = [data.draw(st.integers(1, 6)) for _ in range(4)]  # blocks of each piece of a path
    names: dict[tuple[int, ...], list[int]] = {}
    fresh = iter(range(1, 10_000))
    tables = []
    for path in paths:
        pieces = [tuple(path[: i + 1]) for i in range(len(path))]
        hits = [names.setdefault(one, [next(fresh) for _ in range(length[len(one)])]) for one in pieces]
        tables.append([*chain.from_iterable(hits), next(fresh)])
    limits = SharingLimits(data.draw(st.integers(0, 12)), data.draw(st.integers(1, 3)), tile_rows=1000)
    sharing, requests = joined(tables, limits)
    arranged, levels = sharing.arrange(requests)
    check(requests, arranged, levels)
    assert len(levels) <= limits.max_levels
    assert saved(levels) - len(levels) * limits.least_saved_blocks == best_after_cost(tables, limits)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_is_missed_whoever_comes_and_goes(data: Any) -> None:
    """Tables are paths of a random tree, then blocks of their own, which grow."""
    depth = st.lists(st.integers(0, 2), max_size=5)
    fresh = iter(range(10_000, 100_000))
    names: dict[tuple[int, ...], int] = {}
    sharing = PrefixSharing(SharingLimits(0, max_levels=6, tile_rows=1000))
    running: list[Request] = []
    for step in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["join", "join", "leave", "grow"])):
            case "join":
                path = data.draw(depth)
                hits = [names.setdefault(tuple(path[: i + 1]), 1 + len(names)) for i in range(len(path))]
                one = request([*hits, *(next(fresh) for _ in range(data.draw(st.integers(0, 2))))], step)
                running.append(one)
                sharing.join(one)
            case "leave" if running:
                one = running.pop(data.draw(st.integers(0, len(running) - 1)))
                sharing.leave(one)
                one.block_ids = []
            case "grow" if running:
                data.draw(st.sampled_from(running)).block_ids.append(next(fresh))
        asked = [one for one in running if data.draw(st.booleans())]
        arranged, levels = sharing.arrange(asked)
        check(asked, arranged, levels)
        assert saved(levels) == most_saved([one.block_ids for one in asked])
