"""The goals of the attention kernels, computed from a run's records: issue 3's table, row by row. Knows no device."""

from collections.abc import Iterator, Sequence

from benchmarks import attention_backward_goals
from benchmarks.attention_goal import Goal, Rule, grouped, is_16k, of_cells, over, over_best
from benchmarks.attention_registry import (
    CUDNN,
    FA2,
    FA3,
    FLASHINFER,
    OURS,
    OURS_BF16,
    OURS_CONTIGUOUS,
    OURS_DENSE,
    OURS_GENERIC,
    OURS_KERNEL,
    PER_TENSOR,
)
from benchmarks.attention_report import Record

_LARGE_KV = 100_000_000  # bytes, from which decode is held to the copy bandwidth
#: TFLOP/s at 16k, by head_dim and causal
_ABSOLUTE = {
    (128, False): 710,
    (128, True): 705,
    (64, False): 560,
    (64, True): 565,
    (256, False): 800,
    (256, True): 785,
}


def goals(records: Sequence[Record], copy_tb_per_s: float | None) -> list[Goal]:
    """All of them; those that no cell was timed for have no values."""
    backward = attention_backward_goals.goals(records)
    return [*_forward(records), *backward, *_options(records), *_decode(records, copy_tb_per_s)]


def _forward(records: Sequence[Record]) -> Iterator[Goal]:
    yield of_cells(records, "forward", "forward over its best peer", 1.0, over_best)
    yield of_cells(records, "forward", "forward over its best peer, all cells", 1.03, over_best, Rule.MEAN)
    yield of_cells(
        records, "forward", "forward over cuDNN from 2k up", 1.1, over(CUDNN), where=lambda r: r.cell.seqlen_k >= 2048
    )
    for (head_dim, causal), goal in _ABSOLUTE.items():
        name = f"forward d={head_dim} {'causal' if causal else 'full'} 16k, TFLOP/s"
        yield of_cells(records, "forward", name, goal, lambda r: r.rate(OURS), where=is_16k(head_dim, causal))
    yield of_cells(
        records,
        "forward",
        "generic forward over FA2, d=64 and 128, 2k to 16k",
        0.95,
        lambda r: r.ratio(OURS_GENERIC, FA2),
        where=lambda r: r.cell.head_dim in (64, 128) and 2048 <= r.cell.seqlen_q <= 16384 and not grouped(r),
    )


def _options(records: Sequence[Record]) -> Iterator[Goal]:
    dense = over(OURS_DENSE)
    yield of_cells(records, "varlen", "varlen over the same FLOPs dense", 0.95, dense)
    yield of_cells(records, "padding", "half padding over the same FLOPs dense", 0.95, dense)
    yield of_cells(records, "padding", "half padding over the best of cuDNN, FA2", 1.3, over_best)
    for page in (64, 128):
        name = f"prefill over pages of {page} over contiguous"
        yield of_cells(
            records,
            "paged",
            name,
            0.95,
            over(OURS_CONTIGUOUS),
            where=lambda r, page=page: r.cell.page == page,  # type: ignore[misc]
        )
    yield of_cells(
        records,
        "chunk",
        "512 tokens on 131k over pages, over the same FLOPs dense",
        0.85,
        dense,
        where=lambda r: (r.cell.seqlen_q, r.cell.seqlen_k) == (512, 512 + 131072),
    )
    yield of_cells(
        records,
        "block_sparse",
        "block-sparse at 25 %, 32k: times as fast as dense",
        3.0,
        lambda r: r.times_as_fast(OURS, OURS_DENSE),
        where=lambda r: r.cell.density == 0.25,
    )
    for name, who in (("kernel", OURS_KERNEL), ("with quantisation", OURS)):
        yield of_cells(
            records,
            "fp8_forward",
            f"FP8 forward d=128 16k full, {name}, TFLOP/s",
            1000,
            lambda r, who=who: r.rate(who),  # type: ignore[misc]
            where=is_16k(128, False),
        )
    yield of_cells(
        records, "fp8_error", "FP8 forward, outliers: error over per-tensor FP8's", 0.5, _error_share, Rule.AT_MOST
    )


def _error_share(record: Record) -> float | None:
    ours, plain = record.results.get(OURS), record.results.get(PER_TENSOR)
    return ours.error / plain.error if ours and plain and ours.error and plain.error else None


def _decode(records: Sequence[Record], copy_tb_per_s: float | None) -> Iterator[Goal]:
    def share(record: Record) -> float | None:
        speed = record.number(OURS)
        return speed / copy_tb_per_s if speed and copy_tb_per_s else None

    yield of_cells(
        records,
        "decode",
        "decode from 100 MB of KV, share of copy bandwidth",
        0.95,
        share,
        where=lambda r: r.cell.kv_bytes >= _LARGE_KV,
    )
    for peer in (FLASHINFER, FA3, CUDNN):
        kind = "cuDNN's contiguous decode" if peer == CUDNN else peer
        yield of_cells(records, "decode", f"decode over shuffled pages over {kind}", 1.0, over(peer))
    for peer in (FLASHINFER, FA3):
        name = f"64 requests sharing 100k tokens: times as fast as {peer} without sharing"
        yield of_cells(records, "shared_prefix", name, 8.0, over(peer))
    yield of_cells(
        records,
        "latency",
        "decode 1 x 1k in a graph of 32, microseconds",
        8.0,
        lambda r: r.number(OURS),
        Rule.AT_MOST,
        where=lambda r: r.cell.calls > 1,
    )
    yield of_cells(
        records,
        "fp8_kv",
        "decode over FP8 KV at 131k: times as fast as bf16",
        1.7,
        lambda r: r.times_as_fast(OURS, OURS_BF16),
        where=lambda r: r.cell.seqlen_k == 131072,
    )
