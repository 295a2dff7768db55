"""A real model's pages through every tier: what comes back is bit for bit what went, and the answer is the same."""

import sys
from pathlib import Path

import pytest
import torch
from host_memory import never
from torch import Tensor

from models import kv_offload
from models.batch import SamplingParams
from models.fingerprint import fingerprint
from models.kv_offload import KVOffload
from models.runner import ModelRunner
from server.engine.core import EngineCore
from server.engine.disk_tier import DiskTier
from server.engine.limits import SchedulerConfig
from server.engine.messages import AddRequest, FromEngine, Shutdown, ToEngine, TokenDelta
from server.engine.offload import Offload
from server.engine.offloading_cache import OffloadingKVCache
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Scheduler
from server.engine.token_ids import TokenIds

sys.path.append(str(Path(__file__).parents[2] / "models"))  # tiny models are made as their own tests make them
from tiny_models import as_loaded, random_model, tiny_config

NUM_BLOCKS, BLOCK_SIZE, LENGTH = 24, 16, 256
DOCUMENT = [3 + (7 * i * i + i) % 110 for i in range(160)]


class Link:
    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float) -> list[ToEngine]:
        received, self.inbox = self.inbox, []
        return received

    def send(self, messages: list[FromEngine]) -> None:
        self.sent += messages


class Engine:
    """A tiny model, host memory for its blocks, and a directory if asked for."""

    def __init__(self, num_slots: int, folder: Path | None = None) -> None:
        model = as_loaded(random_model(tiny_config()))
        self.runner = ModelRunner(
            model, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=LENGTH,
            num_blocks=NUM_BLOCKS,
        )  # fmt: skip
        self.pages: list[Tensor] = [array for layer in self.runner._kv_caches for array in (layer.k, layer.v)]
        self.memory = KVOffload(self.runner._kv_caches, num_slots * sum(array[0].nbytes for array in self.pages))
        self.disk = None
        if folder is not None:
            identity = fingerprint(model.model, self.runner._kv_caches, max_model_len=LENGTH)
            self.disk = DiskTier(
                folder, max_bytes=1 << 24, fingerprint=identity, block_bytes=self.memory.block_bytes,
                block_size=BLOCK_SIZE,
            )  # fmt: skip
        offload = Offload(self.memory, self.disk, min_blocks=2, compute_seconds=never)
        self.cache = OffloadingKVCache(NUM_BLOCKS, BLOCK_SIZE, offload)
        limits = SchedulerConfig(4, 64, LENGTH, model.vocab_size, model.eos_token_ids)
        self.link = Link()
        loaded = LoadedRunner(self.runner, "tiny", "cpu", "float32", LENGTH, 64, model.vocab_size, model.eos_token_ids)
        self.scheduler = Scheduler(limits, self.cache)
        self.core = EngineCore(loaded, self.scheduler, self.link)

    def ask(self, prompt: list[int], count: int = 12) -> tuple[list[int], int]:
        """Its greedy answer, and how many tokens of the prompt were cached."""
        self.link.sent.clear()
        sampling = SamplingParams(count, temperature=0.0, ignore_eos=True)
        self.link.inbox.append(AddRequest("r", TokenIds(prompt), sampling))
        self.core.turn()
        while self.core.has_work:
            self.core.turn()
        self.scheduler.open.check_integrity()
        deltas = [message for message in self.link.sent if isinstance(message, TokenDelta)]
        return [token for delta in deltas for token in delta.token_ids], deltas[0].num_cached_tokens

    def push_out(self, rounds: int = 8) -> None:
        """Few blocks at a time, so that a disk keeps up."""
        for number in range(rounds):
            self.ask([3 + (number * 31 + i) % 113 for i in range(80)], 1)
            self.cache.settle()
            while self.cache.offload.is_writing:
                self.cache.settle()

    def content(self, prompt: list[int]) -> list[list[Tensor]]:
        """Pages of the prompt's blocks that are on the device."""
        from server.engine.request import Request

        message = AddRequest("probe", TokenIds(prompt), SamplingParams())
        request = Request(message, sequence_number=10**6, eos_token_ids=(), max_model_len=LENGTH, now=0.0)
        return [[array[entry.block].clone() for array in self.pages] for entry in self.cache.match(request)]


