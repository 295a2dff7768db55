"""Answers must not depend on what else runs, nor on how it is cut up; nothing leaks; nobody starves."""

import random
import time
from collections.abc import Iterable

import pytest
from bytecodes import executed
from cranked_engine import Engine, tokens
from fake_runner import expected
from seeds import seeds

from models.batch import StepOutput
from server.engine import kv_cache
from server.engine.limits import SchedulerConfig

pytestmark = pytest.mark.usefixtures("_overlaps")


def test_one_request_gets_its_tokens() -> None:
    engine = Engine()
    prompt = tokens(random.Random(0), 40)
    engine.add("a", prompt, max_tokens=30)
    engine.run()
    assert engine.tokens["a"] == expected(prompt, 30)
    assert engine.reasons["a"] == "length"
    engine.assert_nothing_is_held()


@pytest.mark.parametrize("seed", seeds(3, 6))
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [16, 40, 4096])
def test_answers_do_not_depend_on_chunks_caches_or_preemption(seed: int, caching: bool, budget: int) -> None:
    rng = random.Random(seed)
    block_size = 16
    engine = Engine(rng.randrange(24, 40), block_size, budget=budget, max_num_seqs=12, caching=caching)
    shared = tokens(rng, 100)
    wanted: dict[str, list[int]] = {}
    for number in range(40):
        prompt = shared[: rng.choice([0, 15, 16, 17, 48, 100])] + tokens(rng, rng.randrange(1, 90))
        if rng.random() < 0.2:
            prompt = shared[: rng.choice([16, 32, 96])]
        count = rng.randrange(1, 120)
        engine.add(f"r{number}", prompt, max_tokens=count)
        wanted[f"r{number}"] = expected(prompt, count)
        for _ in range(rng.randrange(4)):
            engine.turn()
            engine.scheduler.open.check_integrity()
    engine.run()
    assert engine.tokens == wanted
    engine.assert_nothing_is_held()
    assert engine.scheduler.num_preemptions > 0
    assert (engine.scheduler.prefix_cache_hits > 0) == caching


