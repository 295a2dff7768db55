"""Prefixes that the device gave up come back from host memory and from disk, and no answer tells. The fake runner's
tokens depend on every slot of every block that it reads, so a wrong, early or late copy gives wrong tokens."""

import random
import time
from pathlib import Path

import pytest
from cranked_engine import Engine, tokens
from fake_runner import NAN, expected
from host_memory import block_bytes, give_host_memory
from seeds import seeds

from server.engine import kv_cache
from server.engine.block_files import file_bytes
from server.engine.disk_tier import DiskTier
from server.engine.offloading_cache import OffloadingKVCache

pytestmark = pytest.mark.usefixtures("_overlaps")

FINGERPRINT = bytes(32)


def open_disk(engine: Engine, folder: Path, num_blocks: int = 1000, fingerprint: bytes = FINGERPRINT) -> DiskTier:
    size = block_bytes(engine)
    return DiskTier(
        folder,
        max_bytes=num_blocks * 2 * (size + 1024),
        fingerprint=fingerprint,
        block_bytes=size,
        block_size=engine.runner.block_size,
    )


def ask(engine: Engine, name: str, prompt: list[int], salt: bytes = b"") -> int:
    """Runs one request to its end, checks its answer, and says how many tokens of its prompt were cached."""
    engine.add(name, prompt, max_tokens=4, salt=salt)
    engine.run()
    assert engine.tokens[name] == expected(prompt, 4)
    engine.scheduler.open.check_integrity()
    return engine.cached[name]


