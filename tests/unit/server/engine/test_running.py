"""Who has a slot and blocks, and who gives them up."""

import pytest

from models.batch import SamplingParams
from server.engine.adapters import AdapterTable
from server.engine.kv_cache import KVCache
from server.engine.messages import AddRequest
from server.engine.request import Request, RequestState
from server.engine.running import RunningRequests
from server.engine.token_ids import TokenIds

BLOCK_SIZE = 4


def running(num_blocks: int, *, max_num_seqs: int = 8) -> RunningRequests:
    """With so many blocks to give away."""
    cache = KVCache(1 + num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
    return RunningRequests(cache, AdapterTable(), None, max_num_seqs)


def started(where: RunningRequests, number: int, num_tokens: int, num_blocks: int, tenant: bytes = b"") -> Request:
    """A request of which one token is left to run."""
    message = AddRequest(f"r{number}", TokenIds(range(1, 1 + num_tokens)), SamplingParams(max_tokens=100), tenant)
    request = Request(message, sequence_number=number, eos_token_ids=(), max_model_len=1000, now=0.0)
    where.start(request, num_blocks, [])
    request.num_computed = num_tokens - 1
    return request


def test_a_decode_without_a_place_for_its_token_gets_a_block() -> None:
    where = running(4)
    full, roomy = started(where, 0, 5, 1), started(where, 1, 4, 1)
    ready = where.grow()
    assert (ready.decodes, ready.prompts, ready.preempted) == ([full, roomy], [], [])
    assert (len(full.block_ids), len(roomy.block_ids)) == (2, 1)


def test_the_youngest_gives_up_whatever_the_order_in_which_they_came() -> None:
    where = running(3)
    young, old, middle = (started(where, number, 5, 1) for number in (2, 0, 1))
    ready = where.grow()
    assert (ready.decodes, ready.preempted) == ([old], [young, middle])
    assert list(where) == [old]
    assert young.state is middle.state is RequestState.WAITING
    assert not young.block_ids
    assert (old.num_preemptions, middle.num_preemptions, young.num_preemptions) == (0, 1, 1)
    where.check_integrity()


def test_a_key_with_more_than_its_part_gives_up_before_another_keys_youngest() -> None:
    where = running(10)
    giant, large, quiet = (
        started(where, 0, 17, 4, b"flood"), started(where, 1, 17, 4, b"flood"), started(where, 2, 5, 2, b"quiet")
    )  # fmt: skip
    ready = where.grow()
    assert (ready.decodes, ready.preempted) == ([giant, quiet], [large])
    assert list(where) == [giant, quiet]
    where.check_integrity()


def test_a_large_request_that_is_its_keys_oldest_gives_up_no_sooner_than_before() -> None:
    where = running(9)
    first, young, younger = (
        started(where, 0, 29, 7, b"large"), started(where, 1, 5, 1, b"small"), started(where, 2, 5, 1, b"small")
    )  # fmt: skip
    ready = where.grow()
    assert (ready.decodes, ready.preempted) == ([first], [younger, young])


def test_prompts_and_those_that_wait_for_results_get_no_block() -> None:
    where = running(4)
    prompt, drafting, ending = (started(where, number, 5, 1) for number in range(3))
    prompt.num_computed = 2
    drafting.num_drafts = 3
    ending.max_length, ending.num_in_flight, ending.num_computed = 6, 1, 5
    ready = where.grow()
    assert (ready.decodes, ready.prompts, ready.preempted) == ([], [prompt], [])
    assert where.cache.num_free_blocks == 1


def test_room_for_guesses_is_made_of_free_blocks_only() -> None:
    where = running(4)
    guesses, other = started(where, 0, 4, 1), started(where, 1, 4, 1)
    assert where.grow_for(guesses, 1) == 1
    assert len(guesses.block_ids) == 1
    assert where.grow_for(guesses, 6) == 6
    assert len(guesses.block_ids) == 3
    assert where.grow_for(guesses, 30) == 9  # all that is free
    assert other.block_ids
    assert where.cache.num_free_blocks == 0
    assert where.grow_for(other, 5) == 1


def test_a_slot_comes_back_when_the_runner_was_told() -> None:
    where = running(4, max_num_seqs=2)
    first, second = started(where, 0, 4, 1), started(where, 1, 4, 1)
    assert {first.slot, second.slot} == {0, 1}
    slot = first.slot
    where.release(first)
    first.state = RequestState.FINISHED
    where.sweep()
    assert list(where) == [second]
    assert where.num_free_slots == 0
    where.check_integrity()
    assert where.take_released_slots() == [slot]
    assert where.take_released_slots() == []
    assert started(where, 2, 4, 1).slot == slot
    where.check_integrity()


def test_a_slot_that_is_lost_is_noticed() -> None:
    where = running(4)
    started(where, 0, 4, 1).slot = 5
    with pytest.raises(AssertionError, match="slot"):
        where.check_integrity()
