"""Measures steps before anybody is served, for StepTimeModel to be fitted to. Knows the runner's protocol only; the
pool must be free: what rehearsals write to its blocks is never found again.

Tokens differ, and pages hold random numbers: a GPU is at its power limit in such steps, so it multiplies zeros, or one
row again and again, faster than what will come: an H200's attention 1.14 to 1.23 times (docs/log.md)."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from models.batch import SamplingParams, ScheduledSeq, StepBatch
from server.engine.runner import LoadedRunner, Runner
from server.engine.step_time import StepSample, rehearsals, work_of

ROUNDS = 2  # of each step: the first one may load and choose kernels, so the fastest counts
LONG_STEP = 4096  # rows: so long that loading does not show, and one round has to do


def rehearse(
    loaded: LoadedRunner,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepSample]:
    """All that tell the parts of a step's time apart."""
    steps = rehearsals(max_num_batched_tokens, max_num_seqs, max_model_len)
    most = max(sum(_blocks(step, loaded.runner.block_size)) for step in steps)
    loaded.fill_blocks(min(most, loaded.runner.num_blocks - 1))
    return measure(loaded, steps, max_rows=max_num_batched_tokens, rounds=ROUNDS, clock=clock)


def measure(
    loaded: LoadedRunner,
    steps: Iterable[Sequence[tuple[int, int]]],
    *,
    max_rows: int,
    rounds: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepSample]:
    """`steps` as chunks for work_of(). Those that need more blocks than there are, or more rows, are left out."""
    samples = []
    for chunks in steps:
        work = work_of(chunks)
        batch = _batch(loaded.runner, chunks, loaded.vocab_size) if work.rows <= max_rows else None
        if batch is not None:
            times = 1 if work.rows >= LONG_STEP else rounds
            samples.append(StepSample(work, min(_measure(loaded.runner, batch, clock) for _ in range(times))))
    return samples


def _batch(runner: Runner, chunks: Sequence[tuple[int, int]], vocab_size: int) -> StepBatch | None:
    """Blocks of its own for every sequence: a page that many read would come from a cache."""
    blocks = iter(range(1, runner.num_blocks))
    seqs = []
    for slot, ((context, count), needed) in enumerate(zip(chunks, _blocks(chunks, runner.block_size), strict=True)):
        table = list(itertools.islice(blocks, needed))
        if len(table) < needed:
            return None
        seqs.append(ScheduledSeq(slot, _tokens(context, count, vocab_size), context, table, sample=True))
    return StepBatch(tuple(seqs))


def _blocks(chunks: Sequence[tuple[int, int]], block_size: int) -> list[int]:
    """How many each sequence has."""
    return [-(-(context + count) // block_size) for context, count in chunks]


def _tokens(context: int, count: int, vocab_size: int) -> list[int]:
    return [(context + i) % vocab_size for i in range(count)]


def _measure(runner: Runner, batch: StepBatch, clock: Callable[[], float]) -> float:
    for seq in batch.seqs:
        runner.add_request(seq.slot, SamplingParams(seed=0), [0] * (seq.num_computed + len(seq.token_ids)))
    begin = clock()
    runner.launch(batch).collect()
    seconds = clock() - begin
    for seq in batch.seqs:
        runner.remove_request(seq.slot)
    return seconds
