"""Log-probabilities of prompts' own tokens: every one comes once and in order, whatever chunks, caches, preemption and
others do. The fake runner's scores depend on all tokens that a block table reaches."""

import random

import numpy as np
import pytest
from cranked_engine import Engine, tokens
from fake_runner import NAN, expected, expected_scores
from host_memory import give_host_memory
from seeds import seeds

from models.batch import PromptLogprobs
from server.engine.messages import TokenDelta
from server.engine.stream import MAX_EVENTS, TokenStream

pytestmark = pytest.mark.usefixtures("_overlaps")


@pytest.mark.parametrize("seed", seeds(2, 3))
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [16, 100, 2048])
def test_scores_do_not_depend_on_chunks_caches_or_others(seed: int, caching: bool, budget: int) -> None:
    rng = random.Random(seed)
    engine = Engine(rng.randrange(18, 28), 16, budget=budget, max_num_seqs=8, caching=caching)
    shared = tokens(rng, 100)
    wanted: dict[str, tuple[list[int], list[float]]] = {}
    for number in range(40):
        name, scored = f"r{number}", rng.random() < 0.6
        prompt = shared[: rng.choice([0, 16, 48, 100])] + tokens(rng, rng.randrange(1, 80))
        count = rng.choice([1, 5, 60, 90])
        engine.add(name, prompt, max_tokens=count, prompt_logprobs=1 if scored else None)
        wanted[name] = expected(prompt, count), expected_scores(prompt) if scored else []
        for _ in range(rng.randrange(4)):
            engine.turn()
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for name, (answer, scores) in wanted.items():
        assert engine.tokens[name] == answer
        assert engine.scores.get(name, []) == scores
    engine.assert_nothing_is_held()


def test_a_scored_prompt_takes_nothing_from_the_prefix_cache_and_fills_it() -> None:
    rng = random.Random(0)
    engine = Engine(100, 16)
    prompt = tokens(rng, 160)
    for name, asked, cached in [("a", None, 0), ("b", 0, 0), ("c", None, 144)]:
        if name == "b":
            engine.cache.withdraw(engine.scheduler.open.by_id["a"])
        engine.add(name, prompt, max_tokens=100 if name == "a" else 1, prompt_logprobs=asked, ignore_eos=True)
        engine.run(until=lambda name=name: name in engine.tokens)  # type: ignore[misc]
        assert engine.cached[name] == cached
    assert engine.scores == {"b": expected_scores(prompt)}
    engine.run()
    engine.assert_nothing_is_held()


def test_a_cached_prompt_is_scored_whole() -> None:
    rng = random.Random(0)
    engine = Engine(100, 16)
    prompt = tokens(rng, 160)
    for name in ("warm", "scored"):
        engine.add(name, prompt, max_tokens=1, prompt_logprobs=3 if name == "scored" else None)
        engine.run()
    assert engine.cached["scored"] == 0
    assert engine.scores["scored"] == expected_scores(prompt)
    assert engine.scheduler.prefix_cache_queries == 160  # it asked for nothing


