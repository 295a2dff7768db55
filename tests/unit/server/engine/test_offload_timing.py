"""Whenever copies to host memory and disk and back are done, and whatever fails meanwhile: every block, slot and file
holds what it is found under, and no answer is wrong."""

import random
from array import array
from math import inf
from pathlib import Path

import cranked_engine
import numpy as np
import pytest
from cranked_engine import Engine, tokens
from fake_runner import NAN, QUOTES, expected
from hostile_timing import HostileDisk, HostileMemory
from seeds import seeds
from test_lagging_device import FAILURES, LaggingRunner

from server.engine import executor
from server.engine.block_files import file_bytes
from server.engine.drafting import DraftLimits
from server.engine.offload import Offload
from server.engine.offloading_cache import OffloadingKVCache
from server.engine.prefixes import Prefix

NUM_REQUESTS = 60
BLOCK_SIZE = 16


class HostileEngine:
    """An engine with a lagging device, host memory and perhaps a disk, of sizes drawn by a seed."""

    def __init__(self, seed: int, folder: Path | None, *, overlaps: bool, failing: str | None = None) -> None:
        rng = self.rng = random.Random(seed)
        self.engine = Engine(
            rng.randrange(28, 44), BLOCK_SIZE, budget=rng.choice([16, 40, 256]), max_num_seqs=12, overlaps=overlaps
        )
        runner = self.engine.runner
        assert isinstance(runner, LaggingRunner)
        self.runner = runner
        runner.rng = random.Random(seed)
        if failing is not None:
            runner.failing = FAILURES[failing]
        self.memory = HostileMemory(runner, [24, 40, 12][seed % 3], rng)
        self.disk = None if folder is None else HostileDisk(self.engine, folder, [300, 60][seed % 2], rng)
        self.folder = folder
        self.damaged: set[Path] = set()
        self.offload = Offload(
            self.memory, self.disk, min_blocks=1, ready=rng.choice([0.25, 0.5]),
            compute_seconds=lambda _context, _count: rng.choice([0.0, inf, inf, inf]),
        )  # fmt: skip
        self.cache = OffloadingKVCache(runner.num_blocks, BLOCK_SIZE, self.offload)
        self.engine.use_cache(self.cache)

    def turn(self) -> None:
        self.engine.turn()
        self.check()

    def check(self) -> None:
        """What can be found is there."""
        self.engine.scheduler.open.check_integrity()
        for block, entry in enumerate(self.cache._by_block):
            assert entry is None or (self.runner.memory[block] == _tokens(entry)).all(), "a block is not what it says"
        for slot, held in self.offload.slots._by_slot.items():
            if not held.is_arriving:
                content = np.frombuffer(self.memory.slot_bytes(slot - 1), np.int64)
                assert (content == _tokens(held.prefix)).all(), "a host slot is not what it says"

    def damage_a_file(self) -> None:
        if self.folder is None:
            return
        paths = sorted(self.folder.rglob("*.kv"))
        if paths:
            path = self.rng.choice(paths)
            self.damaged.add(path)
            content = bytearray(path.read_bytes())
            content[self.rng.randrange(len(content))] ^= 1
            path.write_bytes(content)

    @property
    def _is_reading(self) -> bool:
        return self.offload.reads is not None and bool(self.offload.reads.arriving)

    def finish(self) -> None:
        """Until nothing is on its way."""
        while self.engine.core.has_work or self.memory.is_busy or self.offload.is_writing or self._is_reading:
            self.turn()
            self.cache.settle()
        self.engine.assert_nothing_is_held()
        if self.disk is not None:
            self.disk.close()
        self.check_files()

    def check_files(self) -> None:
        """Those that nobody has damaged."""
        begin = file_bytes(0, BLOCK_SIZE)
        for path in [] if self.folder is None else sorted(self.folder.rglob("*.kv")):
            if path not in self.damaged:
                file = path.read_bytes()
                named = np.frombuffer(file[begin - 4 * BLOCK_SIZE : begin], np.uint32)
                assert (np.frombuffer(file[begin:], np.int64) == named).all(), "a file is not what it says"


def _tokens(prefix: Prefix) -> np.ndarray:
    return np.asarray(array("I", prefix.token_bytes))


@pytest.fixture(autouse=True)
def _lags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cranked_engine, "FakeRunner", LaggingRunner)
    monkeypatch.setattr(executor, "MAX_FAILED_STEPS", 1000)


@pytest.mark.parametrize("seed", seeds(3, 5))
@pytest.mark.parametrize(("overlaps", "failing"), [(False, None), (True, None), (True, "all")])
def test_whenever_copies_are_done_no_answer_is_wrong(
    seed: int, overlaps: bool, failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_drafts = seed % 2 == 1
    if with_drafts:
        monkeypatch.setattr(Engine, "drafts", DraftLimits(step_cost=0.0, row_cost=0.0, max_rows=64))
    hostile = HostileEngine(seed, tmp_path if seed % 5 < 4 else None, overlaps=overlaps, failing=failing)
    rng, engine = hostile.rng, hostile.engine
    documents = [[QUOTES, *tokens(rng, 319)] if with_drafts else tokens(rng, 320) for _ in range(3)]
    wanted: dict[str, list[int]] = {}
    for number in range(NUM_REQUESTS):
        prompt = rng.choice(documents)[: rng.choice([0, 48, 100, 160, 240, 320])] + tokens(rng, rng.randrange(1, 50))
        count = rng.randrange(1, 40)
        if rng.random() < 0.02:
            prompt.append(NAN)
        wanted[f"r{number}"] = expected(prompt, count)
        engine.add(f"r{number}", prompt, max_tokens=count, salt=rng.choice([b"", b"", b"", b"x"]))
        for _ in range(rng.randrange(12)):
            hostile.turn()
        if rng.random() < 0.1:
            engine.abort(*rng.sample(sorted(wanted), k=min(3, len(wanted))))
        if rng.random() < 0.05:
            hostile.damage_a_file()
    hostile.finish()
    cut_short = {name for name, reason in engine.reasons.items() if reason == "abort"} | engine.failures.keys()
    for name, answer in wanted.items():
        got = engine.tokens.get(name, [])
        assert got == (answer[: len(got)] if name in cut_short else answer)
    assert hostile.offload.num_stored > 0
