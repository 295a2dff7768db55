"""Requests of many adapters over few slots: every answer is its adapter's, nobody waits for ever, nothing is left."""

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from cranked_engine import Engine, tokens
from fake_runner import GATE, FakeAdapters, expected, make_adapter
from seeds import seeds

from models.batch import NO_ADAPTER
from server.engine import adapters
from server.engine.adapters import STARTS
from server.engine.messages import AdapterLoaded, AdapterUnloaded, CommandFailed, LoadAdapter, UnloadAdapter
from server.engine.waiting import LOOKAHEAD

pytestmark = pytest.mark.usefixtures("_overlaps")


def with_adapters(engine: Engine, folder: Path, count: int) -> None:
    """Adapters a1, a2, ... with the numbers 1, 2, ..."""
    for key in range(1, count + 1):
        assert isinstance(engine.load(f"a{key}", make_adapter(folder / f"a{key}", key)), AdapterLoaded)


def slots(engine: Engine) -> FakeAdapters:
    assert engine.runner.adapters is not None
    return engine.runner.adapters


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("max_loras", [1, 2, 8])
def test_any_mixture_of_adapters_over_any_number_of_slots_answers_right(
    tmp_path: Path, seed: int, max_loras: int
) -> None:
    """Shared prefixes, small steps, preemptions and aborts included."""
    rng = random.Random(seed)
    engine = Engine(rng.choice([40, 400]), 16, budget=64, max_num_seqs=12, max_loras=max_loras)
    with_adapters(engine, tmp_path, 5)
    shared = tokens(rng, 64)
    wanted = {}
    for number in range(40):
        key = rng.randrange(6)
        prompt = shared[: rng.randrange(65)] + tokens(rng, rng.randrange(1, 40))
        wanted[f"r{number}"] = (prompt, key)
        engine.add(f"r{number}", prompt, max_tokens=12, adapter=f"a{key}" if key else None)
        if rng.random() < 0.3:
            engine.turn()
        if rng.random() < 0.1:
            engine.abort(f"r{number}")
    engine.run()
    for name, (prompt, key) in wanted.items():
        if engine.reasons[name] != "abort":
            assert engine.tokens[name] == expected(prompt, 12, adapter=key), name
    assert not engine.failures
    engine.assert_nothing_is_held()
    assert not engine.adapters.running()
    assert not engine.adapters.waiting()


def test_the_prefix_cache_is_kept_apart_by_adapter_and_shared_by_equal_ones(tmp_path: Path) -> None:
    engine = Engine(max_loras=2)
    with_adapters(engine, tmp_path, 2)
    engine.load("a1 again", str(tmp_path / "a1"))
    prompt = tokens(random.Random(0), 100)
    for name, adapter, hits in (
        ("base", None, 0),
        ("one", "a1", 0),
        ("two", "a2", 0),
        ("base again", None, 96),
        ("one again", "a1", 96),
        ("its twin", "a1 again", 96),
    ):
        engine.add(name, prompt, adapter=adapter)
        engine.run()
        assert engine.cached[name] == hits, name


def test_another_adapter_of_the_same_name_shares_nothing_with_the_old_one(tmp_path: Path) -> None:
    engine = Engine(max_loras=1)
    with_adapters(engine, tmp_path, 1)
    prompt = tokens(random.Random(0), 100)
    engine.add("before", prompt, adapter="a1")
    engine.run()
    again = engine.load("a1", make_adapter(tmp_path / "other", 7))
    assert isinstance(again, CommandFailed)
    assert again.code == "adapter_exists"
    assert isinstance(engine.load("a1", make_adapter(tmp_path / "other", 7), replace=True), AdapterLoaded)
    engine.add("after", prompt, adapter="a1")
    engine.run()
    assert engine.tokens["before"] == expected(prompt, 8, adapter=1)
    assert engine.tokens["after"] == expected(prompt, 8, adapter=7)
    assert engine.cached["after"] == 0
    assert slots(engine).on_host.keys() == {1}, "what is replaced is forgotten"


