"""Steps of the engine's runner, launched as the engine launches them, without scheduler or server. Random weights of
Llama-3.1-8B's shape; measures launches, but knows no profiler."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import model_folder
from models import loader, registry
from models.batch import IN_FLIGHT, SamplingParams, ScheduledSeq, StepBatch
from models.runner import ModelRunner
from models.sampling import LaunchedSample

BLOCK_SIZE = 64
SAMPLING = SamplingParams(temperature=1.0, seed=0, ignore_eos=True)
STEPS = 20
PROFILED = 5
LAUNCHES = 10
DECODED = 128  # tokens of a decode beyond its context, after which it begins again


def make_runner(max_model_len: int, step_tokens: int, **options: Any) -> ModelRunner:
    with tempfile.TemporaryDirectory() as folder:
        model_folder.write(Path(folder), max_position_embeddings=262144)
        loaded = loader.load(registry.resolve(folder), dtype="bfloat16", device="cuda:0", load_format="dummy")
    runner = ModelRunner(
        loaded, block_size=BLOCK_SIZE, max_num_seqs=64, max_num_batched_tokens=step_tokens,
        max_model_len=max_model_len, **options,
    )  # fmt: skip
    runner.warm_up()
    runner.fill_blocks(runner.num_blocks - 1)  # products of zeros take less power, so a GPU is faster than it would be
    return runner


class Steps:
    """Steps of `decodes` (rows, context) and, beside them, the same chunk (tokens, context) of one prompt each time.

    Sequences have blocks of their own, as many as there are.
    """

    def __init__(
        self, runner: ModelRunner, decodes: tuple[int, int] = (0, 0), chunk: tuple[int, int] | None = None
    ) -> None:
        self.runner = runner
        self.rows, self.context = decodes
        longest = self.context + DECODED
        self.blocks = [self._blocks(row * -(-longest // BLOCK_SIZE), longest) for row in range(self.rows)]
        self.step = 0
        self.chunk: tuple[ScheduledSeq, ...] = ()
        if chunk is not None:
            tokens, before = chunk
            prompt = torch.randint(10, 100_000, (tokens,)).tolist()
            self.chunk = (ScheduledSeq(self.rows, prompt, before, self._blocks(0, tokens + before), False),)
        for slot in range(self.rows + len(self.chunk)):
            runner.add_request(slot, SAMPLING, [1])

    def _blocks(self, first: int, tokens: int) -> list[int]:
        return [1 + (first + i) % (self.runner.num_blocks - 1) for i in range(-(-tokens // BLOCK_SIZE))]

    def launch(self) -> LaunchedSample:
        token = [IN_FLIGHT] if self.step else [1]
        at = self.context + self.step % DECODED
        seqs = tuple(ScheduledSeq(row, token, at, self.blocks[row], True) for row in range(self.rows))
        self.step += 1
        return self.runner.launch(StepBatch(seqs + self.chunk))

    def run(self, steps: int, seconds: float = 0.0) -> None:
        """So many steps, and more until so many seconds are over."""
        before, end = None, time.perf_counter() + seconds
        while steps > 0 or time.perf_counter() < end:
            steps -= 1
            launched = self.launch()
            if before is not None:
                before.collect()
            before = launched
        if before is not None:
            before.collect()

    def launch_ms(self) -> float:
        """Median."""
        times = []
        for _ in range(LAUNCHES):
            torch.cuda.synchronize()
            start = time.perf_counter()
            launched = self.launch()
            times.append((time.perf_counter() - start) * 1e3)
            launched.collect()
        return statistics.median(times)

    def end(self) -> None:
        for slot in range(self.rows + len(self.chunk)):
            self.runner.remove_request(slot)
