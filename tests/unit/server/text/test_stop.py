import itertools
import random
import tracemalloc

import pytest

from server.text.stop import StopMatcher, StopResult


def run(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stop)
    shown = []
    for piece in pieces:
        result = matcher.feed(piece)
        shown.append(result.text)
        if result.stopped is not None:
            return shown, result.stopped
    return [*shown, matcher.finish()], None


def expected(stop: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the stop string that completes first; of two completing together the longer."""
    ends = [(text.find(word) + len(word), -len(word), word) for word in stop if word in text]
    if not ends:
        return text, None
    end, _, word = min(ends)
    return text[: end - len(word)], word


def splits(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    return [
        [text[start:end] for start, end in itertools.pairwise((0, *cuts, len(text)))]
        for count in range(len(text))
        for cuts in itertools.combinations(range(1, len(text)), count)
    ]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["END"], "go on END not this"[:12]),
        (["aab"], "aaaaab"),
        (["abcd", "bc"], "xabcdx"),
        (["bc", "abc"], "xabcx"),
        (["aa"], "xaaaa"),
        (["nope"], "nonopno"),
        (["é🙂"], "aé🙂b"),
        (["\n\n"], "a\nb\n\nc"),
    ],
)
def test_stop_strings_split_at_every_offset_are_found_the_same(stop: list[str], text: str) -> None:
    for pieces in splits(text):
        shown, word = run(stop, pieces)
        assert ("".join(shown), word) == expected(stop, text), pieces


def test_random_texts_are_never_leaked_and_never_swallowed() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        stop = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 5))]
        text = "".join(rng.choices("abc", k=rng.randrange(1, 30)))
        cuts = sorted(rng.sample(range(len(text) + 1), k=rng.randrange(0, min(6, len(text)))))
        pieces = [text[start:end] for start, end in itertools.pairwise((0, *cuts, len(text)))]
        shown, word = run(stop, pieces)
        assert ("".join(shown), word) == expected(stop, text), (stop, pieces)


def test_text_is_held_only_while_it_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.feed("a<").text == "a"
    assert matcher.feed("en").text == ""
    assert matcher.feed("x").text == "<enx"
    assert matcher.feed("<en<e").text == "<en"
    assert matcher.finish() == "<e"


def test_what_stops_is_fed_and_what_does_not_is_not() -> None:
    matcher = StopMatcher(["abc", "cd"])
    assert matcher.feed("xa").text == "x"
    assert matcher.feed_if_it_stops("b") == StopResult("")
    assert matcher.feed_if_it_stops("e") == StopResult("")
    assert matcher.feed("bd").text == "abd"
    assert matcher.feed("c").text == ""
    assert matcher.feed_if_it_stops("cde") == StopResult("c", "cd")


def test_what_is_known_of_a_stop_string_is_in_memory_once() -> None:
    """A request has hundreds of choices, and each of them up to 32 stop strings of a thousand characters."""
    tracemalloc.start()
    try:
        matchers = [StopMatcher(["a" * 1000]) for _ in range(100)]
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
    assert all(matcher.feed("a" * 999 + "b").text for matcher in matchers)