def test_a_request_keeps_the_adapter_that_its_name_meant(tmp_path: Path) -> None:
    """Replaced and unloaded while it runs and while it waits."""
    engine = Engine(max_loras=1, max_num_seqs=1)
    with_adapters(engine, tmp_path, 1)
    prompt = tokens(random.Random(0), 20)
    for name in ("runs", "waits"):
        engine.add(name, prompt, max_tokens=30, adapter="a1")
    engine.run(until=lambda: "runs" in engine.tokens)
    assert isinstance(engine.load("a1", make_adapter(tmp_path / "new", 2), replace=True), AdapterLoaded)
    engine.add("comes", prompt, max_tokens=30, adapter="a1")
    engine.turn()
    gone = engine.unload("a1")
    assert gone == AdapterUnloaded(gone.command_id, 1)
    engine.add("late", prompt, adapter="a1")
    engine.run()
    for name, key in (("runs", 1), ("waits", 1), ("comes", 2)):
        assert engine.tokens[name] == expected(prompt, 30, adapter=key), name
    assert engine.failures["late"].code == "model_not_found"
    assert not slots(engine).on_host
    assert engine.adapters.num_kept == 0
    engine.assert_nothing_is_held()


def test_the_least_recently_used_idle_adapter_gives_up_its_slot(tmp_path: Path) -> None:
    engine = Engine(max_loras=2)
    with_adapters(engine, tmp_path, 3)
    for adapter in ("a1", "a2", "a1", "a3", "a1", "a2"):
        engine.add(f"r{engine.num_turns}", [1, 2, 3], adapter=adapter)
        engine.run()
    assert slots(engine).history == [(0, 1), (1, 2), (1, 3), (1, 2)]
    engine.turn()
    assert engine.stats[-1].adapter_placements == 4


def test_a_request_whose_adapter_has_no_slot_waits_and_holds_up_nobody(tmp_path: Path) -> None:
    engine = Engine(max_loras=1, max_num_seqs=2 * LOOKAHEAD, budget=1024, num_blocks=4000)
    with_adapters(engine, tmp_path, 2)
    engine.add("holder", [1, 2, 3], max_tokens=40, adapter="a1", ignore_eos=True)
    engine.turn()
    for number in range(LOOKAHEAD + 10):
        engine.add(f"w{number}", [4, 5, 6], adapter="a2")
    engine.add("base", [7, 8], adapter=None)
    engine.add("same", [9, 10], adapter="a1")
    engine.run(until=lambda: {"base", "same"} <= engine.reasons.keys())
    assert "w0" not in engine.tokens
    engine.turn()
    assert (engine.stats[-1].running_adapters, engine.stats[-1].waiting_adapters) == (("a1",), ("a2",))
    assert engine.stats[-1].max_loras == 1
    engine.run()
    assert all(engine.tokens[f"w{number}"] == expected([4, 5, 6], 8, adapter=2) for number in range(LOOKAHEAD + 10))
    engine.assert_nothing_is_held()


def test_a_stream_of_requests_of_one_adapter_does_not_keep_another_waiting_for_ever(tmp_path: Path) -> None:
    engine = Engine(max_loras=1, max_num_seqs=4)
    with_adapters(engine, tmp_path, 2)
    sent = 0

    def flood() -> None:
        nonlocal sent
        while len(engine.scheduler.waiting) + len(engine.link.inbox) < 8:
            # Of different lengths: one of them always runs, and keeps the slot.
            engine.add(f"flood{sent}", [1, 2, 3], max_tokens=3 + sent % 4, adapter="a1", ignore_eos=True)
            sent += 1

    flood()
    engine.add("patient", [4, 5, 6], max_tokens=4, adapter="a2")
    engine.turn()
    before = sent
    while "patient" not in engine.reasons:
        flood()
        engine.turn()
        assert sent - before < STARTS + 40
    assert engine.tokens["patient"] == expected([4, 5, 6], 4, adapter=2)
    assert sent - before > STARTS - 8, "younger ones could pass it"
    engine.run()
    engine.assert_nothing_is_held()


