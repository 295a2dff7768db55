"""Token ids behave as a list of them does, wherever one was used; and nothing but 32-bit integers gets in."""

import gc
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.token_ids import TokenIds

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
INDICES = st.none() | st.integers(-25, 25)


@given(IDS, INDICES, INDICES, st.none() | st.sampled_from([1, 2, -1]))
def test_slices_are_those_of_a_list(ids: list[int], start: int | None, stop: int | None, step: int | None) -> None:
    made = TokenIds(ids)
    part = made[start:stop:step]
    assert list(part) == ids[start:stop:step]
    assert bool(part) == bool(ids[start:stop:step])
    part.append(5)
    assert list(made) == ids


@given(IDS, IDS)
def test_what_is_added_follows_in_a_new_sequence(ids: list[int], others: list[int]) -> None:
    made = TokenIds(ids)
    for both in (made + others, made + TokenIds(others)):
        assert list(both) == ids + others
        assert isinstance(both[:1], TokenIds)
        both.append(5)
        assert list(made) == ids


@given(IDS.filter(bool))
def test_single_ids_and_the_largest_are_those_of_a_list(ids: list[int]) -> None:
    made = TokenIds(ids)
    assert [made[at] for at in range(-len(ids), len(ids))] == ids * 2
    assert made.largest() == max(ids)
    with pytest.raises(IndexError):
        made[len(ids)]


@given(IDS)
def test_bytes_and_numpy_have_the_same_numbers(ids: list[int]) -> None:
    made = TokenIds(ids)
    assert made.tobytes() == struct.pack(f"={len(ids)}I", *ids)
    assert TokenIds(made.tobytes()) == made == TokenIds(iter(ids))
    assert np.asarray(made, np.int64).tolist() == ids
    made.append(1)  # nobody holds its memory any more
    assert len(made) == len(ids) + 1


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([-1], OverflowError),
        ([2**32], OverflowError),
        (["1"], TypeError),
        ([1.0], TypeError),
        ([None], TypeError),
        (b"123", ValueError),
    ],
)
def test_what_is_no_token_id_does_not_get_in(ids: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        TokenIds(ids)  # type: ignore[arg-type]


def test_garbage_collections_do_not_walk_through_them() -> None:
    ids = [70_000, 80_000]
    assert set(ids) <= set(gc.get_referents(ids))
    assert not set(ids) & set(gc.get_referents(TokenIds(ids)))
