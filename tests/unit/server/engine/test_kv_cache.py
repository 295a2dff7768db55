"""The allocator under random use: after every operation blocks, tables and prefix cache agree, and a hit is never a
block that holds other tokens."""

import hashlib
import random
import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from models.batch import SamplingParams
from server.engine import kv_cache, prefixes
from server.engine.block_pool import BlockPool, IntegrityError
from server.engine.kv_cache import KVCache
from server.engine.link import decode_to_engine, encode
from server.engine.messages import AddRequest
from server.engine.prefixes import root_hash
from server.engine.request import Request
from server.engine.token_ids import TokenIds

BLOCK_SIZE = 4


class Model:
    """A cache in use, and beside it what every block should hold: poisoned when it is freed without content."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = KVCache(num_blocks, BLOCK_SIZE)
        self.open: list[Request] = []
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block -> (salt, all tokens up to its end)
        self.num_made = 0

    def admit(self, prompt: list[int], salt: bytes) -> bool:
        message = AddRequest(f"r{self.num_made}", TokenIds(prompt), SamplingParams(), cache_salt=salt)
        request = Request(message, sequence_number=self.num_made, eos_token_ids=(), max_model_len=10_000, now=0.0)
        self.num_made += 1
        hits = self.cache.match(request)
        wanted = self.cache.blocks_for(len(prompt)) + 1
        if self.cache.blocks_to_admit(wanted, hits) > self.cache.num_free_blocks:
            return False
        self.cache.allocate(request, wanted, hits)
        for index, entry in enumerate(hits):
            assert self.content[entry.block] == (salt, tuple(prompt[: (index + 1) * BLOCK_SIZE]))
        assert request.num_computed == len(hits) * BLOCK_SIZE < len(prompt)
        assert len(request.block_ids) == wanted
        shared = {entry.block for entry in hits}
        others = {block for other in self.open for block in other.block_ids}
        assert not others & (set(request.block_ids) - shared)
        self.open.append(request)
        return True

    def compute(self, request: Request, count: int) -> None:
        """Runs up to `count` tokens of the prompt, then generates."""
        while count > 0:
            if request.num_remaining == 0:
                request.token_ids.append(request.num_computed % 2 + 1)
            if request.num_computed == len(request.block_ids) * BLOCK_SIZE and not self.cache.grow(request):
                return
            request.num_computed += 1
            request.num_filled += 1
            count -= 1
            if request.num_computed % BLOCK_SIZE == 0:
                index = request.num_computed // BLOCK_SIZE - 1
                tokens = tuple(request.token_ids[: request.num_computed])
                self.content[request.block_ids[index]] = (request.cache_salt, tokens)
                self.cache.register(request)

    def end(self, request: Request, *, withdraw: bool = False) -> None:
        if withdraw:
            self.cache.withdraw(request)
            assert not any(self.cache._by_block[block] for block in request.block_ids)
        self.cache.release(request)
        self.open.remove(request)

    def check(self) -> None:
        self.cache.check_integrity(self.open)


class Machine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 24))
    def start(self, num_blocks: int) -> None:
        self.model = Model(num_blocks)

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=30), salt=st.sampled_from([b"", b"x"]))
    def admit(self, prompt: list[int], salt: bytes) -> None:
        self.model.admit(prompt, salt)

    @precondition(lambda self: self.model.open)
    @rule(data=st.data(), count=st.integers(1, 20))
    def compute(self, data: st.DataObject, count: int) -> None:
        self.model.compute(data.draw(st.sampled_from(self.model.open)), count)

    @precondition(lambda self: self.model.open)
    @rule(data=st.data(), withdraw=st.booleans())
    def end(self, data: st.DataObject, withdraw: bool) -> None:
        self.model.end(data.draw(st.sampled_from(self.model.open)), withdraw=withdraw)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            while self.model.open:
                self.model.end(self.model.open[0])
            self.model.check()
            assert self.model.cache.num_free_blocks == self.model.cache.pool.num_usable


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def play(rng: random.Random, rounds: int) -> int:
    """Random use with a vocabulary of two, so that prefixes meet often. Returns the number of hits seen."""
    model = Model(40)
    hits = 0
    for _ in range(rounds):
        action = rng.random()
        if action < 0.35 or not model.open:
            prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 25))]
            if model.admit(prompt, rng.choice([b"", b"x"])):
                hits += model.open[-1].num_computed > 0
        elif action < 0.65:
            model.compute(rng.choice(model.open), rng.randrange(1, 12))
        else:
            model.end(rng.choice(model.open), withdraw=rng.random() < 0.1)
        model.check()
    return hits


def test_twenty_thousand_random_rounds_keep_every_invariant() -> None:
    assert play(random.Random(0), 20_000) > 500


@pytest.mark.slow
def test_a_hundred_thousand_random_rounds_keep_every_invariant() -> None:
    assert play(random.Random(1), 100_000) > 2500


def test_a_hash_that_always_collides_never_gives_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "hash_block", lambda *_: b"same")
    play(random.Random(2), 5000)


def request(prompt: list[int], number: int = 0) -> Request:
    message = AddRequest("r", TokenIds(prompt), SamplingParams())
    return Request(message, sequence_number=number, eos_token_ids=(), max_model_len=10_000, now=0.0)


def fill(cache: KVCache, prompt: list[int]) -> Request:
    made = request(prompt)
    cache.allocate(made, cache.blocks_for(len(prompt)), cache.match(made))
    made.num_computed = made.num_filled = len(prompt)
    cache.register(made)
    return made


def test_the_block_used_longest_ago_goes_first_and_a_prefix_outlives_its_continuation() -> None:
    cache = KVCache(9, BLOCK_SIZE)
    old, new = [1] * 16, [2] * 16
    for prompt in (old, new):
        cache.release(fill(cache, prompt))
    assert len(cache.match(request([*old, 9]))) == len(cache.match(request([*new, 9]))) == 4
    cache.release(fill(cache, [*old, 9]))  # used again, and its fifth block takes the last of `new`
    assert len(cache.match(request([*old, 9]))) == 4
    assert len(cache.match(request([*new, 9]))) == 3


def test_hashes_are_those_that_blocks_on_disk_are_named_by_whoever_made_the_tokens() -> None:
    cache = KVCache(20, BLOCK_SIZE)
    tokens = [7, 2**31 - 1, 0, 300, *range(70_000, 70_008)]
    grown, whole = request(tokens[:5]), request([*tokens, 1])
    cache.match(grown)
    cache.allocate(grown, 4)
    grown.append(tokens[5:])
    grown.num_computed = grown.num_filled = len(tokens)
    cache.register(grown)
    wanted, parent = [], root_hash(b"")
    for start in range(0, len(tokens), BLOCK_SIZE):
        parent = hashlib.sha256(parent + struct.pack(f"={BLOCK_SIZE}i", *tokens[start : start + BLOCK_SIZE])).digest()
        wanted.append(parent)
    assert [entry.hash for entry in cache.match(whole)] == grown.block_hashes == whole.block_hashes == wanted


def test_what_is_known_is_found_without_hashing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def hash_block(parent: bytes, token_bytes: bytes) -> bytes:
        hashed.append(token_bytes)
        return prefixes.hash_block(parent, token_bytes)

    monkeypatch.setattr(kv_cache, "hash_block", hash_block)
    cache = KVCache(60, BLOCK_SIZE)
    document = [1] * 40
    opened = [fill(cache, [*document, *own, 9]) for own in ([2] * 8, [3] * 8)]
    hashed.clear()
    for own in ([2] * 8, [3] * 8, [2] * 8):
        again = request([*document, *own, *[4] * 4, 9])
        hits = cache.match(again)
        assert [entry.block for entry in hits] == opened[own[0] - 2].block_ids[:12]
        where_texts_part, unknown = struct.pack("=4I", *own[:4]), struct.pack("=4I", *[4] * 4)
        assert hashed in ([unknown], [where_texts_part, unknown])
        assert again.block_hashes[:12] == opened[own[0] - 2].block_hashes[:12]
        hashed.clear()
    cache.check_integrity(opened)


def test_a_long_prompt_takes_few_bytes_a_token() -> None:
    frame = encode(AddRequest("r", TokenIds(range(50_000, 150_000)), SamplingParams()))
    cache = KVCache(20, 64)
    tracemalloc.start()
    try:
        message = decode_to_engine(frame)
        assert isinstance(message, AddRequest)
        waiting = Request(message, sequence_number=0, eos_token_ids=(), max_model_len=10**6, now=0.0)
        del message
        cache.match(waiting)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(waiting.block_hashes) == 99_999 // 64
    assert held < 6 * 100_000


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(5)
    taken = [pool.take() for _ in range(5)]
    assert sorted(entry[0] for entry in taken if entry) == [1, 2, 3, 4]
    assert taken[-1] is None


def test_nothing_is_in_the_cache_before_its_step_has_run() -> None:
    cache = KVCache(20, BLOCK_SIZE)
    first = request([1] * 16)
    cache.allocate(first, 4, cache.match(first))
    assert not cache.match(request([1] * 16))
    first.num_computed = first.num_filled = 16
    cache.register(first)
    assert len(cache.match(request([1] * 16))) == 3


def test_without_prefix_caching_nothing_is_found_and_nothing_is_kept() -> None:
    cache = KVCache(20, BLOCK_SIZE, enable_prefix_caching=False)
    cache.release(fill(cache, [1] * 16))
    assert not cache.match(request([1] * 17))
    cache.check_integrity([])


@pytest.mark.parametrize(
    "damage",
    [
        lambda _, held: held.block_ids.append(held.block_ids[0]),
        lambda _, held: held.block_ids.append(0),
        lambda _, held: held.block_ids.pop(),
        lambda cache, held: cache.pool._blank.append(held.block_ids[0]),
        lambda cache, _: cache.pool._blank.pop(),
        lambda cache, _: cache._by_hash.clear(),
        lambda cache, held: cache._next.__setitem__(0, cache._by_block[held.block_ids[1]]),
        lambda cache, held: cache.pool.references.__setitem__(held.block_ids[0], 2),
    ],
)
def test_the_integrity_check_sees_damage(damage: object) -> None:
    cache = KVCache(20, BLOCK_SIZE)
    held = fill(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.check_integrity([held])
    assert callable(damage)
    damage(cache, held)
    with pytest.raises(IntegrityError):
        cache.check_integrity([held])


def test_a_block_freed_twice_is_an_error() -> None:
    pool = BlockPool(3)
    taken = pool.take()
    assert taken is not None
    pool.drop(taken[0], None)
    with pytest.raises(IntegrityError):
        pool.drop(taken[0], None)