def test_nor_where_another_tenant_comes_first_now_and_then(tmp_path: Path) -> None:
    engine = Engine(1000, max_loras=1, max_num_seqs=16)
    with_adapters(engine, tmp_path, 2)
    sent = 0

    def flood() -> None:
        nonlocal sent
        while len(engine.scheduler.waiting) + len(engine.link.inbox) < 20:
            engine.add(f"own{sent}", [1, 2, 3], max_tokens=100 + sent % 40, salt=b"a", adapter="a1", ignore_eos=True)
            sent += 1

    flood()
    engine.turn()
    prompt = tokens(random.Random(0), 6000)  # so long that short ones come before it
    engine.add("patient", prompt, max_tokens=4, salt=b"a", adapter="a2")
    last = engine.num_turns + 2000
    while "patient" not in engine.reasons:
        flood()
        if engine.num_turns % 10 == 0:
            engine.add(f"other{engine.num_turns}", [9, 9], max_tokens=2, salt=b"b", adapter="a1")
        engine.turn()
        assert engine.num_turns < last
    assert engine.tokens["patient"] == expected(prompt, 4, adapter=2)
    engine.abort(*engine.scheduler.open.by_id)
    engine.run()
    engine.assert_nothing_is_held()


def served_more_and_less(folder: Path, max_loras: int) -> tuple[Engine, Callable[[], None]]:
    """A tenant's requests use all slots without a pause, and another's chats with the base model make it the one that
    is served more. The engine, and what sees to that."""
    engine = Engine(2000, max_loras=max_loras, max_num_seqs=32, max_cpu_loras=40)
    with_adapters(engine, folder, max_loras + 30)
    rng, number = random.Random(0), count()

    def flood() -> None:
        while len(engine.scheduler.waiting) - len(engine.adapters.waiting()) + len(engine.link.inbox) < 6:
            engine.add(f"base{next(number)}", tokens(rng, 120), max_tokens=30, salt=b"more", ignore_eos=True)
            for key in range(1, max_loras + 1):
                at = next(number)
                engine.add(f"less{at}", [1, 2], max_tokens=20 + at % 7, adapter=f"a{key}", ignore_eos=True)
        engine.turn()

    for _ in range(100):
        flood()
    return engine, flood


def ended(engine: Engine, prefix: str) -> int:
    return sum(name.startswith(prefix) for name in engine.reasons)


@pytest.mark.parametrize("max_loras", [1, 3])
def test_a_tenant_that_is_served_more_gets_a_slot_that_others_use_without_a_pause(
    tmp_path: Path, max_loras: int
) -> None:
    """The others were before it each time."""
    engine, flood = served_more_and_less(tmp_path, max_loras)
    engine.add("patient", [4, 5, 6], max_tokens=4, salt=b"more", adapter=f"a{max_loras + 1}")
    before = ended(engine, "less")
    while "patient" not in engine.reasons:
        flood()
        assert ended(engine, "less") - before < STARTS + 100
    assert engine.tokens["patient"] == expected([4, 5, 6], 4, adapter=max_loras + 1)
    assert ended(engine, "less") - before > STARTS - 50
    engine.abort(*engine.scheduler.open.by_id)
    engine.run()
    engine.assert_nothing_is_held()


def test_its_other_adapters_do_not_stop_theirs(tmp_path: Path) -> None:
    answered, max_loras = [], 3
    for num_rare in (0, 30):
        engine, flood = served_more_and_less(tmp_path / str(num_rare), max_loras)
        for key in range(max_loras + 1, max_loras + num_rare + 1):
            engine.add(f"rare{key}", [4, 5, 6], max_tokens=4, salt=b"more", adapter=f"a{key}")
        for _ in range(500):
            flood()
        answered.append(ended(engine, "less"))
    assert answered[1] > 0.9 * answered[0]
    assert 0 < ended(engine, "rare") <= answered[1] // STARTS + max_loras


