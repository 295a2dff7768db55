"""Plots of our forward and decode beside the peers, from the files in benchmarks/results, into docs/img.

    python benchmarks/plots.py [--results FOLDER] [--out FOLDER]

Needs matplotlib and no device. What no file has results for is not drawn.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks.attention_registry import OURS
from benchmarks.attention_results import LABELS, RESULTS, Row, rows, runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
_WIDTH, _DPI = 8.0, 200  # inches; read at half the pixels
#: Okabe and Ito's colours, which the colour-blind can tell apart, and a marker each for who sees none.
_STYLES = {
    OURS: ("#0072B2", "o"),
    "fa3": ("#D55E00", "s"),
    "fa4": ("#CC79A7", "D"),
    "flashinfer": ("#E69F00", "P"),
    "cudnn": ("#009E73", "^"),
    "fa2": ("#56B4E9", "v"),
    "flex": ("#777777", "X"),
}


def _names(found: Sequence[Row]) -> list[str]:
    """Ours, then the peers that some row has."""
    return [name for name in _STYLES if name == OURS or any(name in row.ratios for row in found)]


def _speed(row: Row, name: str) -> float | None:
    return row.ours if name == OURS else row.peer(name)


def forward_figure(found: Sequence[Row]) -> "Figure":
    """TFLOP/s over the length: a panel per head_dim and mask, a line per contender."""
    from matplotlib.figure import Figure

    square = [row for row in found if row.cell.heads == row.cell.kv_heads]
    dims = sorted({row.cell.head_dim for row in square})
    names = _names(square)
    figure = Figure(figsize=(_WIDTH, 5.2), layout="constrained")
    axes = figure.subplots(2, len(dims), sharex=True, sharey=True, squeeze=False)
    for line, causal in zip(axes, (False, True), strict=True):
        for panel, head_dim in zip(line, dims, strict=True):
            panel_rows = [r for r in square if (r.cell.head_dim, r.cell.causal) == (head_dim, causal)]
            _lines(panel, panel_rows, names)
            panel.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=10)
    for panel in axes[-1]:
        panel.set_xlabel("length (batch x length is 16k)")
    for line in axes:
        line[0].set_ylabel("TFLOP/s")
    axes[0][0].set_ylim(bottom=0)  # of all panels, after all lines are in them
    _legend(figure, axes[0][0], names)
    return figure


def _lines(panel: "Axes", panel_rows: Sequence[Row], names: Sequence[str]) -> None:
    by_length = sorted(panel_rows, key=lambda row: row.cell.seqlen_k)
    for name in reversed(names):  # ours last, on top
        points = [(row.cell.seqlen_k, speed) for row in by_length if (speed := _speed(row, name)) is not None]
        colour, marker = _STYLES[name]
        width = 2.4 if name == OURS else 1.3
        x, y = [p[0] for p in points], [p[1] for p in points]
        panel.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=width, label=LABELS[name])
    lengths = sorted({row.cell.seqlen_k for row in panel_rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    panel.minorticks_off()
    _clean(panel)


def decode_figure(found: Sequence[Row], copy_tb_per_s: float | None) -> "Figure":
    """TB/s of keys and values read: a group of bars per batch and context, a bar per contender."""
    from matplotlib.figure import Figure

    names = [name for name in _names(found) if name not in ("fa2", "flex")]
    figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
    panel = figure.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [place + (i - (len(names) - 1) / 2) * width for place in range(len(found))]
        heights = [_speed(row, name) or 0.0 for row in found]
        label = LABELS[name] + (" (contiguous keys)" if name == "cudnn" else "")
        panel.bar(at, heights, width, color=_STYLES[name][0], edgecolor="white", linewidth=0.4, label=label)
    if copy_tb_per_s:
        panel.axhline(copy_tb_per_s, color="#333333", linewidth=1, linestyle="--", label="device copy")
    panel.set_xticks(range(len(found)), [f"{row.cell.batch} x {_thousands(row.cell.seqlen_k)}" for row in found])
    panel.set_xlabel("batch x context")
    panel.set_ylabel("TB/s of KV read")
    _clean(panel)
    _legend(figure, panel, names)
    return figure


def _thousands(n: int) -> str:
    return f"{n // 1024}k"


def _clean(panel: "Axes") -> None:
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)


def _legend(figure: "Figure", panel: "Axes", names: Sequence[str]) -> None:
    """In the order of names, whatever the order of drawing; what is not a contender last."""
    handles, labels = panel.get_legend_handles_labels()
    order = [LABELS[name] for name in names]
    place = {label: next((i for i, name in enumerate(order) if label.startswith(name)), len(order)) for label in labels}
    both = sorted(zip(handles, labels, strict=True), key=lambda pair: place[pair[1]])
    columns = min(len(both), 6)
    figure.legend(*zip(*both, strict=True), loc="outside upper center", ncols=columns, fontsize=9, frameon=False)


def draw(results: Path, out: Path) -> list[Path]:
    """Writes the plots that there are results for; returns their files."""
    reports = runs(results)
    figures: dict[str, Figure] = {}
    if found := rows(reports, "forward"):
        figures["attention_forward.png"] = forward_figure(found)
    if found := rows(reports, "decode"):
        copies = [r.copy_tb_per_s for r in reports if r.of_section("decode") and r.copy_tb_per_s]
        figures["attention_decode.png"] = decode_figure(found, max(copies, default=None))
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=_DPI, facecolor="white", metadata={"Software": None})
    return [out / name for name in figures]


def main(
    results: Annotated[Path, typer.Option(help="folder of the result files")] = RESULTS,
    out: Annotated[Path, typer.Option(help="folder of the plots")] = IMAGES,
) -> None:
    """Draws the plots of the README."""
    for path in draw(results, out):
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