def push_out(engine: Engine, rng: random.Random, rounds: int = 6) -> None:
    """Other prompts, each larger than half of the device's cache."""
    room = engine.cache.pool.num_usable * engine.runner.block_size
    for number in range(rounds):
        ask(engine, f"other {number} {rng.random()}", tokens(rng, room * 2 // 3))


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_a_prefix_that_was_given_up_comes_back_from_host_memory(turns: int) -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    cache = give_host_memory(engine, 400, turns=turns)
    document = tokens(rng, 320)
    assert ask(engine, "first", document) == 0
    push_out(engine, rng)
    assert not cache.match(_request(engine, document))
    assert ask(engine, "again", [*document, 7]) == 320
    assert cache.offload.num_loaded >= 20
    engine.assert_nothing_is_held()


def _request(engine: Engine, prompt: list[int]) -> kv_cache.Request:
    from models.batch import SamplingParams
    from server.engine.messages import AddRequest
    from server.engine.token_ids import TokenIds

    message = AddRequest("probe", TokenIds(prompt), SamplingParams())
    return kv_cache.Request(message, sequence_number=10**6, eos_token_ids=(), max_model_len=100_000, now=0.0)


@pytest.mark.parametrize("seed", seeds(2, 3))
@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize("with_disk", [False, True])
def test_answers_do_not_depend_on_where_prefixes_were(seed: int, turns: int, with_disk: bool, tmp_path: Path) -> None:
    rng = random.Random(seed)
    engine = Engine(rng.randrange(24, 40), 16, budget=rng.choice([16, 40, 256]), max_num_seqs=12)
    disk = open_disk(engine, tmp_path, num_blocks=60) if with_disk else None
    num_slots = [3, 20, 200][seed % 3]
    cache = give_host_memory(engine, num_slots, disk=disk, turns=turns, room=rng.choice([2, 1000]))
    documents = [tokens(rng, 160) for _ in range(4)]
    wanted: dict[str, list[int]] = {}
    for number in range(60):
        prompt = rng.choice(documents)[: rng.choice([0, 15, 48, 100, 160])] + tokens(rng, rng.randrange(1, 90))
        count = rng.randrange(1, 60)
        engine.add(f"r{number}", prompt, max_tokens=count, salt=rng.choice([b"", b"x"]))
        wanted[f"r{number}"] = expected(prompt, count)
        for _ in range(rng.randrange(6)):
            engine.turn()
            engine.scheduler.open.check_integrity()
        if rng.random() < 0.1:
            name = rng.choice(sorted(wanted))
            engine.abort(name)
            del wanted[name]
    engine.run()
    assert {name: engine.tokens[name] for name in wanted} == wanted
    engine.assert_nothing_is_held()
    assert cache.offload.num_stored > 0
    assert cache.offload.num_loaded > 0 or num_slots < 200
    if disk is not None:
        disk.close()


def test_a_hash_that_always_collides_gives_no_wrong_block_in_any_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "hash_block", lambda *_: b"s" * 32)
    rng = random.Random(0)
    engine = Engine(30, 16, budget=64, max_num_seqs=8)
    give_host_memory(engine, 30, turns=1)
    for number in range(80):
        document = [1 + number % 3] * 160
        ask(engine, f"r{number}", document[: rng.choice([48, 100, 160])] + tokens(rng, 3))
    engine.assert_nothing_is_held()


def test_a_prompt_that_takes_all_blocks_at_once_waits_until_they_are_copied() -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    cache = give_host_memory(engine, 400, room=2, turns=1)  # two blocks a turn
    document = tokens(rng, 320)
    ask(engine, "first", document)
    ask(engine, "other", tokens(rng, 615))
    assert not cache.match(_request(engine, document))
    assert cache.offload.num_skipped == 0
    assert ask(engine, "again", [*document, 7]) == 320


def test_blocks_for_a_prompt_that_left_are_copied_no_further() -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    cache = give_host_memory(engine, 400, room=2, turns=1)
    ask(engine, "first", tokens(rng, 320))
    engine.add("runs", tokens(rng, 16), max_tokens=50)
    engine.turn()
    engine.add("other", tokens(rng, 500), max_tokens=4)
    engine.turn()
    engine.abort("other")
    engine.run()
    assert cache.offload.num_stored <= cache._ahead


def test_a_host_without_room_for_all_keeps_the_beginning() -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    give_host_memory(engine, 10)
    document = tokens(rng, 320)
    ask(engine, "first", document)
    ask(engine, "other", tokens(rng, 320))
    assert ask(engine, "again", [*document, 7]) > 0


def test_another_tenant_finds_nothing() -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    cache = give_host_memory(engine, 400)
    document = tokens(rng, 320)
    ask(engine, "first", document, salt=b"a")
    push_out(engine, rng)
    assert ask(engine, "other", document, salt=b"b") == 0
    assert cache.offload.num_loaded == 0
    push_out(engine, rng)
    assert ask(engine, "own", [*document, 7], salt=b"a") == 320


def test_requests_with_one_prefix_share_its_way_back() -> None:
    rng = random.Random(0)
    engine = Engine(80, 16)
    cache = give_host_memory(engine, 400, turns=3)
    document = tokens(rng, 320)
    ask(engine, "first", document)
    push_out(engine, rng)
    for number in range(5):
        engine.add(f"r{number}", [*document, number + 1], max_tokens=3)
    engine.run()
    assert [engine.cached[f"r{number}"] for number in range(5)] == [320] * 5
    assert cache.offload.num_loaded == 20


def test_running_requests_go_on_while_a_prefix_comes_back() -> None:
    rng = random.Random(0)
    engine = Engine(80, 16)
    give_host_memory(engine, 400, turns=10)
    document = tokens(rng, 320)
    ask(engine, "first", document)
    push_out(engine, rng)
    engine.add("runs", tokens(rng, 5), max_tokens=40)
    engine.run(until=lambda: "runs" in engine.tokens)
    before = len(engine.tokens["runs"])
    engine.add("waits", [*document, 7], max_tokens=3)
    engine.run(until=lambda: "waits" in engine.tokens)
    assert len(engine.tokens["runs"]) - before >= 10
    assert engine.cached["waits"] == 320
    engine.run()


def test_short_prompts_that_nobody_repeats_are_not_kept() -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    cache = give_host_memory(engine, 400, min_blocks=4)
    for number in range(40):
        ask(engine, f"short {number}", tokens(rng, 40))
    assert cache.offload.num_stored == 0
    ask(engine, "long", tokens(rng, 160))
    push_out(engine, rng)
    assert cache.offload.num_stored > 0


def test_a_block_whose_content_another_has_in_the_cache_is_not_kept_for_what_it_holds_next() -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    cache = give_host_memory(engine, 400, min_blocks=4)
    document = tokens(rng, 96)
    for name in ("one", "twin"):  # both compute it
        engine.add(name, document, max_tokens=4)
    engine.run()
    assert [block for block in range(40) if cache._is_worth_a_copy[block] and cache._by_block[block] is None] == []


def test_what_was_not_finite_is_forgotten_in_every_tier() -> None:
    rng = random.Random(0)
    engine = Engine(40, 16)
    cache = give_host_memory(engine, 400)
    document = tokens(rng, 160)
    ask(engine, "first", document)
    push_out(engine, rng)
    engine.add("bad", [*document, NAN], max_tokens=2)
    engine.run()
    assert engine.failures["bad"].code == "server_error"
    assert engine.scheduler.prefix_cache_hits == 160  # it had come back
    push_out(engine, rng)
    assert ask(engine, "again", [*document, 7]) == 0
    assert isinstance(engine.cache, OffloadingKVCache)
    engine.cache.check_integrity([])
    assert cache is engine.cache


def _wait_for_disk(engine: Engine) -> None:
    cache = engine.cache
    assert isinstance(cache, OffloadingKVCache)
    deadline = time.monotonic() + 60
    cache.settle()  # what has arrived in host memory begins its way to disk
    while cache.offload.is_writing:
        assert time.monotonic() < deadline, "the disk is never done"
        cache.settle()


def fill_disk(folder: Path, document: list[int], salt: bytes = b"") -> None:
    """An engine answers, gives the document up to host memory, which gives it up to disk; then it ends."""
    rng = random.Random(5)
    engine = Engine(40, 16)
    disk = open_disk(engine, folder)
    give_host_memory(engine, 40, disk=disk)
    ask(engine, "first", document, salt)
    for number in range(16):
        ask(engine, f"other {number}", tokens(rng, 100), salt)  # an owner gives up its own
        _wait_for_disk(engine)
    engine.assert_nothing_is_held()
    disk.close()


def reopened(folder: Path, fingerprint: bytes = FINGERPRINT) -> tuple[Engine, DiskTier]:
    engine = Engine(40, 16)
    disk = open_disk(engine, folder, fingerprint=fingerprint)
    give_host_memory(engine, 40, disk=disk, turns=1)
    return engine, disk


def test_a_prefix_on_disk_survives_a_restart(tmp_path: Path) -> None:
    document = tokens(random.Random(0), 320)
    fill_disk(tmp_path, document)
    engine, disk = reopened(tmp_path)
    assert ask(engine, "again", [*document, 7]) == 320
    assert disk.stats().read_bytes > 0
    disk.close()


def small_disk(engine: Engine, folder: Path, num_blocks: int) -> DiskTier:
    size, block_size = block_bytes(engine), engine.runner.block_size
    return DiskTier(
        folder,
        max_bytes=num_blocks * file_bytes(size, block_size),
        fingerprint=FINGERPRINT,
        block_bytes=size,
        block_size=block_size,
    )


def test_a_flush_keeps_what_was_used_last_of_every_tenant(tmp_path: Path) -> None:
    rng = random.Random(0)
    engine = Engine(200, 16)
    disk = small_disk(engine, tmp_path, num_blocks=20)
    cache = give_host_memory(engine, 400, disk=disk)
    prompts = {name: tokens(rng, 96) for name in ("a old", "b old", "a new", "b new")}
    for name, prompt in prompts.items():
        ask(engine, name, prompt, name[:1].encode())
    for salt in (b"a", b"b", b"a"):  # floods, each of its own tenant's blocks
        ask(engine, f"flood {rng.random()}", tokens(rng, 2000), salt)
    for name in ("a new", "b new"):
        assert ask(engine, f"{name} again", [*prompts[name], 7], name[:1].encode()) == 96
    assert cache.offload.stats().num_held > 50
    assert disk.num_written == 0
    cache.flush()
    engine.assert_nothing_is_held()
    assert disk.num_written == disk.stats().num_blocks == 20
    disk.close()
    engine, disk = reopened(tmp_path)
    assert ask(engine, "a", [*prompts["a new"], 7], b"a") == ask(engine, "b", [*prompts["b new"], 7], b"b") == 96
    assert ask(engine, "old", [*prompts["a old"], 7], b"a") < 96
    disk.close()


def test_what_a_flush_wrote_last_goes_first_after_a_restart(tmp_path: Path) -> None:
    rng = random.Random(0)
    engine = Engine(200, 16)
    disk = open_disk(engine, tmp_path)
    cache = give_host_memory(engine, 400, disk=disk)
    old, new = tokens(rng, 96), tokens(rng, 96)
    ask(engine, "old", old)
    ask(engine, "new", new)
    push_out(engine, rng, rounds=2)
    cache.flush()
    disk.close()
    kept = disk.num_written - 6
    disk = small_disk(engine, tmp_path, num_blocks=kept)
    assert disk.stats().num_blocks == kept
    assert not any(block_hash in disk for block_hash in _hashes(engine, old))
    assert all(block_hash in disk for block_hash in _hashes(engine, new))
    disk.close()


def test_another_tenant_and_another_model_find_nothing_on_disk(tmp_path: Path) -> None:
    document = tokens(random.Random(0), 320)
    fill_disk(tmp_path, document, salt=b"a")
    engine, disk = reopened(tmp_path)
    assert ask(engine, "other", [*document, 7], salt=b"b") == 0
    disk.close()
    engine, disk = reopened(tmp_path, fingerprint=b"1" * 32)
    assert ask(engine, "other", [*document, 7], salt=b"a") == 0
    disk.close()
    engine, disk = reopened(tmp_path)
    assert ask(engine, "own", [*document, 7], salt=b"a") == 320
    disk.close()


@pytest.mark.parametrize("damage", ["content", "header", "short", "long", "gone", "swapped"])
def test_a_damaged_file_is_a_miss_and_is_computed_again(damage: str, tmp_path: Path) -> None:
    document = tokens(random.Random(0), 320)
    fill_disk(tmp_path, document)
    engine, disk = reopened(tmp_path)
    hashes = _hashes(engine, document)
    file = next(tmp_path.rglob(f"{hashes[3].hex()}.kv"))
    content = bytearray(file.read_bytes())
    if damage == "content":
        content[-1] ^= 1
    elif damage == "header":
        content[50] ^= 1
    elif damage == "short":
        del content[-1]
    elif damage == "long":
        content.append(0)
    elif damage == "swapped":
        content = bytearray(next(tmp_path.rglob(f"{hashes[4].hex()}.kv")).read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content)
    assert ask(engine, "again", [*document, 7]) == 3 * 16
    assert disk.stats().num_damaged == 1
    assert hashes[3] not in disk
    assert ask(engine, "and again", [*document, 7]) == 320
    disk.close()


def _hashes(engine: Engine, prompt: list[int]) -> list[bytes]:
    request = _request(engine, [*prompt, 1])
    engine.cache.match(request)
    return request.block_hashes
