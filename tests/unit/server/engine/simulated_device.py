"""How long an H200 takes over a step of an 8B model (Llama-3.1-8B's shape, bfloat16), near enough."""

from collections.abc import Callable

from server.engine.step_time import StepSample, StepTimeModel, StepWork, rehearsals, work_of

MAX_MODEL_LEN = 132_096
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192
FLOOR = 5e-3  # seconds: 16 GB of weights read
LINEAR = 20.6e-6  # seconds a token: 14 GFLOP at 680 TFLOP/s
ATTENTION = 0.8e-9  # seconds a pair of query and key
KV_READ = 131_072 / 4.4e12  # seconds a key: 128 KiB at 4.4 TB/s
LAUNCH = 0.2e-3  # seconds a step
COPY = 3 * 65_536 / 4e12  # seconds a key of float8 pages, for a chunk: 64 KiB read and 128 KiB written at 4 TB/s


def h200_seconds(work: StepWork) -> float:
    return LAUNCH + max(FLOOR, LINEAR * work.rows) + ATTENTION * work.pairs + KV_READ * work.kv_tokens


def copying_seconds(work: StepWork) -> float:
    """Over float8 pages: decodes read half as much, chunks copy their keys first."""
    return h200_seconds(work) - KV_READ / 2 * work.kv_tokens + COPY * work.chunk_keys


def rehearsed(device: Callable[[StepWork], float] = h200_seconds) -> StepTimeModel:
    steps = map(work_of, rehearsals(MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MAX_MODEL_LEN))
    return StepTimeModel.fit(StepSample(work, device(work)) for work in steps)
