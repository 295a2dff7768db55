"""What prefixes in host memory and on disk are worth: GB/s of blocks both ways, decode steps beside them, and the time
to the first token after a long prefix that is computed, on the device, in host memory or on disk: there once read
whatever it takes, and once as the engine chooses, with what it predicted. Random weights.

    python -m benchmarks.kv_offload --out benchmarks/results/kv_offload_h200.json        # 8B, 100k tokens, on a GPU
    python -m benchmarks.kv_offload --device cpu --small --prefix 8192 --copies 64       # to try it
"""

import argparse
import json
import os
import tempfile
import time
from math import inf
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, model_folder
from benchmarks.arguments import write_out
from benchmarks.kv_copies import DECODES, copies, steps_beside_loads
from benchmarks.list_link import ListLink
from models import loader, registry
from models.attention_sites import find_attention_sites
from models.batch import SamplingParams
from models.kv_pool import bytes_per_block
from models.runner import ModelRunner
from server.engine import rehearsal
from server.engine.core import STALLED_INTERVAL, EngineCore
from server.engine.disk_reads import ComputeSeconds
from server.engine.disk_tier import DiskTier
from server.engine.limits import SchedulerConfig
from server.engine.messages import AddRequest, TokenDelta
from server.engine.offload import Offload
from server.engine.offloading_cache import OffloadingKVCache
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Scheduler
from server.engine.step_learning import FIRST_STEPS, LearningStepTime
from server.engine.step_time import StepTimeModel
from server.engine.token_ids import TokenIds

BLOCK_SIZE = 64
STEP_TOKENS = 8192
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

    def __init__(
        self, loaded: LoadedRunner, disk: DiskTier, step_time: StepTimeModel, compute_seconds: ComputeSeconds
    ) -> None:
        """`compute_seconds`: what reading files is measured against."""
        assert loaded.host_memory is not None
        self.offload = Offload(loaded.host_memory, disk, min_blocks=4, compute_seconds=compute_seconds, ready=0.0)
        self.cache = OffloadingKVCache(loaded.runner.num_blocks, BLOCK_SIZE, self.offload)
        self.disk = disk
        self.link = WaitingLink()
        limits = SchedulerConfig(DECODES, STEP_TOKENS, loaded.max_model_len, loaded.vocab_size, ())
        self.core = EngineCore(loaded, Scheduler(limits, self.cache, step_time=step_time), self.link)

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


def measured_steps(loaded: LoadedRunner) -> StepTimeModel:
    """As an engine has it at its start."""
    if not loaded.overlaps:
        return LearningStepTime(rehearsal.measure(loaded, FIRST_STEPS, max_rows=STEP_TOKENS))
    samples = rehearsal.rehearse(
        loaded, max_num_batched_tokens=STEP_TOKENS, max_num_seqs=DECODES, max_model_len=loaded.max_model_len
    )
    return StepTimeModel.fit(samples)


def always_longer(_context: int, _count: int) -> float:
    """Seconds of computing, so that files are read however slow they are."""
    return inf


def first_tokens(loaded: LoadedRunner, folder: Path, prefix: int, *, cold: bool) -> dict[str, dict[str, Any]]:
    """Seconds to the first token after `prefix` tokens and one block more. Another prompt pushes the first one out."""
    generator = torch.Generator().manual_seed(0)
    document, other = (torch.randint(3, loaded.vocab_size, (prefix,), generator=generator).tolist() for _ in range(2))
    question = torch.randint(3, loaded.vocab_size, (BLOCK_SIZE,), generator=generator).tolist()
    rows: dict[str, dict[str, Any]] = {}
    memory, step_time = loaded.host_memory, measured_steps(loaded)
    assert memory is not None

    def open_engine(compute_seconds: ComputeSeconds) -> Engine:
        disk = DiskTier(
            folder, max_bytes=2 * memory.num_slots * memory.block_bytes, fingerprint=bytes(32),
            block_bytes=memory.block_bytes, block_size=BLOCK_SIZE,
        )  # fmt: skip
        return Engine(loaded, disk, step_time, compute_seconds)

    def ask(engine: Engine, name: str, prompt: list[int]) -> None:
        seconds, cached = engine.first_token(prompt)
        rows[name] = {"seconds": round(seconds, 4), "cached_tokens": cached}
        print(f"{name:40}{seconds:10.3f} s   {cached} tokens cached", flush=True)  # noqa: T201

    engine = open_engine(always_longer)
    ask(engine, "computed", [*document, *question])
    ask(engine, "on the device", [*document, *question[::-1]])
    ask(engine, "another prompt (pushes it out)", other)
    ask(engine, "in host memory", [*document, *question[::-1]])  # which pushes the other one out
    seconds = engine.write_all()
    rows["writing to disk"] = {"seconds": round(seconds, 3), "bytes": engine.disk.stats().written_bytes}
    engine.disk.close()
    place = "on disk" if cold else "on disk, in the page cache"
    for name, compute_seconds in (
        (place, always_longer),
        (f"{place}, as the engine chooses", step_time.prompt_seconds),
    ):
        if cold:
            forget_pages(folder)
        engine = open_engine(compute_seconds)  # as after a restart: nothing in memory
        predicted = step_time.prompt_seconds(0, prefix)
        ask(engine, name, [*other, *question])
        reading = engine.disk.read_seconds(prefix // BLOCK_SIZE)
        assert reading is not None
        rows[name] |= {
            "read_bytes": engine.disk.stats().read_bytes,
            "declined_blocks": engine.offload.stats().declined_blocks,
            "predicted_reading_seconds": round(reading, 4),  # by what was read
            "predicted_computing_seconds": round(predicted, 4),
        }
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
    served = LoadedRunner(
        runner, "bench", "", "", options.prefix + 4 * BLOCK_SIZE, STEP_TOKENS, loaded.vocab_size, (),
        overlaps=runner.device.type == "cuda", host_memory=memory, fill_blocks=runner.fill_blocks,
    )  # fmt: skip
    result["first_token"] = first_tokens(served, disk, options.prefix, cold=options.cold)
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
        write_out(options.out, text + "\n")


if __name__ == "__main__":
    main()
