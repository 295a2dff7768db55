"""What a failure costs: one request, one batch or the process, and never a wrong answer."""

import random

import fake_runner
import pytest
from cranked_engine import Engine, tokens
from fake_runner import expected

from models.batch import StepBatch
from server.engine.executor import MAX_FAILED_STEPS, EngineLost
from server.engine.messages import Shutdown
from server.engine.step_time import work_of

pytestmark = pytest.mark.usefixtures("_overlaps")


def answers(engine: Engine, names: list[str], prompts: dict[str, list[int]], count: int) -> bool:
    return all(engine.tokens[name] == expected(prompts[name], count) for name in names)


@pytest.mark.parametrize("seed", range(20))
def test_a_row_that_is_not_finite_fails_alone_and_is_never_cached(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(400, 16, budget=64)
    shared = tokens(rng, 64)
    poisoned = shared + tokens(rng, rng.randrange(40))
    poisoned.insert(rng.randrange(len(poisoned)), fake_runner.NAN)
    prompts = {f"r{number}": shared + tokens(rng, rng.randrange(1, 40)) for number in range(31)}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    engine.add("poisoned", poisoned)
    engine.run()
    assert answers(engine, sorted(prompts), prompts, 8)
    assert engine.failures["poisoned"].code == "server_error"
    assert "poisoned" not in engine.tokens
    cached = b"".join(entry.token_bytes for entry in engine.cache._by_hash.values())
    assert fake_runner.NAN.to_bytes(4, "little") not in cached
    engine.add("again", poisoned)
    engine.run()
    assert "again" in engine.failures
    assert engine.core.stats().corrupted_requests == 2
    engine.assert_nothing_is_held()


@pytest.mark.parametrize("wait", [14, 15, 16])
def test_blocks_of_a_prompt_that_was_preempted_before_its_bad_result_came_are_not_found_again(wait: int) -> None:
    rng = random.Random(0)
    engine = Engine(15, 16, budget=24, overlaps=True)
    for number in range(4):  # all want another block while the prompt's last part is in flight
        engine.add(f"r{number}", tokens(rng, 30 - wait), max_tokens=40)
    for _ in range(wait):
        engine.turn()
    poisoned = [fake_runner.NAN, *tokens(rng, 69)]
    engine.add("poisoned", poisoned)
    engine.run(until=lambda: "poisoned" in engine.failures)
    assert engine.scheduler.num_preemptions == 1
    cached = b"".join(entry.token_bytes for entry in engine.cache._by_hash.values())
    assert fake_runner.NAN.to_bytes(4, "little") not in cached
    engine.run()
    engine.assert_nothing_is_held()


def test_out_of_memory_costs_only_the_rows_that_can_not_run_alone() -> None:
    rng = random.Random(0)
    engine = Engine(budget=512)
    prompts = {f"r{number}": tokens(rng, 20) for number in range(16)}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    engine.add("heavy", [*tokens(rng, 20), fake_runner.OUT_OF_MEMORY])
    engine.run()
    assert answers(engine, sorted(prompts), prompts, 8)
    assert {name: failure.code for name, failure in engine.failures.items()} == {"heavy": "server_is_overloaded"}
    engine.assert_nothing_is_held()


def test_out_of_memory_of_large_batches_fails_nobody() -> None:
    rng = random.Random(0)
    engine = Engine(budget=512)

    def small_enough(batch: StepBatch) -> bool:
        return len(batch.seqs) <= 3

    engine.runner.memory_for = small_enough
    prompts = {f"r{number}": tokens(rng, 20) for number in range(16)}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    engine.run()
    assert answers(engine, sorted(prompts), prompts, 8)
    assert not engine.failures
    engine.assert_nothing_is_held()


def test_an_error_in_a_step_fails_its_requests_and_the_engine_goes_on() -> None:
    rng = random.Random(0)
    engine = Engine(budget=512)
    engine.add("a", tokens(rng, 20), max_tokens=50)
    engine.run(until=lambda: "a" in engine.tokens)
    engine.add("bad", [fake_runner.RAISE])
    engine.run()
    assert sorted(engine.failures) == ["a", "bad"]
    assert all("injected" not in failure.message for failure in engine.failures.values())
    prompt = tokens(rng, 20)
    engine.add("b", prompt)
    engine.run()
    assert engine.tokens["b"] == expected(prompt, 8)
    engine.assert_nothing_is_held()


def test_a_request_that_the_runner_refuses_fails_alone() -> None:
    rng = random.Random(0)
    engine = Engine(budget=512)
    prompts = {name: tokens(rng, 20) for name in "abc"}
    for name, prompt in prompts.items():
        engine.add(f"refused {name}", [*tokens(rng, 20), fake_runner.REFUSED])
        engine.add(name, prompt)
    engine.run()
    assert answers(engine, sorted(prompts), prompts, 8)
    assert sorted(engine.failures) == ["refused a", "refused b", "refused c"]
    for number in range(2 * MAX_FAILED_STEPS):
        engine.add(f"refused {number}", [fake_runner.REFUSED])
        engine.run()
    engine.assert_nothing_is_held()


def test_a_lost_device_ends_the_engine_without_another_answer() -> None:
    engine = Engine()
    engine.add("a", tokens(random.Random(0), 20), max_tokens=50)
    engine.run(until=lambda: "a" in engine.tokens)
    engine.add("end", [fake_runner.LOST])
    with pytest.raises(EngineLost):
        engine.run()
    assert "a" not in engine.reasons


def test_an_engine_that_only_fails_ends() -> None:
    engine = Engine()
    for number in range(MAX_FAILED_STEPS - 1):
        engine.add(f"r{number}", [fake_runner.RAISE])
        engine.turn()
    assert len(engine.failures) == MAX_FAILED_STEPS - 1
    engine.add("last", [fake_runner.RAISE])
    with pytest.raises(EngineLost):
        engine.turn()


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    rng = random.Random(0)
    engine = Engine()
    prompt = tokens(rng, 20)
    engine.add("a", prompt, max_tokens=20)
    engine.turn()
    engine.link.inbox.append(Shutdown())
    engine.add("late", prompt)
    engine.run()
    assert engine.tokens["a"] == expected(prompt, 20)
    assert engine.failures["late"].code == "server_is_draining"
    assert engine.core.draining


def test_statistics_count_what_happened() -> None:
    rng = random.Random(0)
    engine = Engine()
    prompt = tokens(rng, 100)
    for name in "ab":
        engine.add(name, prompt, max_tokens=10)
        engine.run()
    engine.turn()
    last = engine.stats[-1]
    assert (last.prompt_tokens, last.generation_tokens) == (200, 20)
    assert (last.prefix_cache_queries, last.prefix_cache_hits) == (200, 96)
    assert (last.num_running, last.num_waiting) == (0, 0)
    assert last.num_free_blocks == last.num_blocks == 255
    assert engine.times["b"].num_prompt_tokens == 100
    assert engine.times["b"].num_generation_tokens == 10


def test_the_longest_turn_is_told() -> None:
    engine = Engine(budget=64, overlaps=False)
    seconds = iter([3.0, 200.0, 5.0])

    def takes(_: StepBatch) -> bool:
        engine.now += next(seconds)
        return True

    engine.runner.memory_for = takes
    engine.add("a", [7] * 20, max_tokens=3)
    engine.run()
    assert [stats.longest_turn for stats in engine.stats] == [3.0, 200.0, 200.0]


def test_what_is_expected_of_a_large_turn_is_told_anew_as_more_is_known() -> None:
    engine = Engine()
    expected = iter([60.0, 5.0])
    engine.core._expected_turn = lambda: next(expected)
    assert [engine.core.stats().longest_turn for _ in range(2)] == [60.0, 5.0]


def test_a_request_id_that_is_open_is_refused_without_harm_to_the_open_one() -> None:
    engine = Engine()
    prompt = tokens(random.Random(0), 20)
    engine.add("a", prompt)
    engine.turn()
    engine.add("a", [1, 2, 3])
    engine.run()
    assert engine.tokens["a"] == expected(prompt, 8)
    assert engine.failures["a"].code == "server_error"
    engine.assert_nothing_is_held()


def test_measured_steps_correct_what_is_predicted() -> None:
    """A turn of these tests takes a second."""
    engine = Engine(overlaps=True)
    engine.add("a", tokens(random.Random(0), 20), max_tokens=400, ignore_eos=True)
    engine.run()
    assert engine.scheduler.step_time.predict(work_of([(200, 1)])) == pytest.approx(1.0, rel=0.05)
