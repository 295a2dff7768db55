"""What prefixes in host memory and on disk are worth: GB/s of blocks both ways, decode steps beside them, and the time
to the first token after a long prefix that is computed, on the device, in host memory or on disk. Random weights.

    python -m benchmarks.kv_offload --out benchmarks/results/kv_offload_h200.json        # 8B, 100k tokens, on a GPU
    python -m benchmarks.kv_offload --device cpu --small --prefix 8192 --copies 64       # to try it
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, model_folder
from benchmarks.list_link import ListLink
from models import loader, registry
from models.attention_sites import find_attention_sites
from models.batch import SamplingParams, ScheduledSeq, StepBatch
from models.kv_offload import KVOffload
from models.kv_pool import bytes_per_block
from models.runner import ModelRunner
from models.transfers import Transfers
from server.engine.core import STALLED_INTERVAL, EngineCore
from server.engine.disk_tier import DiskTier
from server.engine.limits import SchedulerConfig
from server.engine.messages import AddRequest, TokenDelta
from server.engine.offload import Offload
from server.engine.offloading_cache import OffloadingKVCache
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Scheduler
from server.engine.token_ids import TokenIds

BLOCK_SIZE = 64
STEP_TOKENS = 8192
DECODES = 16  # sequences of the step that runs beside copies
SPARE = 2  # blocks beside the prefix: the dummy page and the question's, so that no two prompts fit together
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 32,
         "vocab_size": 1024}  # fmt: skip
ONE_TOKEN = SamplingParams(1, temperature=0.0, ignore_eos=True)


class WaitingLink(ListLink):
    """Leaves the interpreter to other threads while it waits, as sockets do."""

    def receive(self, timeout: float) -> list[Any]:
        if not self.inbox:
            time.sleep(timeout)
        return super().receive(timeout)


class Engine:
    """An engine in this process over a runner that goes on living; its prefix cache begins empty."""

    def __init__(self, runner: ModelRunner, memory: KVOffload, length: int, vocab_size: int, disk: DiskTier | None):
        self.offload = Offload(memory, disk, min_blocks=4, ready=0.0)
        self.cache = OffloadingKVCache(runner.num_blocks, BLOCK_SIZE, self.offload)
        self.disk = disk
        self.link = WaitingLink()
        limits = SchedulerConfig(DECODES, STEP_TOKENS, length, vocab_size, ())
        loaded = LoadedRunner(
            runner, "bench", "", "", length, STEP_TOKENS, vocab_size, (), overlaps=runner.device.type == "cuda"
        )
        self.core = EngineCore(loaded, Scheduler(limits, self.cache), self.link)

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to a prompt's first token, and how many of its own were cached."""
        self.link.sent.clear()
        begin = time.perf_counter()
        self.link.inbox.append(AddRequest(f"bench-{begin}", TokenIds(prompt), ONE_TOKEN))
        while not (deltas := [message for message in self.link.sent if isinstance(message, TokenDelta)]):
            self.core.turn()
        seconds = time.perf_counter() - begin
        while self.core.has_work:
            self.core.turn()
        return seconds, deltas[0].num_cached_tokens

    def write_all(self) -> float:
        """Seconds until all that is in host memory is on disk, too."""
        begin = time.perf_counter()
        self.offload.ready_slots = self.offload.num_slots
        self.cache.settle()
        while self.offload.is_writing:
            time.sleep(STALLED_INTERVAL)
            self.cache.settle()
        return time.perf_counter() - begin


def store_all(memory: KVOffload, pairs: list[tuple[int, int]]) -> None:
    done, queued = 0, 0
    while done < len(pairs):
        count = min(memory.store_room(), len(pairs) - queued)
        if count:
            memory.queue(Transfers(stores=pairs[queued : queued + count]))
            queued += count
        done += len(memory.finished().stored_slots)


def load_all(memory: KVOffload, pairs: list[tuple[int, int]], turn: Callable[[], object] = bool) -> None:
    memory.queue(Transfers(loads=pairs))
    done = 0
    while done < len(pairs):
        turn()
        done += len(memory.finished().loaded_blocks)


def copies(memory: KVOffload, count: int) -> dict[str, float]:
    """GB/s (10^9) of `count` blocks, the best of three."""
    stores = [(1 + i, i) for i in range(count)]
    loads = [(i, 1 + i) for i in range(count)]
    best = {}
    for name, run in (("store", lambda: store_all(memory, stores)), ("load", lambda: load_all(memory, loads))):
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        best[f"{name}_gb_per_s"] = round(count * memory.block_bytes / min(seconds) / 1e9, 2)
    return best


