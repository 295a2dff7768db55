"""Draws the roofline's JSON file as a PNG; needs matplotlib (the dev extra) and no GPU.

python benchmarks/roofline_plot.py roofline.json roofline.png
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = {
    "standard": "tab:red",
    "rabe-staats": "tab:orange",
    "generic": "tab:blue",
    "hopper": "tab:green",
    "decode": "tab:purple",
}
_OTHER_COLOUR = "tab:gray"
_STYLES = {"full": "-", "causal": "--"}

Points = list[tuple[float, float]]


def series(rows: Sequence[Mapping[str, Any]], value: str) -> Iterator[tuple[str, str, str, Points]]:
    """(method, title, mask, points of (keys, value)) of every method and mask; what is missing or zero is left out,
    since the axes are logarithmic."""
    names = dict.fromkeys((row["method"], row["title"], row["mask"]) for row in rows)
    for method, title, mask in names:
        mine = [row for row in rows if (row["method"], row["mask"]) == (method, mask) and row[value]]
        points = sorted((row["keys"], row[value]) for row in mine)
        if points:
            yield method, title, mask, points


def done_tflops(row: Mapping[str, Any]) -> float | None:
    """TFLOP/s of what the method does, which is what a roofline bounds."""
    return row["flops_done"] / row["ms"] / 1e9 if row["ms"] else None


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Time, extra memory and the roofline beside each other. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    rows, ceilings = content["rows"], content["ceilings"]
    figure = Figure(figsize=(18, 5.5), layout="constrained")
    time, memory, roof = figure.subplots(1, 3)
    _lines(time, rows, "ms", 1.0)
    time.set(title="time of one call", xlabel="keys (N)", ylabel="ms")
    _lines(memory, rows, "extra_bytes", 1e-6)
    memory.set(title="memory beyond inputs and output", xlabel="keys (N)", ylabel="MB")
    _roof(roof, rows, ceilings["matmul_tflops"], ceilings["copy_tb_per_s"])
    time.legend(fontsize=8)
    roof.legend(fontsize=8, loc="lower right")
    machine = content["machine"]
    first = rows[0] if rows else {"heads": "-", "head_dim": "-"}
    figure.suptitle(
        f"batch 1, {first['heads']} heads, d = {first['head_dim']}, bfloat16, {machine.get('gpu')}, "
        f"commit {str(machine.get('commit'))[:7]}, {str(machine.get('date'))[:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _lines(axes: Any, rows: Sequence[Mapping[str, Any]], value: str, unit: float) -> None:
    for method, title, mask, points in series(rows, value):
        keys, values = zip(*points, strict=True)
        label = title if mask == "full" else f"{title}, {mask}"
        colour = _COLOURS.get(method, _OTHER_COLOUR)
        axes.plot(keys, [v * unit for v in values], _STYLES[mask], marker="o", ms=3, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _roof(axes: Any, rows: Sequence[Mapping[str, Any]], matmul: float, copy: float) -> None:
    """Full attention only. Filled points: bytes by the counters; empty ones: counted."""
    timed = [row for row in rows if row["mask"] == "full" and row["ms"]]
    highest = max([matmul / copy * 10, *(row["intensity"] for row in timed)])
    lowest = min([1.0, *(row["intensity"] / 2 for row in timed)])
    ridge = matmul / copy
    label = f"{matmul:.0f} TFLOP/s (matrix product), {copy:.2f} TB/s (copy)"
    axes.plot([lowest, ridge, highest], [lowest * copy, matmul, matmul], color="black", label=label)
    for method in dict.fromkeys(row["method"] for row in timed):
        mine = [row for row in timed if row["method"] == method]
        colour = _COLOURS.get(method, _OTHER_COLOUR)
        for row in mine:
            fill = colour if row["hbm_source"] == "counters" else "none"
            axes.plot(row["intensity"], done_tflops(row), "o", ms=5, mec=colour, mfc=fill)
        axes.plot([], [], "o", color=colour, label=mine[0]["title"])
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of HBM", ylabel="TFLOP/s")
    axes.set_title("roofline, full (filled: bytes by hardware counters)")
    axes.grid(alpha=0.3)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    draw(json.loads(Path(arguments[0]).read_text()), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