def test_blocks_in_slower_memory_are_no_shortcut_either() -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    cache = give_host_memory(engine, 400, turns=2)
    prompt = tokens(rng, 320)
    engine.add("warm", prompt, max_tokens=1)
    engine.run()
    for number in range(6):
        engine.add(f"other {number}", tokens(rng, 400), max_tokens=1)
        engine.run()
    engine.add("scored", prompt, max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert cache.offload.num_loaded == 0
    assert engine.scores["scored"] == expected_scores(prompt)
    assert engine.tokens["scored"] == expected(prompt, 1)


def test_what_was_scored_before_a_preemption_is_not_scored_again() -> None:
    """The first to come takes all blocks in the end. The other has been scored by then, and comes back as it was."""
    rng = random.Random(1)
    engine = Engine(41, 16, budget=64)
    engine.add("old", tokens(rng, 200), max_tokens=400, ignore_eos=True)
    prompt = tokens(rng, 300)
    engine.run(until=lambda: "old" in engine.tokens)
    engine.add("scored", prompt, max_tokens=100, prompt_logprobs=1, ignore_eos=True)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert engine.scores["scored"] == expected_scores(prompt)
    assert engine.runner.num_scored == 299


@pytest.mark.parametrize("caching", [False, True])
def test_a_prompt_that_gives_up_its_blocks_half_way_is_scored_on_from_there(caching: bool) -> None:
    """But for the rest of a block or a chunk, which is scored twice and told once."""
    rng = random.Random(2)
    engine = Engine(41, 16, budget=9, caching=caching)
    engine.add("old", tokens(rng, 200), max_tokens=200, ignore_eos=True)
    prompt = tokens(rng, 400)
    engine.run(until=lambda: "old" in engine.tokens)
    engine.add("scored", prompt, max_tokens=1, prompt_logprobs=1)
    engine.run(until=lambda: engine.scheduler.num_preemptions > 0)
    assert 100 < len(engine.scores["scored"]) < 399
    engine.run()
    assert engine.scores["scored"] == expected_scores(prompt)
    assert 399 <= engine.runner.num_scored < 399 + 32


def with_choices(names: str, prompt: list[int], budget: int) -> Engine:
    """Of n choices the first is scored, and computes the prompt for all."""
    engine = Engine(budget=budget)
    engine.runner.keep_batches = True
    for name in names:
        engine.add(name, prompt, prompt_logprobs=1 if name == "a" else None)
    return engine


def num_computed(engine: Engine) -> int:
    return sum(len(seq.token_ids) for batch in engine.runner.batches for seq in batch.seqs)


def test_choices_that_are_not_scored_wait_for_the_one_that_is() -> None:
    prompt = tokens(random.Random(0), 1600)
    engine = with_choices("abcd", prompt, 2048)
    engine.run()
    assert all(engine.tokens[name] == expected(prompt, 8) for name in "abcd")
    assert engine.scores == {"a": expected_scores(prompt)}
    assert num_computed(engine) < 1600 + 4 * 30


def test_choices_go_on_without_the_one_that_is_scored_where_that_is_aborted() -> None:
    prompt = tokens(random.Random(0), 1600)
    engine = with_choices("abc", prompt, 128)
    engine.run(until=lambda: len(engine.scores.get("a", ())) >= 400)
    engine.abort("a")
    engine.run()
    assert not engine.tokens["a"]
    assert all(engine.tokens[name] == expected(prompt, 8) for name in "bc")
    assert num_computed(engine) < 1600 + 2 * 128 + 3 * 30  # what the aborted one had computed is not computed again
    engine.assert_nothing_is_held()


def test_a_prompt_that_is_scored_waits_for_no_other() -> None:
    """It would take nothing from it."""
    prompt = tokens(random.Random(0), 1600)
    engine = Engine(budget=4096)
    engine.add("first", prompt)
    engine.add("scored", prompt, prompt_logprobs=1)
    engine.run(until=lambda: "scored" in engine.tokens)
    assert engine.num_turns <= 3
    engine.run()
    assert engine.scores == {"scored": expected_scores(prompt)}


def test_a_prompt_of_one_token_has_no_scores() -> None:
    engine = Engine()
    engine.add("r", [5], max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    engine.run()
    assert len(engine.tokens["r"]) == 3
    assert not engine.scores


def test_only_steps_of_scored_prompts_score() -> None:
    engine = Engine(budget=64)
    engine.runner.keep_batches = True
    engine.add("plain", tokens(random.Random(0), 100), max_tokens=20, ignore_eos=True)
    engine.add("scored", tokens(random.Random(1), 100), max_tokens=20, prompt_logprobs=4, ignore_eos=True)
    engine.run()
    scored = [rows for batch in engine.runner.batches for rows in batch.scored]
    assert sum(len(rows.targets) for rows in scored) == 99
    assert {rows.num_top for rows in scored} == {4}
    assert len(engine.runner.batches) > len(scored) + 10


def test_scores_that_are_not_finite_fail_their_request_alone() -> None:
    engine = Engine(budget=64)
    good = tokens(random.Random(0), 100)
    engine.add("bad", [*good[:80], NAN, *good[80:]], max_tokens=1, prompt_logprobs=0)
    engine.add("good", good, max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert engine.failures["bad"].code == "server_error"
    assert engine.scores["good"] == expected_scores(good)
    assert engine.scheduler.corrupted_requests == 1
    engine.assert_nothing_is_held()


def test_a_stream_keeps_all_scores_of_a_long_prompt_for_a_reader_that_is_late() -> None:
    """They come faster than they are spelled out, and of others it would not hold as many."""
    numbers = np.arange(512, dtype=np.float32)
    top = np.arange(512 * 5, dtype=np.int32)
    ranks = np.ones(512, np.int32)
    some = PromptLogprobs(5, numbers.tobytes(), ranks.tobytes(), top.tobytes(), top.astype(np.float32).tobytes())
    stream = TokenStream("r")
    for _ in range(MAX_EVENTS + 10):
        stream.put(TokenDelta("r", [], prompt_logprobs=[some]))
    stream.put(TokenDelta("r", [1], None, "length"))
    assert stream.num_events == MAX_EVENTS
    deltas = list(stream._deltas)
    assert [len(delta.prompt_logprobs or ()) for delta in deltas] == [1] * (MAX_EVENTS - 1) + [11]
    assert (deltas[-1].token_ids, deltas[-1].finish_reason) == ([1], "length")


def test_parts_of_packed_scores_are_theirs() -> None:
    values, ids = np.arange(6, dtype=np.float32), np.arange(12, dtype=np.int32)
    ranks = np.arange(10, 16, dtype=np.int32)
    of_ids = (ids / 2).astype(np.float32)
    whole = PromptLogprobs(2, values.tobytes(), ranks.tobytes(), ids.tobytes(), of_ids.tobytes())
    part = whole.part(2, 5)
    assert (len(whole), len(part)) == (6, 3)
    assert np.frombuffer(part.logprobs, np.float32).tolist() == [2, 3, 4]
    assert np.frombuffer(part.ranks, np.int32).tolist() == [12, 13, 14]
    assert np.frombuffer(part.top_ids, np.int32).tolist() == [4, 5, 6, 7, 8, 9]
    assert np.frombuffer(part.top_logprobs, np.float32).tolist() == [2, 2.5, 3, 3.5, 4, 4.5]
