"""The index finds what a search through the whole text finds, and its cost does not grow with the text."""

import random
import time

import pytest

from server.engine.prompt_lookup import MOST_SORTED, Match, PromptLookup
from server.engine.token_ids import TokenIds


def searched(tokens: list[int], shortest: int, longest: int) -> Match | None:
    """By definition: the longest earlier occurrence of the end, the latest of equally long ones."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return Match(end, length)
    return None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("shortest", "longest"), [(2, 4), (1, 1), (3, 6)])
def test_what_is_found_is_the_longest_and_latest_occurrence(seed: int, shortest: int, longest: int) -> None:
    rng = random.Random(seed)
    tokens = TokenIds(rng.randrange(12) for _ in range(rng.randrange(1, 60)))
    lookup = PromptLookup(tokens, shortest=shortest, longest=longest)
    for _ in range(80):
        assert lookup.find() == searched(list(tokens), shortest, longest)
        for _ in range(rng.choice([1, 1, 1, 5])):
            tokens.append(rng.randrange(12))


def test_a_quotation_goes_on_and_a_loop_goes_round() -> None:
    tokens = TokenIds([*range(10, 30), 12, 13])
    lookup = PromptLookup(tokens, shortest=2, longest=4)
    match = lookup.find()
    assert match == Match(4, 2)
    assert lookup.continuation(match, 5) == [14, 15, 16, 17, 18]
    tokens.extend([50, 51, 50, 51])
    match = lookup.find()
    assert match == Match(24, 2)
    assert lookup.continuation(match, 5) == [50, 51, 50, 51, 50]


def test_only_the_end_of_a_very_long_text_is_looked_at() -> None:
    tokens = [1, 2, 3, 4, 5, *[9] * (MOST_SORTED + 10), 1, 2]
    assert PromptLookup(tokens, shortest=2, longest=4).find() is None
    tokens = [9, *[8] * 20, *range(MOST_SORTED - 10), 8, 8]
    match = PromptLookup(tokens, shortest=2, longest=4).find()
    assert match is not None
    assert tokens[match.end - 2 : match.end] == [8, 8]


def test_token_ids_beyond_every_vocabulary_and_few_tokens_are_no_problem() -> None:
    assert PromptLookup([], shortest=2, longest=4).find() is None
    assert PromptLookup([5, 5], shortest=2, longest=4).find() is None
    big = 2**31 - 1
    assert PromptLookup([big, big, 7, big, big], shortest=2, longest=4).find() == Match(2, 2)


@pytest.mark.parametrize(("shortest", "longest"), [(0, 4), (5, 4)])
def test_lengths_that_make_no_sense_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match="shortest"):
        PromptLookup([1], shortest=shortest, longest=longest)


def test_a_look_at_a_long_text_costs_what_one_at_a_short_text_costs() -> None:
    def fastest(size: int) -> float:
        rng = random.Random(0)
        tokens = [rng.randrange(50_000) for _ in range(size)]
        lookup = PromptLookup(tokens, shortest=2, longest=4)
        lookup.find()
        best = 1.0
        for _ in range(300):
            tokens.append(rng.choice(tokens))
            start = time.perf_counter()
            lookup.find()
            best = min(best, time.perf_counter() - start)
        return best

    assert fastest(200_000) < 10 * fastest(200)