@pytest.mark.parametrize("seed", seeds(10, 30))
def test_any_tenants_with_any_adapters_come_to_an_end(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon another adapter is next."""
    rng = random.Random(seed)
    monkeypatch.setattr(adapters, "STARTS", rng.choice([1, 2, 5, 20]))
    monkeypatch.setattr(adapters, "KEPT", rng.choice([1, 5, 100]))
    seats, max_loras = rng.choice([2, 12]), rng.choice([1, 2, 4])
    engine = Engine(rng.choice([40, 400]), 16, budget=64, max_num_seqs=seats, max_loras=max_loras)
    with_adapters(engine, tmp_path, 6)
    salts = [b"%d" % number for number in range(rng.choice([1, 2, 5]))]
    wanted = {}
    for number in range(60):
        key, salt = rng.randrange(7), rng.choice(salts)
        prompt = tokens(rng, rng.randrange(1, rng.choice([20, 200])))
        wanted[f"r{number}"] = (prompt, key)
        engine.add(f"r{number}", prompt, max_tokens=12, salt=salt, adapter=f"a{key}" if key else None)
        if rng.random() < 0.3:
            engine.turn()
        if rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.03:
            engine.unload(f"a{rng.randrange(1, 7)}")
    engine.run()
    for name, (prompt, key) in wanted.items():
        if name not in engine.failures and engine.reasons[name] != "abort":
            assert engine.tokens[name] == expected(prompt, 12, adapter=key), name
    assert {failure.code for failure in engine.failures.values()} <= {"model_not_found"}, "of those that were unloaded"
    engine.assert_nothing_is_held()
    assert not engine.adapters.running()
    assert not engine.adapters.waiting()


def test_a_placement_that_fails_costs_the_requests_of_that_adapter_only(tmp_path: Path) -> None:
    engine = Engine(max_loras=2)
    with_adapters(engine, tmp_path, 2)
    slots(engine).fails_to_place = {1}
    for adapter in ("a1", "a2", "a1"):
        engine.add(f"{adapter}-{engine.num_turns}-{len(engine.link.inbox)}", [1, 2, 3], adapter=adapter)
    engine.run()
    assert sorted(name[:2] for name in engine.failures) == ["a1", "a1"]
    slots(engine).fails_to_place = set()
    engine.add("again", [1, 2, 3], adapter="a1")
    engine.run()
    assert engine.tokens["again"] == expected([1, 2, 3], 8, adapter=1)
    engine.assert_nothing_is_held()


def test_steps_go_on_while_an_adapter_is_read(tmp_path: Path) -> None:
    engine = Engine(max_loras=1)
    folder = tmp_path / "slow"
    make_adapter(folder, 3)
    gate = tmp_path / "open"
    (folder / GATE).write_text(str(gate))
    engine.add("runs", [1, 2, 3], max_tokens=50, ignore_eos=True)
    engine.begin(LoadAdapter(0, "slow", str(folder)))
    engine.run(until=lambda: "runs" in engine.reasons)
    assert not engine.replies
    twice = engine.command(LoadAdapter(1, "slow", str(folder)))
    assert isinstance(twice, CommandFailed)
    gate.touch()
    engine.run(until=lambda: 0 in engine.replies)
    assert isinstance(engine.replies[0], AdapterLoaded)


def test_commands_that_cannot_be_followed_change_nothing(tmp_path: Path) -> None:
    engine = Engine(max_loras=1, max_cpu_loras=2)
    with_adapters(engine, tmp_path, 1)
    refused = {
        "invalid_adapter": [
            engine.load("x", str(tmp_path / "nowhere")),
            engine.load("x", str(tmp_path / "a1"), within=str(tmp_path / "elsewhere")),
        ],
        "server_error": [engine.load("x", make_adapter(tmp_path / "too large", -1))],
        "model_not_found": [engine.unload("x")],
    }
    for code, replies in refused.items():
        for reply in replies:
            assert isinstance(reply, CommandFailed)
            assert reply.code == code
    assert slots(engine).on_host == {0: 1}
    engine.load("a2", make_adapter(tmp_path / "a2", 2))
    full = engine.load("a3", make_adapter(tmp_path / "a3", 3))
    assert isinstance(full, CommandFailed)
    assert full.code == "insufficient_quota"
    assert "max_cpu_loras" in full.message
    assert isinstance(engine.load("a1", str(tmp_path / "a3"), replace=True), AdapterLoaded), "one for another"
    assert isinstance(engine.unload("a2"), AdapterUnloaded)
    assert isinstance(engine.load("a3", str(tmp_path / "a3")), AdapterLoaded)


def test_adapters_that_are_replaced_at_once_need_no_more_room_than_one_by_one(tmp_path: Path) -> None:
    engine = Engine(max_loras=1, max_cpu_loras=3)
    with_adapters(engine, tmp_path, 3)
    folder = make_adapter(tmp_path / "new", 7)
    gate = tmp_path / "open"
    (tmp_path / "new" / GATE).write_text(str(gate))
    for number, name in enumerate(("a1", "a2", "a3"), 10):
        engine.begin(LoadAdapter(number, name, folder, replace=True))
    full = engine.command(LoadAdapter(13, "a4", folder))
    assert isinstance(full, CommandFailed)
    assert full.code == "insufficient_quota"
    assert not engine.replies.keys() & {10, 11, 12}, "none is refused, none is there yet"
    gate.touch()
    engine.core.loading._reader.submit(int).result()  # behind all that it was told to read
    assert len(slots(engine).on_host) == 4, "the next is read when this one has taken its place"
    engine.run(until=lambda: {10, 11, 12} <= engine.replies.keys())
    assert all(isinstance(engine.replies[number], AdapterLoaded) for number in (10, 11, 12))
    assert list(slots(engine).on_host.values()) == [7, 7, 7]


@pytest.mark.parametrize("seed", range(30))
def test_adapters_loaded_at_once_are_refused_as_one_by_one(tmp_path: Path, seed: int) -> None:
    """New ones and others' successors, of which requests still use some."""
    rng = random.Random(seed)
    most, used = rng.choice([4, 5, 6]), [f"a{key}" for key in range(1, 5) if rng.random() < 0.4]
    folder = make_adapter(tmp_path / "new", 9)
    commands = [
        LoadAdapter(number, f"a{key}", folder, replace=rng.random() < 0.8)
        for number, key in enumerate(rng.sample(range(1, 8), 6), 10)
    ]
    refused = []
    for at_once in (True, False):
        engine = Engine(max_loras=1, max_cpu_loras=most)
        with_adapters(engine, tmp_path, 4)
        for name in used:
            adapter = engine.adapters.find(name)
            assert adapter is not None
            engine.adapters.open(adapter)
        for command in commands:
            if at_once:
                engine.begin(command)
            else:
                engine.command(command)
        while len(engine.replies) < 4 + len(commands):
            engine.turn()
        replies = engine.replies.values()
        refused.append({reply.command_id: reply.code for reply in replies if isinstance(reply, CommandFailed)})
        assert engine.adapters.num_kept <= most + 1
    assert refused[0] == refused[1]


def test_an_engine_without_adapters_refuses_them_and_their_requests(tmp_path: Path) -> None:
    engine = Engine()
    reply = engine.load("x", make_adapter(tmp_path / "x", 1))
    assert isinstance(reply, CommandFailed)
    assert "--enable-lora" in reply.message
    engine.add("a", [1, 2], adapter="x")
    engine.add("b", [1, 2])
    engine.run()
    assert engine.failures["a"].code == "model_not_found"
    assert engine.tokens["b"] == expected([1, 2], 8)
    assert isinstance(engine.command(UnloadAdapter(9, "x")), CommandFailed)


def test_rows_of_the_base_model_name_no_slot(tmp_path: Path) -> None:
    engine = Engine(max_loras=2)
    with_adapters(engine, tmp_path, 1)
    engine.runner.keep_batches = True
    engine.add("base", [1, 2, 3])
    engine.add("tuned", [1, 2, 3], adapter="a1")
    engine.run()
    assert {seq.adapter_slot for batch in engine.runner.batches for seq in batch.seqs} == {NO_ADAPTER, 0}