@pytest.mark.parametrize("seed", range(8))
def test_aborts_at_any_time_leak_nothing(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(40, 16, budget=48, max_num_seqs=8)
    shared = tokens(rng, 64)
    wanted: dict[str, list[int]] = {}
    for number in range(120):
        prompt = shared[: rng.randrange(65)] + tokens(rng, rng.randrange(1, 100))
        count = rng.randrange(1, 60)
        engine.add(f"r{number}", prompt, max_tokens=count)
        wanted[f"r{number}"] = expected(prompt, count)
        for _ in range(rng.randrange(3)):
            engine.turn()
        if rng.random() < 0.7:
            engine.abort(*rng.sample(sorted(wanted), k=min(3, len(wanted))), "unknown")
            engine.turn()
            engine.scheduler.open.check_integrity()
    engine.run()
    engine.assert_nothing_is_held()
    aborted = {name for name, reason in engine.reasons.items() if reason == "abort"}
    assert aborted
    assert {name: engine.tokens[name] for name in wanted if name not in aborted} == {
        name: answer for name, answer in wanted.items() if name not in aborted
    }


def test_a_prompt_alone_has_the_whole_budget() -> None:
    engine = Engine(budget=256)
    engine.runner.keep_batches = True
    engine.add("a", tokens(random.Random(0), 1024), max_tokens=1)
    engine.run()
    assert [len(batch.seqs[0].token_ids) for batch in engine.runner.batches] == [256] * 4


def test_every_decode_has_its_token_in_every_step_of_a_giant_prefill() -> None:
    rng = random.Random(0)
    engine = Engine(1024, 16, budget=64)
    for name in "abcd":
        engine.add(name, tokens(rng, 5), max_tokens=500)
    engine.run(until=lambda: len(engine.tokens) == 4)
    engine.runner.keep_batches = True
    engine.add("giant", tokens(rng, 8000), max_tokens=1)
    engine.run(until=lambda: "giant" in engine.tokens)
    for batch in engine.runner.batches:
        assert [len(seq.token_ids) for seq in batch.seqs[:4]] == [1] * 4
    assert len(engine.runner.batches) <= 8000 // 60 + 2


def test_short_prompts_behind_giants_answer_within_a_few_steps() -> None:
    rng = random.Random(0)
    engine = Engine(4096, 16, budget=256)
    engine.add("giant1", tokens(rng, 20_000), max_tokens=1)
    engine.add("giant2", tokens(rng, 20_000), max_tokens=1)
    for _ in range(3):
        engine.turn()
    for number in range(10):
        engine.add(f"short{number}", tokens(rng, 50), max_tokens=4)
    start = engine.num_turns
    engine.run(until=lambda: sum(name.startswith("short") for name in engine.tokens) == 10)
    assert engine.num_turns - start <= 4  # 500 tokens through 3/4 of the budget
    engine.run()
    engine.assert_nothing_is_held()


def test_a_stream_of_short_prompts_does_not_stop_a_giant() -> None:
    rng = random.Random(0)
    engine = Engine(4096, 16, budget=256, max_num_seqs=16)
    engine.add("giant", tokens(rng, 12_800), max_tokens=1)
    number = 0
    while "giant" not in engine.tokens:
        for _ in range(4):
            engine.add(f"short{number}", tokens(rng, 150), max_tokens=1)
            number += 1
        engine.turn()
        assert engine.num_turns <= 12_800 // 60 + 10  # a quarter of the budget, less the decodes
    engine.abort(*engine.scheduler.open.by_id)
    engine.turn()
    engine.assert_nothing_is_held()


def test_a_request_that_waits_for_blocks_is_not_bypassed_for_ever() -> None:
    rng = random.Random(0)
    engine = Engine(65, 16, budget=256, max_num_seqs=16)
    engine.add("first", tokens(rng, 100), max_tokens=40)
    engine.turn()
    engine.add("giant", tokens(rng, 980), max_tokens=8)
    number = 0
    while "giant" not in engine.tokens:
        engine.add(f"short{number}", tokens(rng, 30), max_tokens=20)
        number += 1
        engine.turn()
        assert number < 400
    engine.run()
    engine.assert_nothing_is_held()


def test_nor_is_it_where_another_tenant_comes_first_now_and_then() -> None:
    """Its requests are few and short. Others of its own tenant must not come in with them, and take what is free."""
    rng = random.Random(0)
    engine = Engine(401, 16, budget=512, max_num_seqs=16)
    number = 0

    def flood() -> None:
        nonlocal number
        while len(engine.scheduler.waiting) + len(engine.link.inbox) < 16:
            engine.add(f"own{number}", tokens(rng, 30), max_tokens=rng.randrange(100, 200), salt=b"a", ignore_eos=True)
            number += 1

    flood()
    engine.turn()
    engine.add("giant", tokens(rng, 5700), max_tokens=1, salt=b"a")
    while "giant" not in engine.tokens:
        flood()
        if engine.num_turns % 10 == 0:
            engine.add(f"other{engine.num_turns}", tokens(rng, 20), max_tokens=4, salt=b"b")
        engine.turn()
        assert engine.num_turns < 3000
    assert engine.tokens.keys() >= {"other200", "other400", "other600"}, "these did not wait for it"
    engine.abort(*engine.scheduler.open.by_id)
    engine.run()
    engine.assert_nothing_is_held()


def answer_a_long_one_in_a_flood(
    engine: Engine, kinds: dict[bytes, tuple[int, range]], long: int, within: int, rng: random.Random
) -> None:
    """`kinds`: tokens of a tenant's prompts, and of their answers: 16 of each always wait. Asks for one that takes
    `long` tokens and is of the first tenant, which is to be answered within so many turns."""
    number = 0

    def flood() -> None:
        nonlocal number
        for tenant, (length, counts) in kinds.items():
            coming = sum(message.cache_salt == tenant for message in engine.link.inbox)
            for _ in range(16 - coming - engine.scheduler.fairness.num_waiting(tenant)):
                count = rng.choice(counts)
                engine.add(f"r{number}", tokens(rng, length), max_tokens=count, salt=tenant, ignore_eos=True)
                number += 1

    for _ in range(20):
        flood()
        engine.turn()
    engine.add("long", tokens(rng, long), max_tokens=1, salt=next(iter(kinds)))
    while "long" not in engine.tokens:
        flood()
        engine.turn()
        assert engine.num_turns < within
    engine.abort(*engine.scheduler.open.by_id)
    engine.run()
    engine.assert_nothing_is_held()


def test_a_request_of_a_tenant_that_is_served_more_is_not_passed_for_ever_by_its_own() -> None:
    """Both tenants have all slots that are their part, and it is never the turn of the one with longer prompts."""
    engine = Engine(2000, 16, budget=1024, max_num_seqs=16)
    kinds = {b"a": (200, range(10, 20)), b"b": (5, range(20, 40))}
    answer_a_long_one_in_a_flood(engine, kinds, 6000, 500, random.Random(0))


def test_a_request_that_waits_for_blocks_behind_another_tenants_is_not_passed_for_ever() -> None:
    """That one waits for blocks, too, and is looked at before it, as its tenant has few slots."""
    engine = Engine(251, 16, budget=1024, max_num_seqs=16)
    kinds = {b"a": (5, range(100, 200)), b"b": (700, range(50, 100))}
    answer_a_long_one_in_a_flood(engine, kinds, 3600, 2000, random.Random(0))


def test_sixty_four_long_requests_on_a_pool_for_eight_all_finish_unchanged() -> None:
    rng = random.Random(0)
    engine = Engine(8 * 20 + 1, 16, budget=512, max_num_seqs=64)
    wanted = {}
    for number in range(64):
        prompt = tokens(rng, 200)
        engine.add(f"r{number}", prompt, max_tokens=120)
        wanted[f"r{number}"] = expected(prompt, 120)
    engine.run(limit=5000)
    assert engine.tokens == wanted
    engine.assert_nothing_is_held()
    assert engine.scheduler.num_preemptions > 0


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    rng = random.Random(0)
    engine = Engine()
    prompt = tokens(rng, 160)
    for name in ("first", "second"):
        engine.add(name, prompt)
        engine.run()
    assert engine.tokens["first"] == engine.tokens["second"] == expected(prompt, 8)
    assert engine.cached == {"first": 0, "second": 144}  # one token at least is computed, so not the last block
    engine.add("longer", prompt + engine.tokens["first"] + prompt)
    engine.run()
    assert engine.cached["longer"] == 160  # 167 tokens of the first answer are in the cache, ten full blocks


def test_salts_isolate() -> None:
    prompt = tokens(random.Random(0), 160)
    engine = Engine()
    for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one"), ("d", b"")):
        engine.add(name, prompt, salt=salt)
        engine.run()
    assert engine.cached == {"a": 0, "b": 0, "c": 144, "d": 0}


def test_twins_wait_for_the_prefix_that_is_being_computed() -> None:
    prompt = tokens(random.Random(0), 1600)
    engine = Engine(budget=256)
    engine.runner.keep_batches = True
    for name in "abcd":
        engine.add(name, prompt)
    engine.run()
    assert all(engine.tokens[name] == expected(prompt, 8) for name in "abcd")
    computed = sum(len(seq.token_ids) for batch in engine.runner.batches for seq in batch.seqs)
    assert computed < 1600 + 4 * 30
    engine.assert_nothing_is_held()


def test_questions_on_one_document_read_its_pages_together() -> None:
    rng = random.Random(0)
    engine = Engine(budget=512)
    document = tokens(rng, 400)
    engine.add("first", document + tokens(rng, 5))
    engine.run()
    prompts = {f"r{number}": document + tokens(rng, 30) for number in range(8)}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    engine.run()
    assert all(engine.tokens[name] == expected(prompt, 8) for name, prompt in prompts.items())
    assert engine.runner.num_shared_runs >= 7  # a prefill and the decodes
    engine.assert_nothing_is_held()


def test_twins_of_an_aborted_prompt_go_on_where_it_stopped() -> None:
    prompt = tokens(random.Random(0), 1600)
    engine = Engine(budget=256)
    engine.add("a", prompt)
    engine.add("b", prompt)
    for _ in range(3):
        engine.turn()
    engine.abort("a")
    engine.run()
    assert engine.tokens["b"] == expected(prompt, 8)
    assert engine.cached["b"] == (512 if Engine.overlaps else 768)  # a step in flight comes back to nobody


@pytest.mark.parametrize("seed", range(3))
def test_a_hash_that_always_collides_changes_no_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "hash_block", lambda *_: b"same")
    rng = random.Random(seed)
    engine = Engine(60, 16, budget=64, max_num_seqs=8)
    shared = tokens(rng, 64)
    wanted = {}
    for number in range(100):
        prompt = shared[: rng.choice([0, 16, 32, 64])] + tokens(rng, rng.randrange(1, 40))
        engine.add(f"r{number}", prompt, salt=rng.choice([b"x", b"y"]))
        wanted[f"r{number}"] = expected(prompt, 8)
        engine.turn()
        engine.scheduler.open.check_integrity()
    engine.run()
    assert engine.tokens == wanted
    engine.assert_nothing_is_held()


