"""A measurement as JSON, with the field names of vLLM's benchmark where it has them. Pure; writes no file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from server.bench.metrics import Measurement
from server.bench.outcome import Outcome


def percentile_name(percent: float) -> str:
    return f"p{percent:g}"


def as_json(
    found: Measurement, setup: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Any]:
    """`setup`: what was asked (URL, model, rates, lengths). Times are milliseconds; what does not exist is null."""
    result: dict[str, Any] = {
        **setup,
        "duration": found.duration,
        "completed": found.completed,
        "failed": found.failed,
        "failures": dict(found.failures),
        "failure_details": dict(found.failure_details),
        "total_input_tokens": found.total_input,
        "total_output_tokens": found.total_output,
        "request_throughput": found.request_throughput,
        "request_goodput": found.request_goodput,
        "output_throughput": found.output_throughput,
        "total_token_throughput": found.total_token_throughput,
        "max_output_tokens_per_s": found.max_output_tokens_per_s,
        "max_concurrent_requests": found.max_concurrent_requests,
        "mean_send_delay_ms": _finite(found.send_delay.mean),
        "p99_send_delay_ms": _finite(found.send_delay.percentile(99)),
        "requests_with_itl_by_chunk": found.inexact_chunks,
    }
    for name in metrics:
        values = found.distributions[name]
        result[f"mean_{name}_ms"] = _finite(values.mean)
        result[f"median_{name}_ms"] = _finite(values.percentile(50))
        result[f"std_{name}_ms"] = _finite(values.std)
        for percent in percentiles:
            result[f"{percentile_name(percent)}_{name}_ms"] = _finite(values.percentile(percent))
    return result


def requests_as_json(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Each request by itself, in vLLM's lists side by side; times are seconds."""
    begin = min((outcome.sent for outcome in outcomes if outcome.sent), default=0.0)
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "start_times": [outcome.sent - begin if outcome.sent else None for outcome in outcomes],
        "ttfts": [outcome.ttft if outcome.completed else None for outcome in outcomes],
        "itls": [outcome.itls if outcome.completed else [] for outcome in outcomes],
        "errors": [f"{outcome.failure}: {outcome.detail}" if outcome.failure else "" for outcome in outcomes],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