def same(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    pairs = [pair for blocks in zip(first, second, strict=True) for pair in zip(*blocks, strict=True)]
    return bool(pairs) and all(torch.equal(x, y) for x, y in pairs)


@pytest.fixture
def afresh() -> list[int]:
    """The answer to a prompt on the document that nothing was cached of."""
    return Engine(1).ask([*DOCUMENT, 5])[0]


def test_a_prefix_comes_back_from_host_memory_bit_for_bit(afresh: list[int]) -> None:
    engine = Engine(100)
    engine.ask(DOCUMENT)
    before = engine.content([*DOCUMENT, 5])
    assert len(before) == 10
    engine.push_out()
    assert not engine.content([*DOCUMENT, 5])
    assert engine.ask([*DOCUMENT, 5]) == (afresh, 160)
    assert same(engine.content([*DOCUMENT, 5]), before)


def test_a_prefix_comes_back_from_disk_bit_for_bit_after_a_restart(afresh: list[int], tmp_path: Path) -> None:
    engine = Engine(24, tmp_path)
    engine.ask(DOCUMENT)
    before = engine.content([*DOCUMENT, 5])
    engine.push_out(20)
    assert engine.disk is not None
    engine.disk.close()
    engine = Engine(24, tmp_path)
    assert engine.disk is not None
    assert engine.ask([*DOCUMENT, 5]) == (afresh, 160)
    assert same(engine.content([*DOCUMENT, 5]), before)
    assert engine.disk.stats().read_bytes > 0
    engine.disk.close()


def test_damaged_files_are_computed_again(afresh: list[int], tmp_path: Path) -> None:
    engine = Engine(24, tmp_path)
    engine.ask(DOCUMENT)
    engine.push_out(20)
    assert engine.disk is not None
    engine.disk.close()
    for path in tmp_path.rglob("*.kv"):
        damaged = bytearray(path.read_bytes())
        damaged[-100] ^= 4
        path.write_bytes(damaged)
    engine = Engine(24, tmp_path)
    assert engine.ask([*DOCUMENT, 5]) == (afresh, 0)
    assert engine.disk is not None
    assert engine.disk.stats().num_damaged >= 1
    engine.disk.close()


@pytest.mark.parametrize(("num_slots", "rounds"), [(400, 8), (400, 0), (12, 0)], ids=["host", "device", "few slots"])
def test_what_was_not_on_disk_is_found_after_a_shutdown(
    num_slots: int, rounds: int, afresh: list[int], tmp_path: Path
) -> None:
    engine = Engine(num_slots, tmp_path)
    engine.ask(DOCUMENT)
    before = engine.content([*DOCUMENT, 5])
    engine.push_out(rounds)
    assert engine.disk is not None
    assert engine.disk.stats().num_blocks == 0
    engine.link.inbox.append(Shutdown())
    engine.core.run()
    engine.cache.check_integrity([])
    engine.disk.close()
    engine = Engine(24, tmp_path)
    assert engine.ask([*DOCUMENT, 5]) == (afresh, 160)
    assert same(engine.content([*DOCUMENT, 5]), before)
    assert engine.disk is not None
    engine.disk.close()


def no_memory(_blocks: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_what_finds_no_memory_to_be_stored_is_computed_again(
    afresh: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(100)
    engine.ask(DOCUMENT)
    with monkeypatch.context() as patched:
        patched.setattr(kv_offload, "_ids", no_memory)
        engine.push_out()
    stats = engine.cache.offload_stats()
    assert stats.failed_blocks >= 10
    assert stats.num_held == stats.stored_blocks == 0
    assert engine.ask([*DOCUMENT, 5]) == (afresh, 0)
    engine.push_out()
    assert engine.ask([*DOCUMENT, 5]) == (afresh, 160)  # there is memory again


def test_what_finds_no_memory_to_be_loaded_is_computed_again(
    afresh: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(100)
    engine.ask(DOCUMENT)
    engine.push_out()
    with monkeypatch.context() as patched:
        patched.setattr(kv_offload, "_ids", no_memory)
        assert engine.ask([*DOCUMENT, 5]) == (afresh, 0)
    stats = engine.cache.offload_stats()
    assert stats.failed_blocks >= 10
    assert stats.loaded_blocks == 0
    engine.push_out()
    assert engine.ask([*DOCUMENT, 5]) == (afresh, 160)
