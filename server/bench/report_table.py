"""A measurement as a table in the terminal. Pure: gives back what to print."""

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from server.bench.metrics import Distribution, Measurement
from server.bench.report_json import percentile_name

TITLES = {
    "ttft": "TTFT, ms",
    "tpot": "TPOT, ms",
    "itl": "ITL, ms",
    "e2el": "E2EL, ms",
}
LATE_MS = 50.0  # a 99th percentile of sending this late says that client or --max-concurrency held requests back


def totals_table(found: Measurement) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = {
        "completed": str(found.completed),
        "failed": str(found.failed),
        "duration, s": f"{found.duration:.2f}",
        "input tokens": str(found.total_input),
        "output tokens": str(found.total_output),
        "requests/s": f"{found.request_throughput:.2f}",
        "goodput, requests/s": "" if found.request_goodput is None else f"{found.request_goodput:.2f}",
        "output tokens/s": f"{found.output_throughput:.1f}",
        "output tokens/s, best second": str(found.max_output_tokens_per_s),
        "all tokens/s": f"{found.total_token_throughput:.1f}",
        "most requests at once": str(found.max_concurrent_requests),
    }
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    return table


def latency_table(
    distributions: Mapping[str, Distribution], metrics: Sequence[str], percentiles: Sequence[float]
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for title in ("mean", "median", *(percentile_name(percent) for percent in percentiles)):
        table.add_column(title, justify="right")
    for name in metrics:
        values = distributions[name]
        numbers = (values.mean, values.percentile(50), *(values.percentile(percent) for percent in percentiles))
        table.add_row(TITLES.get(name, name), *(_number(number) for number in numbers))
    return table


def notes(found: Measurement) -> list[str]:
    """What a reader of the numbers should know."""
    lines = [
        f"{count} failed: {reason}" + (f" ({found.failure_details[reason]})" if found.failure_details[reason] else "")
        for reason, count in found.failures.items()
    ]
    if found.inexact_chunks:
        lines.append(
            f"{found.inexact_chunks} answers came in chunks of several tokens and the server did not say how many: "
            "their ITL is a chunk's"
        )
    if (late := found.send_delay.percentile(99)) > LATE_MS:
        lines.append(
            f"1 % of the requests were sent {late:.0f} ms or more after their time (--max-concurrency, or this client "
            "was too slow): TTFT and E2EL do not count that wait"
        )
    return lines


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