def steps_beside_loads(runner: ModelRunner, memory: KVOffload, count: int) -> dict[str, float]:
    """Milliseconds of a decode step (the median) alone, and while blocks come in."""
    first = runner.num_blocks - DECODES
    batch = StepBatch(tuple(ScheduledSeq(slot, [5], 10, [first + slot], True) for slot in range(DECODES)))
    for slot in range(DECODES):
        runner.add_request(slot, SamplingParams(temperature=0.0, ignore_eos=True), [5])
    times: list[float] = []

    def step() -> None:
        begin = time.perf_counter()
        runner.execute(batch)
        times.append(1e3 * (time.perf_counter() - begin))

    for _ in range(20):
        step()
    alone = sorted(times[5:])[7]
    times.clear()
    load_all(memory, [(i, 1 + i) for i in range(count)], step)
    beside = sorted(times)[len(times) // 2]
    for slot in range(DECODES):
        runner.remove_request(slot)
    return {"step_alone_ms": round(alone, 3), "step_beside_loads_ms": round(beside, 3), "steps_beside": len(times)}


def first_tokens(
    runner: ModelRunner, memory: KVOffload, folder: Path, prefix: int, vocab_size: int, *, cold: bool
) -> dict[str, dict[str, float]]:
    """Seconds to the first token after `prefix` tokens and one block more. Another prompt pushes the first one out."""
    length = prefix + 4 * BLOCK_SIZE
    generator = torch.Generator().manual_seed(0)
    document, other = (torch.randint(3, vocab_size, (prefix,), generator=generator).tolist() for _ in range(2))
    question = torch.randint(3, vocab_size, (BLOCK_SIZE,), generator=generator).tolist()
    rows: dict[str, dict[str, float]] = {}

    def open_engine() -> Engine:
        disk = DiskTier(
            folder, max_bytes=2 * memory.num_slots * memory.block_bytes, fingerprint=bytes(32),
            block_bytes=memory.block_bytes, block_size=BLOCK_SIZE,
        )  # fmt: skip
        return Engine(runner, memory, length, vocab_size, disk)

    def ask(engine: Engine, name: str, prompt: list[int]) -> None:
        seconds, cached = engine.first_token(prompt)
        rows[name] = {"seconds": round(seconds, 4), "cached_tokens": cached}
        print(f"{name:40}{seconds:10.3f} s   {cached} tokens cached", flush=True)  # noqa: T201

    engine = open_engine()
    ask(engine, "computed", [*document, *question])
    ask(engine, "on the device", [*document, *question[::-1]])
    ask(engine, "another prompt (pushes it out)", other)
    ask(engine, "in host memory", [*document, *question[::-1]])  # which pushes the other one out
    assert engine.disk is not None
    seconds = engine.write_all()
    rows["writing to disk"] = {"seconds": round(seconds, 3), "bytes": engine.disk.stats().written_bytes}
    engine.disk.close()
    if cold:
        forget_pages(folder)
    engine = open_engine()  # as after a restart: nothing in memory
    ask(engine, "on disk" if cold else "on disk, in the page cache", [*other, *question])
    assert engine.disk is not None
    engine.disk.close()
    return rows


def forget_pages(folder: Path) -> None:
    """The kernel drops what it keeps of the files."""
    os.sync()
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    source = registry.resolve(str(model_folder.write(folder / "model", **(SMALL if options.small else {}))))
    loaded = loader.load(source, device=options.device, load_format="dummy")
    prefix_blocks = -(-options.prefix // BLOCK_SIZE)
    num_blocks = prefix_blocks + SPARE
    host_bytes = 2 * num_blocks * bytes_per_block(find_attention_sites(loaded.model), BLOCK_SIZE, loaded.dtype)
    begin = time.perf_counter()
    runner = ModelRunner(
        loaded, block_size=BLOCK_SIZE, max_num_seqs=DECODES, max_num_batched_tokens=STEP_TOKENS,
        max_model_len=options.prefix + 4 * BLOCK_SIZE, num_blocks=num_blocks, kv_offload_bytes=host_bytes,
    )  # fmt: skip
    made = time.perf_counter() - begin
    runner.warm_up()
    memory = runner.host_memory
    assert memory is not None
    result: dict[str, Any] = {
        "block_bytes": memory.block_bytes,
        "host_gib": round(memory.num_slots * memory.block_bytes / 2**30, 2),
        "seconds_to_make_the_runner": round(made, 2),  # pinning included
    }
    count = min(options.copies, prefix_blocks)
    result["copies"] = copies(memory, count) | steps_beside_loads(runner, memory, count)
    print(result, flush=True)  # noqa: T201
    disk = options.disk or folder / "disk"
    result["first_token"] = first_tokens(runner, memory, disk, options.prefix, loaded.vocab_size, cold=options.cold)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small shape instead of Llama-3.1-8B's")
    parser.add_argument("--prefix", type=int, default=100_032, help="tokens, a multiple of 64")
    parser.add_argument("--copies", type=int, default=512, help="blocks that are copied to measure GB/s")
    parser.add_argument("--disk", type=Path, help="directory on the disk to measure; default: a temporary one")
    parser.add_argument("--cold", action="store_true", help="read from the disk itself, not from the page cache")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--commit", help="recorded where there is no git")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    arguments = {name: str(value) for name, value in vars(options).items() if name not in ("out", "commit")}
    text = json.dumps({"machine": machine.facts(options.commit), "arguments": arguments, **result}, indent=1)
    print(text)  # noqa: T201
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
