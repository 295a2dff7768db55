"""Figures from outcomes whose figures are known."""

import math

import numpy
import pytest

from server.bench.metrics import (
    Distribution,
    concurrency,
    is_good,
    measure,
    parse_goodput,
    percentile,
    tokens_per_second,
)
from server.bench.outcome import STREAM_ERROR, Outcome
from server.bench.report_json import as_json, requests_as_json


def answer(sent: float, *chunks: tuple[float, int], prompt: int = 10, planned: float | None = None) -> Outcome:
    tokens = sum(count for _, count in chunks)
    return Outcome(prompt, sent if planned is None else planned, sent, list(chunks), tokens)


def test_percentiles_are_numpys() -> None:
    values = sorted([0.3, 9.0, 2.5, 4.0, 4.0, 7.25, 1.0])
    for percent in (0, 1, 25, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert math.isnan(percentile([], 50))


def test_tpot_leaves_the_first_token_out() -> None:
    outcome = answer(100.0, (102.0, 1), (103.0, 1), (106.0, 1))
    assert (outcome.ttft, outcome.e2el, outcome.tpot) == (2.0, 6.0, 2.0)  # (6 - 2) / (3 - 1)
    assert outcome.itls == [1.0, 3.0]


def test_an_answer_of_one_token_has_no_tpot() -> None:
    outcome = answer(0.0, (2.0, 1))
    assert outcome.tpot is None
    assert measure([outcome], 2.0, {}).distributions["tpot"].values == ()


def test_a_chunk_of_three_tokens_is_three_equal_gaps() -> None:
    assert answer(0.0, (1.0, 1), (4.0, 3)).itls == [1.0, 1.0, 1.0]


def test_throughputs_count_completed_requests_only() -> None:
    done = [answer(0.0, (1.0, 1), (2.0, 1), prompt=30), answer(0.0, (1.0, 1), (4.0, 1), prompt=70)]
    failed = answer(0.0, (1.0, 1)).fail(STREAM_ERROR, "broke")
    found = measure([*done, failed], 4.0, {})
    assert (found.completed, found.failed, dict(found.failures)) == (2, 1, {STREAM_ERROR: 1})
    assert found.failure_details == {STREAM_ERROR: "broke"}
    assert (found.total_input, found.total_output) == (100, 4)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (0.5, 1.0, 26.0)
    assert found.distributions["e2el"].values == (2000.0, 4000.0)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    fast = answer(0.0, (0.1, 1), (0.2, 1))
    slow_start = answer(0.0, (0.9, 1), (1.0, 1))
    slow_tokens = answer(0.0, (0.1, 1), (0.9, 1))
    limits = {"ttft": 500.0, "tpot": 200.0}
    assert [is_good(outcome, limits) for outcome in (fast, slow_start, slow_tokens)] == [True, False, False]
    assert measure([fast, slow_start, slow_tokens], 2.0, limits).request_goodput == 0.5
    assert measure([fast], 2.0, {}).request_goodput is None
    assert is_good(fast, {"ttft": 100.0})  # at the limit is within it


def test_goodput_is_written_as_vllm_writes_it() -> None:
    assert parse_goodput(["ttft:500", "tpot:50"]) == {"ttft": 500.0, "tpot": 50.0}
    assert parse_goodput(["ttft:500 e2el:9000"]) == {"ttft": 500.0, "e2el": 9000.0}
    for wrong in ("itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan"):
        with pytest.raises(ValueError, match="milliseconds"):
            parse_goodput([wrong])


def test_tokens_of_each_second_and_of_the_best() -> None:
    outcomes = [answer(10.0, (10.5, 1), (12.1, 2)), answer(10.2, (12.9, 4))]
    assert tokens_per_second(outcomes) == [(0.0, 1), (1.0, 0), (2.0, 6)]
    assert measure(outcomes, 3.0, {}).max_output_tokens_per_s == 6


def test_one_that_begins_when_another_ends_is_not_beside_it() -> None:
    outcomes = [answer(0.0, (2.0, 1)), answer(1.0, (3.0, 1)), answer(2.0, (4.0, 1))]
    assert max(count for _, count in concurrency(outcomes)) == 2
    assert concurrency(outcomes)[-1] == (4.0, 0)


def test_a_late_sending_is_seen_beside_latencies_that_do_not_count_it() -> None:
    found = measure([answer(5.0, (6.0, 1), planned=2.0)], 6.0, {})
    assert found.send_delay.values == (3000.0,)
    assert found.distributions["ttft"].values == (1000.0,)


def test_json_has_vllms_names_and_null_for_what_is_not() -> None:
    found = measure([answer(0.0, (1.0, 1))], 2.0, {})
    result = as_json(found, {"model_id": "m"}, ["ttft", "tpot"], [99.0, 99.9])
    assert result["model_id"] == "m"
    assert (result["completed"], result["total_input_tokens"], result["request_goodput"]) == (1, 10, None)
    assert (result["mean_ttft_ms"], result["median_ttft_ms"], result["p99.9_ttft_ms"]) == (1000.0, 1000.0, 1000.0)
    assert result["mean_tpot_ms"] is None
    assert "mean_itl_ms" not in result


def test_json_of_each_request() -> None:
    outcomes = [answer(1.0, (2.0, 1), (3.0, 1)), answer(2.0).fail(STREAM_ERROR, "x")]
    found = requests_as_json(outcomes)
    assert found["start_times"] == [0.0, 1.0]
    assert found["ttfts"] == [1.0, None]
    assert found["itls"] == [[1.0], []]
    assert found["errors"] == ["", f"{STREAM_ERROR}: x"]


def test_a_distribution_is_sorted_milliseconds() -> None:
    values = Distribution.of_seconds([0.003, 0.001])
    assert (values.values, values.mean, values.std) == ((1.0, 3.0), 2.0, 1.0)
