"""A line chart as inline SVG, in the colours of the page around it. Knows no measurement."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 28, 38
TICKS = 5


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    points: Sequence[tuple[float, float]]  # ascending in x
    steps: bool = False  # a value holds until the next one
    top: float | None = None  # of the y axis; None: a round number above the points


def draw(chart: Chart) -> str:
    """Axes begin at 0. A chart without points says so."""
    right = _round_up(max((x for x, _ in chart.points), default=1.0))
    top = chart.top or _round_up(max((y for _, y in chart.points), default=1.0))

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / right, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top

    parts = [f'<text class="title" x="{LEFT}" y="16">{html.escape(chart.title)}</text>']
    for number in range(TICKS + 1):
        x, y = right * number / TICKS, top * number / TICKS
        (at_x, _), (_, at_y) = place(x, 0), place(0, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y:.1f}" y2="{at_y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at_y + 4:.1f}" text-anchor="end">{_tick(y)}</text>')
        parts.append(f'<text x="{at_x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_tick(x)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(chart.x_label)}</text>')
    parts.append(
        f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">{html.escape(chart.y_label)}</text>'
    )
    if chart.points:
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in _corners(chart)))
        parts.append(f'<polyline class="line" points="{corners}"/>')
    else:
        parts.append(f'<text x="{middle}" y="{HEIGHT / 2}" text-anchor="middle">nothing was measured</text>')
    label = html.escape(chart.title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _corners(chart: Chart) -> Sequence[tuple[float, float]]:
    if not chart.steps:
        return chart.points
    corners = list(chart.points[:1])
    for (_, before), (x, y) in zip(chart.points, chart.points[1:], strict=False):
        corners += [(x, before), (x, y)]
    return corners


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _tick(value: float) -> str:
    return f"{value:g}" if value < 10_000 else f"{value / 1000:g}k"
