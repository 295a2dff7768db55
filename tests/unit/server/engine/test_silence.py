"""How long nobody says anything."""

import asyncio
from collections.abc import Iterator
from itertools import chain, repeat

from server.engine.silence import LOOKS, until_silent


def num_looks(words: Iterator[float | None]) -> int:
    """Until it is silent."""
    looks = 0

    def look() -> float | None:
        nonlocal looks
        looks += 1
        return next(words)

    asyncio.run(asyncio.wait_for(until_silent(look, 0.0), 20))
    return looks


def test_so_many_looks_at_the_same_word_are_silence() -> None:
    assert num_looks(repeat(1.0)) == LOOKS + 1


def test_a_word_begins_it_anew() -> None:
    assert num_looks(chain(repeat(1.0, LOOKS), repeat(2.0))) == 2 * LOOKS + 1


def test_whoever_need_not_speak_is_not_silent() -> None:
    assert num_looks(chain(repeat(None, 5 * LOOKS), repeat(1.0))) == 6 * LOOKS + 1
