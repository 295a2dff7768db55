"""Draws the roofline's JSON file as a PNG; needs matplotlib (the dev extra) and no GPU.

python benchmarks/roofline_plot.py roofline.json roofline.png
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = (
    *("tab:red", "tab:orange", "tab:blue", "tab:gray", "tab:green", "tab:olive", "tab:cyan", "tab:purple"),
    *("tab:pink", "tab:brown", "black", "navy", "darkgreen"),
)

Points = list[tuple[float, float]]


def full(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those without a mask, which are all that is drawn."""
    return [row for row in rows if row["mask"] == "full"]


def series(rows: Sequence[Mapping[str, Any]], value: str) -> Iterator[tuple[str, Points]]:
    """(title, points of (keys, value)) of every method; what is missing or zero is left out, since the axes are
    logarithmic."""
    for title in dict.fromkeys(row["title"] for row in rows):
        points = sorted((row["keys"], row[value]) for row in rows if row["title"] == title and row[value])
        if points:
            yield title, points


def colours(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By title, in the rows' order."""
    titles = dict.fromkeys(row["title"] for row in rows)
    return dict(zip(titles, _COLOURS, strict=False))


def done_tflops(row: Mapping[str, Any]) -> float | None:
    """TFLOP/s of what the method does, which is what a roofline bounds."""
    return row["flops_done"] / row["ms"] / 1e9 if row["ms"] else None


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Time, extra memory and the roofline beside each other. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    rows, ceilings = full(content["rows"]), content["ceilings"]
    figure = Figure(figsize=(18, 5.5), layout="constrained")
    time, memory, roof = figure.subplots(1, 3)
    _lines(time, rows, "ms", 1.0)
    time.set(title="time of one call", xlabel="keys (N)", ylabel="ms")
    _lines(memory, rows, "extra_bytes", 1e-6)
    memory.set(title="memory beyond inputs and output", xlabel="keys (N)", ylabel="MB")
    _roof(roof, rows, ceilings["matmul_tflops"], ceilings["copy_tb_per_s"])
    time.legend(fontsize=7)
    roof.legend(fontsize=8, loc="lower right")
    machine = content["machine"]
    first = rows[0] if rows else {"heads": "-", "head_dim": "-"}
    figure.suptitle(
        f"no mask, batch 1, {first['heads']} heads, d = {first['head_dim']}, bfloat16, {machine.get('gpu')}, "
        f"commit {str(machine.get('commit'))[:7]}, {str(machine.get('date'))[:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _lines(axes: Any, rows: Sequence[Mapping[str, Any]], value: str, unit: float) -> None:
    colour = colours(rows)
    for title, points in series(rows, value):
        keys, values = zip(*points, strict=True)
        axes.plot(keys, [v * unit for v in values], marker="o", ms=3, color=colour[title], label=title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _roof(axes: Any, rows: Sequence[Mapping[str, Any]], matmul: float, copy: float) -> None:
    """Filled points: bytes by the counters; empty ones: counted."""
    timed = [row for row in rows if row["ms"]]
    highest = max([matmul / copy * 10, *(row["intensity"] for row in timed)])
    lowest = min([1.0, *(row["intensity"] / 2 for row in timed)])
    ridge = matmul / copy
    label = f"{matmul:.0f} TFLOP/s (matrix product), {copy:.2f} TB/s (copy)"
    axes.plot([lowest, ridge, highest], [lowest * copy, matmul, matmul], color="black", lw=1, label=label)
    colour = colours(rows)
    for row in timed:
        mine = colour[row["title"]]
        fill = mine if row["hbm_source"] == "counters" else "none"
        axes.plot(row["intensity"], done_tflops(row), "o", ms=5, mec=mine, mfc=fill)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of HBM", ylabel="TFLOP/s")
    axes.set_title("roofline (filled: bytes by hardware counters)")
    axes.grid(alpha=0.3)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    draw(json.loads(Path(arguments[0]).read_text()), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