def test_a_request_that_can_never_fit_fails_at_once() -> None:
    engine = Engine(11, 16, max_model_len=1000)
    rng = random.Random(0)
    engine.add("pool", tokens(rng, 150), max_tokens=30)
    engine.add("length", tokens(rng, 1000))
    engine.add("empty", [])
    engine.add("vocabulary", [1, 32_000])
    engine.add("bias", [1], logit_bias={-1: 1.0})
    engine.add("stop", [1], stop_token_ids=(32_000,))
    engine.add("fits", tokens(rng, 150), max_tokens=11)
    engine.run()
    assert {name: failure.code for name, failure in engine.failures.items()} == {
        "pool": "context_length_exceeded",
        "length": "context_length_exceeded",
        "empty": "server_error",
        "vocabulary": "unsupported_parameter",
        "bias": "unsupported_parameter",
        "stop": "unsupported_parameter",
    }
    assert len(engine.tokens["fits"]) == 11
    engine.assert_nothing_is_held()


def first_tokens(prompt: list[int], count: int) -> list[int]:
    return expected(prompt, count, stop=())


def reasons_and_tokens(engine: Engine) -> Iterable[tuple[str, str | None, int]]:
    return ((name, engine.reasons[name], len(engine.tokens[name])) for name in sorted(engine.tokens))


