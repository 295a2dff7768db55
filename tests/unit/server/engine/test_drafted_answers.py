"""With guessed tokens in its steps an engine answers what it answers without them, whatever happens to the requests."""

import random

import fake_runner
import pytest
from cranked_engine import Engine, tokens
from fake_runner import expected
from seeds import seeds

from server.engine.drafting import DraftLimits

pytestmark = pytest.mark.usefixtures("_overlaps", "_drafts")


@pytest.fixture(params=[0.0, 0.5], ids=["at any cost", "if it pays"])
def _drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "drafts", DraftLimits(step_cost=request.param, row_cost=0.0, max_rows=64))


def quoting(rng: random.Random, count: int) -> list[int]:
    """A prompt with a repetition, so that its answer begins with a quotation."""
    prompt = [fake_runner.QUOTES, *tokens(rng, count)]
    return prompt + prompt[: rng.randrange(4, 9)]


def accepted(engine: Engine) -> int:
    assert engine.scheduler.drafter is not None
    return engine.scheduler.drafter.stats.num_accepted_tokens


def test_a_quotation_takes_fewer_steps_than_it_has_tokens() -> None:
    engine = Engine()
    prompt = quoting(random.Random(0), 200)
    engine.add("a", prompt, max_tokens=300)
    engine.run()
    assert engine.tokens["a"] == expected(prompt, 300)
    assert engine.runner.num_steps < 200
    assert accepted(engine) > 100
    engine.assert_nothing_is_held()


def test_tokens_that_were_guessed_count_for_whose_turn_it_is_as_any_others() -> None:
    engine = Engine()
    prompts = {b"quoting": quoting(random.Random(0), 200), b"other": tokens(random.Random(1), 206)}
    for salt, prompt in prompts.items():
        engine.add(salt.decode(), prompt[:206], max_tokens=300, salt=salt)
    engine.run()
    assert accepted(engine) > 100
    quoted, other = map(engine.scheduler.fairness.served, prompts)
    assert quoted == other


@pytest.mark.parametrize("seed", seeds(2, 3))
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [24, 4096])
def test_answers_do_not_depend_on_drafts(seed: int, caching: bool, budget: int) -> None:
    rng = random.Random(seed)
    engine = Engine(rng.randrange(24, 40), 16, budget=budget, max_num_seqs=12, caching=caching)
    shared = quoting(rng, 90)
    wanted: dict[str, list[int]] = {}
    for number in range(40):
        prompt = shared[: rng.choice([0, 15, 16, 17, 48, 90])] + tokens(rng, rng.randrange(1, 60))
        if rng.random() < 0.5:
            prompt = quoting(rng, rng.randrange(1, 90))
        count = rng.randrange(1, 120)
        stop = rng.sample(prompt, min(rng.randrange(3), len(prompt)))
        engine.add(f"r{number}", prompt, max_tokens=count, stop_token_ids=tuple(stop))
        wanted[f"r{number}"] = expected(prompt, count, stop=(fake_runner.EOS, *stop))
        for _ in range(rng.randrange(4)):
            engine.turn()
            engine.scheduler.open.check_integrity()
    engine.run()
    assert engine.tokens == wanted
    engine.assert_nothing_is_held()
    assert engine.scheduler.num_preemptions > 0
    assert accepted(engine) > 50


@pytest.mark.parametrize("seed", range(3))
def test_aborts_of_requests_that_draft_leak_nothing(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(60, 16, budget=64, max_num_seqs=8)
    wanted: dict[str, list[int]] = {}
    for number in range(80):
        prompt = quoting(rng, rng.randrange(1, 100))
        count = rng.randrange(1, 80)
        engine.add(f"r{number}", prompt, max_tokens=count)
        wanted[f"r{number}"] = expected(prompt, count)
        for _ in range(rng.randrange(5)):
            engine.turn()
        if rng.random() < 0.5:
            engine.abort(*rng.sample(sorted(wanted), k=min(3, len(wanted))))
            engine.turn()
            engine.scheduler.open.check_integrity()
    engine.run()
    engine.assert_nothing_is_held()
    aborted = {name for name, reason in engine.reasons.items() if reason == "abort"}
    assert aborted
    assert {name: engine.tokens[name] for name in wanted if name not in aborted} == {
        name: answer for name, answer in wanted.items() if name not in aborted
    }
    assert accepted(engine) > 50


def test_what_drafts_left_in_blocks_is_never_found_by_others() -> None:
    rng = random.Random(0)
    engine = Engine()
    prompt = quoting(rng, 100)
    engine.add("first", prompt, max_tokens=200)
    engine.run()
    for number in range(12):
        longer = prompt + engine.tokens["first"][: 16 * number] + tokens(rng, 3)
        engine.add(f"r{number}", longer, max_tokens=40)
        engine.run()
        assert engine.tokens[f"r{number}"] == expected(longer, 40)
    assert engine.cached["r11"] > 250


def test_out_of_memory_with_drafts_changes_no_answer() -> None:
    rng = random.Random(0)
    engine = Engine(budget=512)
    engine.runner.memory_for = lambda batch: len(batch.seqs) <= 3
    prompts = {f"r{number}": quoting(rng, 60) for number in range(10)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=60)
    engine.run()
    assert all(engine.tokens[name] == expected(prompt, 60) for name, prompt in prompts.items())
    assert not engine.failures
    engine.assert_nothing_is_held()


def test_requests_with_penalties_never_draft() -> None:
    engine = Engine()
    prompt = quoting(random.Random(0), 100)
    engine.add("a", prompt, max_tokens=60, repetition_penalty=1.1)
    engine.add("b", prompt, max_tokens=60, presence_penalty=0.1)
    engine.add("c", prompt, max_tokens=60, frequency_penalty=0.1)
    engine.run()
    assert all(answer == expected(prompt, 60) for answer in engine.tokens.values())
    assert accepted(engine) == 0


def test_statistics_count_drafts_and_what_was_right() -> None:
    engine = Engine()
    engine.add("a", quoting(random.Random(0), 100), max_tokens=100, logprobs=1)
    engine.run()
    engine.turn()
    last = engine.stats[-1]
    assert last.generation_tokens == len(engine.tokens["a"])
    assert 0 < last.num_drafts <= last.num_accepted_tokens <= last.num_draft_tokens
    assert last.num_draft_tokens <= 7 * last.num_drafts
