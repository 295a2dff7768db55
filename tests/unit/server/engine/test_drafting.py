"""Drafts are made where they pay: by how right earlier guesses were, and what a step with drafts costs here."""

from dataclasses import replace
from typing import Any

import pytest

from models.batch import SamplingParams
from server.engine.drafting import Drafter, DraftLimits, num_equal
from server.engine.messages import AddRequest
from server.engine.request import Request
from server.engine.token_ids import TokenIds

TEXT = list(range(100, 160))
LIMITS = DraftLimits(num_tokens=4, step_cost=0.0, row_cost=0.0)


def request(tokens: list[int], *, generated: int = 1, max_tokens: int = 1000, **sampling: float) -> Request:
    prompt = TokenIds(tokens[: len(tokens) - generated])
    message = AddRequest("r", prompt, SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]
    made = Request(message, sequence_number=0, eos_token_ids=(), max_model_len=100_000, now=0.0)
    made.append(tokens[len(tokens) - generated :])
    made.num_computed = made.num_tokens - 1
    return made


def proposed(drafter: Drafter, *requests: Request, beside_prompts: bool = False) -> list[list[int] | None]:
    drafts = drafter.propose(requests, max_rows=1000, beside_prompts=beside_prompts)
    return [drafts.get(one) for one in requests]


def test_what_followed_the_same_tokens_is_guessed() -> None:
    assert proposed(Drafter(LIMITS), request([*TEXT, 1, 120, 121, 122, 123])) == [[124, 125, 126, 127]]
    assert proposed(Drafter(LIMITS), request([*TEXT, 1, 2])) == [None]


def test_after_a_token_in_flight_its_guess_is_taken_for_granted() -> None:
    one = request([*TEXT, 1, 120, 121, 122, 123])
    one.num_in_flight = 1
    assert proposed(Drafter(LIMITS), one) == [[125, 126, 127, 128]]


def test_drafts_end_where_the_request_ends() -> None:
    tokens = [*TEXT, 1, 120, 121, 122, 123]
    assert proposed(Drafter(LIMITS), request(tokens, max_tokens=4)) == [[124, 125]]
    assert proposed(Drafter(LIMITS), request(tokens, max_tokens=2)) == [None]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_requests_with_penalties_and_requests_in_their_prompt_have_none(name: str) -> None:
    tokens = [*TEXT, 1, 120, 121, 122, 123]
    penalty: dict[str, Any] = {name: 1.3}
    assert proposed(Drafter(LIMITS), request(tokens, **penalty)) == [None]
    assert proposed(Drafter(LIMITS), request(tokens, generated=0)) == [None]


def test_a_step_has_no_more_rows_than_are_cheap() -> None:
    many = [request([*TEXT, 1, 120, 121, 122, 123]) for _ in range(10)]
    drafts = proposed(Drafter(replace(LIMITS, max_rows=30)), *many)
    assert sum(len(tokens) for tokens in drafts if tokens) == 20
    assert not any(proposed(Drafter(replace(LIMITS, max_rows=19)), *many))


def test_more_guesses_than_a_step_has_rows_for_are_cut_and_not_all_left_out() -> None:
    quotes = [*TEXT, 1, 120, 121, 122, 123]
    assert proposed(Drafter(replace(LIMITS, max_rows=4)), request(quotes)) == [[124, 125, 126]]
    drafts = proposed(Drafter(replace(LIMITS, max_rows=5)), request(quotes), request([*TEXT, 1, 2]))
    assert drafts == [[124, 125, 126], None]


def test_guesses_that_are_wrong_end_and_come_back_when_they_would_have_been_right() -> None:
    drafter = Drafter(replace(LIMITS, step_cost=0.5))
    one = request([*TEXT, 1, 120, 121, 122, 123])
    for number in range(40):  # quotations of four tokens, never of a fifth
        one.append([2000 + number, *range(110, 114)])
        one.num_computed = one.num_tokens - 1
        proposed(drafter, one)
    one.append([3000, *range(110, 114)])
    one.num_computed = one.num_tokens - 1
    assert proposed(drafter, one) == [None]
    drafted = 0
    for following in range(114, 160):
        one.append([following])
        one.num_computed += 1
        drafted += proposed(drafter, one) != [None]
    assert drafted > 20


def test_a_batch_drafts_when_those_who_quote_win_more_than_the_others_lose() -> None:
    quotes = [*TEXT, 1, 120, 121, 122, 123]
    others = [request([*TEXT, 1, 2 + i]) for i in range(3)]
    assert proposed(Drafter(replace(LIMITS, step_cost=0.5)), request(quotes), *others)[0]
    assert not proposed(Drafter(replace(LIMITS, step_cost=1.0)), request(quotes), *others)[0]
    assert proposed(Drafter(replace(LIMITS, step_cost=1.0)), request(quotes), request(quotes), *others)[0]
    assert proposed(Drafter(replace(LIMITS, step_cost=9.0)), request(quotes), *others, beside_prompts=True)[0]
    assert not proposed(Drafter(replace(LIMITS, row_cost=0.25)), request(quotes), *others)[0]
    assert proposed(Drafter(replace(LIMITS, row_cost=0.1)), request(quotes), *others)[0]


def test_where_steps_overlap_a_missed_turn_must_be_won_back() -> None:
    weak = [*TEXT, 1, 120, 121]  # two tokens are the same: less than one right guess is expected
    other = request([*TEXT, 1, 2])
    for overlaps in (False, True):
        drafter = Drafter(replace(LIMITS, overlaps=overlaps))
        assert (proposed(drafter, request(weak), other)[0] is None) == overlaps
        assert proposed(drafter, request(weak))[0]  # alone: nobody would have used the turn


def test_measured_steps_take_the_place_of_what_was_assumed() -> None:
    drafter = Drafter(replace(LIMITS, step_cost=1.0))
    quotes = [*TEXT, 1, 120, 121, 122, 123]
    for _ in range(40):
        drafter.observe(1, 0, 0.010)
        drafter.observe(1, 4, 0.060)
    assert proposed(drafter, request(quotes)) == [None]
    for _ in range(2000):  # it is tried again some day
        drafter.observe(1, 0, 0.010)
    assert proposed(drafter, request(quotes)) != [None]


def test_long_texts_are_taken_in_one_a_step() -> None:
    long = [*range(200, 50_000), *TEXT, 1, 120, 121, 122, 123]
    many = [request(long) for _ in range(3)]
    drafter = Drafter(LIMITS)
    assert [sum(map(bool, proposed(drafter, *many))) for _ in range(4)] == [1, 2, 3, 3]


def test_leading_equal_tokens_are_counted() -> None:
    assert num_equal([1, 2, 3], [1, 2, 4, 9]) == 2
    assert num_equal([], [1]) == 0
    assert num_equal([1, 2], [1, 2, 3]) == 2