def test_generation_ends_at_stop_tokens_max_tokens_and_max_model_len() -> None:
    engine = Engine(max_model_len=30)
    prompt = tokens(random.Random(0), 20)
    answer = first_tokens(prompt, 10)
    engine.scheduler.open.config = SchedulerConfig(64, 256, 30, 32_000, (answer[3],))
    engine.add("eos", prompt, max_tokens=8)
    engine.add("ignore_eos", prompt, max_tokens=8, ignore_eos=True)
    engine.add("min_tokens", prompt, max_tokens=8, min_tokens=5)
    engine.add("stop_token", prompt, max_tokens=8, stop_token_ids=(answer[1],))
    engine.add("stop_wins", prompt, max_tokens=4)
    engine.add("model_len", prompt, max_tokens=80, ignore_eos=True)
    engine.run()
    assert list(reasons_and_tokens(engine)) == [
        ("eos", "stop", 4),
        ("ignore_eos", "length", 8),
        ("min_tokens", "length", 8),
        ("model_len", "length", 10),
        ("stop_token", "stop", 2),
        ("stop_wins", "stop", 4),
    ]


def test_waiting_past_the_deadline_is_refused_and_never_started() -> None:
    engine = Engine(max_num_seqs=1, queue_timeout=10.0)
    rng = random.Random(0)
    engine.add("runs", tokens(rng, 10), max_tokens=50)
    engine.add("waits", tokens(rng, 10), max_tokens=50)
    engine.run()
    assert engine.failures["waits"].code == "server_is_overloaded"
    assert "waits" not in engine.tokens
    assert len(engine.tokens["runs"]) == 50
    engine.assert_nothing_is_held()


def test_one_tenants_flood_pushes_out_its_own_blocks_first() -> None:
    rng = random.Random(0)
    engine = Engine(65, 16)
    kept = tokens(rng, 161)
    engine.add("kept", kept, salt=b"quiet")
    engine.run()
    for number in range(40):
        engine.add(f"flood{number}", tokens(rng, 200), salt=b"loud")
        engine.run()
    engine.add("again", kept, salt=b"quiet")
    engine.run()
    assert engine.cached["again"] == 160


class Decoding:
    """An engine whose requests all decode, and a step of it: schedule() and postprocess() together."""

    def __init__(self, num_requests: int, context: int) -> None:
        self.num_requests = num_requests
        self.engine = Engine(num_requests * (context // 64 + 4) + 200, 64, budget=8192, max_num_seqs=num_requests)
        rng = random.Random(0)
        for number in range(num_requests):
            steps = 120 + context * num_requests // 8192
            self.engine.add(f"r{number}", tokens(rng, context), max_tokens=steps, ignore_eos=True)
        self.engine.run(until=lambda: len(self.engine.tokens) == num_requests)

    def step(self) -> None:
        step = self.engine.scheduler.schedule()
        assert step is not None
        assert len(step.requests) == self.num_requests
        output = StepOutput([5] * self.num_requests, [None] * self.num_requests, [True] * self.num_requests)
        self.engine.scheduler.postprocess(self.engine.scheduler.launched(step), output)

    def seconds(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def test_a_decode_costs_a_step_seven_hundred_instructions_however_many_there_are() -> None:
    """535 with Python 3.11: 1.1 ms for 256 decodes on a core of 2026."""
    one, many = Decoding(1, 16), Decoding(256, 16)
    rest = min(executed(one.step) for _ in range(3))
    assert min(executed(many.step) for _ in range(3)) < rest + 255 * 700


def test_the_cost_of_a_step_does_not_grow_with_the_context() -> None:
    short, long = Decoding(64, 16), Decoding(64, 8192)
    pairs = [(short.seconds(), long.seconds()) for _ in range(60)]
    assert min(seconds for _, seconds in pairs) < 3 * min(seconds for seconds, _ in pairs)
