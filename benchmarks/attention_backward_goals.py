"""The goals of the backward kernels, computed from a run's records: issue 4's list. Knows no device."""

from collections.abc import Iterator, Sequence

from benchmarks.attention_goal import Goal, grouped, is_16k, of_cells, over_best
from benchmarks.attention_registry import FA2, OURS, OURS_DETERMINISTIC, OURS_GENERIC
from benchmarks.attention_report import Record

_SECTION = "backward"
_ABSOLUTE = 620  # TFLOP/s at 16k, head_dim 128, with and without a mask


def goals(records: Sequence[Record]) -> Iterator[Goal]:
    timed = [r for r in records if r.cell.section == _SECTION]
    yield of_cells(timed, _SECTION, "backward over its best peer", 1.0, over_best, where=lambda r: not grouped(r))
    yield of_cells(
        timed,
        _SECTION,
        "backward d=256 over its best peer",
        1.3,
        over_best,
        where=lambda r: r.cell.head_dim == 256 and not grouped(r),
    )
    for causal in (True, False):
        yield of_cells(
            timed,
            _SECTION,
            f"backward d=128 {'causal' if causal else 'full'} 16k, TFLOP/s",
            _ABSOLUTE,
            lambda r: r.rate(OURS),
            where=is_16k(128, causal),
        )
    yield of_cells(
        timed, _SECTION, "deterministic backward over the default", 0.85, lambda r: r.ratio(OURS_DETERMINISTIC, OURS)
    )
    yield of_cells(timed, _SECTION, "generic backward over FA2", 0.95, lambda r: r.ratio(OURS_GENERIC, FA2))
