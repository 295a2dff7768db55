"""The allocator under random use: after every operation blocks, tables and prefix cache agree, and a hit is never a
block that holds other tokens."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from models.batch import SamplingParams
from server.engine import kv_cache
from server.engine.block_pool import BlockPool, IntegrityError
from server.engine.kv_cache import KVCache
from server.engine.messages import AddRequest
from server.engine.request import Request

BLOCK_SIZE = 4


class Model:
    """A cache in use, and beside it what every block should hold: poisoned when it is freed without content."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = KVCache(num_blocks, BLOCK_SIZE)
        self.open: list[Request] = []
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block -> (salt, all tokens up to its end)
        self.num_made = 0

    def admit(self, prompt: list[int], salt: bytes) -> bool:
        message = AddRequest(f"r{self.num_made}", prompt, SamplingParams(), cache_salt=salt)
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
    message = AddRequest("r", prompt, SamplingParams())
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
