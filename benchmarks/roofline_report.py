"""What the roofline says: a row per method, mask and length; the table, the goal, the JSON file. Knows no device."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hbm_counters import HbmBytes
from benchmarks.roofline_counts import Shape, Work

GOAL_SEQLEN, GOAL_FACTOR = 16384, 2.0


@dataclass(frozen=True)
class Row:
    """One method at one shape."""

    method: str
    title: str
    shape: Shape
    work: Work
    counters: HbmBytes | None = None
    ms: float | None = None
    extra_bytes: int | None = None  # the most memory that was allocated beyond inputs and output
    error: float | None = None  # relative, against the truth; of several outputs the largest
    reason: str | None = None  # why there is no time
    wrong: bool = False

    @property
    def hbm_bytes(self) -> int:
        return self.counters.total if self.counters else self.work.counted

    @property
    def hbm_source(self) -> str:
        return "counters" if self.counters else "counted"

    @property
    def intensity(self) -> float:
        """FLOPs done for a byte between HBM and the chip."""
        return self.work.done / self.hbm_bytes

    @property
    def tflops(self) -> float | None:
        return self.work.flops / self.ms / 1e9 if self.ms else None

    @property
    def times_least(self) -> float:
        """HBM bytes over reading inputs once and writing outputs once."""
        return self.hbm_bytes / self.work.least_bytes

    def facts(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "title": self.title,
            "rows": self.shape.rows,
            "keys": self.shape.keys,
            "heads": self.shape.heads,
            "head_dim": self.shape.head_dim,
            "mask": self.shape.mask,
            "flops": self.work.flops,
            "flops_done": self.work.done,
            "hbm_bytes": self.hbm_bytes,
            "hbm_source": self.hbm_source,
            "hbm_read": self.counters.read if self.counters else None,
            "hbm_write": self.counters.write if self.counters else None,
            "counted_bytes": self.work.counted,
            "least_bytes": self.work.least_bytes,
            "intensity": self.intensity,
            "ms": self.ms,
            "tflops": self.tflops,
            "extra_bytes": self.extra_bytes,
            "relative_error": self.error,
            "reason": self.reason,
        }


@dataclass
class Report:
    """Grows row by row; the file is whole after every write."""

    machine: Mapping[str, Any]
    goal_method: str
    beside: str  # whose bytes are printed beside the goal's
    matmul_tflops: float
    copy_tb_per_s: float
    rows: list[Row] = field(default_factory=list)
    missing_counters: list[str] = field(default_factory=list)  # why some could not be read

    def _full(self, method: str, seqlen: int) -> Row | None:
        found = (r for r in self.rows if r.method == method and r.shape.keys == seqlen and not r.shape.causal)
        return next(found, None)

    @property
    def goal(self) -> dict[str, Any]:
        """`times_least` and `met` are None when the counters were not read."""
        row, other = self._full(self.goal_method, GOAL_SEQLEN), self._full(self.beside, GOAL_SEQLEN)
        value = row.times_least if row and row.counters else None
        return {
            "name": f"HBM bytes of a forward at {GOAL_SEQLEN}, d = 128, over each of q, k, v and the output once",
            "goal": GOAL_FACTOR,
            "method": self.goal_method,
            "times_least": value,
            "met": None if value is None else value <= GOAL_FACTOR,
            "beside": self.beside,
            "beside_times_least": other.times_least if other else None,
            "beside_source": other.hbm_source if other else None,
        }

    def goal_line(self) -> str:
        goal = self.goal
        value, other = goal["times_least"], goal["beside_times_least"]
        ours = "not measured" if value is None else f"{value:.2f}x ({'met' if goal['met'] else 'MISSED'})"
        beside = "" if other is None else f"; {goal['beside']} {other:.1f}x ({goal['beside_source']})"
        return f"{goal['name']}: {goal['method']} {ours}, goal {GOAL_FACTOR:.1f}x{beside}"

    def content(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "ceilings": {"matmul_tflops": self.matmul_tflops, "copy_tb_per_s": self.copy_tb_per_s},
            "missing_counters": self.missing_counters,
            "goal": self.goal,
            "rows": [row.facts() for row in self.rows],
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content(), indent=1, allow_nan=False) + "\n")
        partial.replace(path)

    def table(self) -> str:
        head = (
            "method",
            "mask",
            "rows",
            "keys",
            "GFLOP",
            "HBM MB",
            "from",
            "/ least",
            "FLOP/B",
            "ms",
            "TFLOP/s",
            "+ MB",
        )
        lines = [head, *(cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(head))]
        return "\n".join(_aligned(line, widths) for line in lines)


def cells(row: Row) -> tuple[str, ...]:
    """The row of the table; one without a time ends with the reason."""
    shape = row.shape
    start = (row.method, shape.mask, str(shape.rows), str(shape.keys), f"{row.work.done / 1e9:.2f}")
    bytes_ = (f"{row.hbm_bytes / 1e6:.1f}", row.hbm_source, f"{row.times_least:.2f}", f"{row.intensity:.1f}")
    if row.ms is None or row.tflops is None or row.extra_bytes is None:
        return (*start, *bytes_, "-", "-", "-", row.reason or "not measured")
    return (*start, *bytes_, f"{row.ms:.4f}", f"{row.tflops:.1f}", f"{row.extra_bytes / 1e6:.1f}")


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    left = 2  # words stand left, numbers right
    parts = [x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=False))]
    return "  ".join([*parts, *line[len(widths) :]])
