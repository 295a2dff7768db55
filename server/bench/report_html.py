"""A measurement as one HTML page with plots, nothing loaded from elsewhere. Pure: gives back the page."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from server.bench.metrics import Distribution, Measurement, concurrency, tokens_per_second
from server.bench.outcome import Outcome
from server.bench.report_json import percentile_name
from server.bench.report_table import TITLES, notes
from server.bench.svg import Chart, draw

MOST_POINTS = 400
CUT = 0.995  # share of the values at which the CDFs end: one slow request must not squeeze all the others to the left

STYLE = """
:root { color-scheme: light dark; --line: light-dark(#0b63ce, #6cb2ff); --grid: light-dark(#d9d9d9, #3d3d3d); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  background: light-dark(#fff, #161616); color: light-dark(#1c1c1c, #e4e4e4); }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
td, th { padding: .15rem .9rem .15rem 0; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; }
.setup td { text-align: left; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1rem; }
svg text { fill: currentColor; font-size: 11px; } svg .title { font-size: 13px; font-weight: 600; }
.grid { stroke: var(--grid); } .line { fill: none; stroke: var(--line); stroke-width: 1.6; }
.note { color: light-dark(#a33, #ff9b8f); }
"""


def page(
    found: Measurement,
    outcomes: Sequence[Outcome],
    setup: Mapping[str, Any],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> str:
    done = [outcome for outcome in outcomes if outcome.completed]
    charts = [cdf(TITLES[name], found.distributions[name]) for name in metrics]
    seconds = tokens_per_second(done)
    ends = [(second + 1, count) for second, count in seconds[-1:]]  # the last one, too, is a second long
    charts.append(Chart("Output tokens a second", "s", "tokens/s", seconds + ends, steps=True))
    running = thin_steps(concurrency(done))
    charts.append(Chart("Requests at once", "s", "requests", running, steps=True))
    title = f"longwave bench serve: {setup.get('model_id', '')}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        *(f'<p class="note">{html.escape(note)}</p>' for note in notes(found)),
        _totals(found),
        _latencies(found, metrics, percentiles),
        f'<div class="plots">{"".join(draw(chart) for chart in charts)}</div>',
        "<h2>Setup</h2>",
        _rows(setup, "setup"),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def cdf(title: str, values: Distribution) -> Chart:
    """Share of the values at or below, up to a high one."""
    kept = values.values[: math.ceil(CUT * len(values.values))]
    points = [(value, 100 * (rank + 1) / len(values.values)) for rank, value in enumerate(kept)]
    return Chart(title.removesuffix(", ms"), "ms", "% at or below", thin(points), top=100.0)


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many of them, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    return [points[round(number * (len(points) - 1) / (MOST_POINTS - 1))] for number in range(MOST_POINTS)]


def thin_steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same of steps: of neighbours the highest, so that peaks stay, and the last of all."""
    size = math.ceil(len(points) / MOST_POINTS)
    parts = (points[first : first + size] for first in range(0, len(points) - 1, max(1, size)))
    return [*(max(part, key=lambda point: point[1]) for part in parts), *points[-1:]]


def _totals(found: Measurement) -> str:
    rows = {
        "completed / failed": f"{found.completed} / {found.failed}",
        "duration": f"{found.duration:.2f} s",
        "input / output tokens": f"{found.total_input} / {found.total_output}",
        "requests": f"{found.request_throughput:.2f}/s",
        "output tokens": f"{found.output_throughput:.1f}/s",
        "all tokens": f"{found.total_token_throughput:.1f}/s",
    }
    if found.request_goodput is not None:
        rows["goodput"] = f"{found.request_goodput:.2f} requests/s"
    return _rows(rows, "totals")


def _latencies(found: Measurement, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    names = ("mean", "median", *(percentile_name(percent) for percent in percentiles))
    rows = ["<tr><th></th>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for name in metrics:
        values = found.distributions[name]
        if not values.values:
            continue
        numbers = (values.mean, values.percentile(50), *(values.percentile(percent) for percent in percentiles))
        rows.append(f"<tr><td>{TITLES[name]}</td>" + "".join(f"<td>{number:.2f}</td>" for number in numbers) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _rows(values: Mapping[str, Any], kind: str) -> str:
    pairs = ((html.escape(name), html.escape(str(value))) for name, value in values.items())
    cells = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in pairs)
    return f'<table class="{kind}">{cells}</table>'
