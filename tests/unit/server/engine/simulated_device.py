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


def cpu_seconds(work: StepWork) -> float:
    """Of the bundled model on two cores of an AMD EPYC with AVX-512 BF16."""
    pairs = work.pairs + work.few_pairs
    return 33e-3 + 0.88e-3 * work.rows + 0.5e-6 * pairs + 2.8e-6 * work.kv_tokens + 4e-6 * work.chunk_keys


def amx_seconds(work: StepWork) -> float:
    """The same of an Intel Xeon with AMX: 512 rows take 158 ms, 1,024 take 300, after 3,000 tokens 343 and 628."""
    pairs, rows = work.pairs + work.few_pairs, min(work.rows, 64) * 0.45e-3 + max(work.rows - 64, 0) * 0.2e-3
    return 30e-3 + rows + 0.11e-6 * pairs + 3e-6 * work.kv_tokens + 3e-6 * work.chunk_keys


def rehearsed(device: Callable[[StepWork], float] = h200_seconds) -> StepTimeModel:
    steps = map(work_of, rehearsals(MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MAX_MODEL_LEN))
    return StepTimeModel.fit(StepSample(work, device(work)) for work in steps)
