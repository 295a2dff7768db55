import re
import socket

import pytest
from scripted_engine import LiveServer, Script, live_server, wait_until

# vLLM's names, which dashboards know, under our prefix.
COUNTERS = [
    "prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
    "corrupted_requests", "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
]  # fmt: skip
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cuda_graphs_missing"]
HISTOGRAMS = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens", "request_prefill_kv_computed_tokens",
]  # fmt: skip


def scrape(server: LiveServer) -> str:
    with server.client() as client:
        reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return reply.text


def value(text: str, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    assert found, sample
    return float(found[1])


LABELS = '{engine="0",model_name="tiny"}'


def sample_of(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(name + "{") and 'model_name="tiny"' in line]
    return float(line.rsplit(" ", 1)[1])


def test_every_name_of_the_table_is_exported_with_its_labels(server: LiveServer) -> None:
    text = scrape(server)
    for name in GAUGES:
        sample_of(text, f"longwave:{name}")
    for name in COUNTERS:
        sample_of(text, f"longwave:{name}_total")
    for name in HISTOGRAMS:
        sample_of(text, f"longwave:{name}_count")
    assert 'longwave:attention_kernel_calls_total{engine="0",kernel="cpu_reference",model_name="tiny"} 7.0' in text
    assert "longwave:cache_config_info" in text
    for stage in ("before the engine", "weights", "after it"):
        assert f'longwave:start_seconds{{engine="0",model_name="tiny",stage="{stage}"}}' in text


def test_the_engines_state_is_what_it_last_reported(server: LiveServer) -> None:
    text = scrape(server)
    assert sample_of(text, "longwave:kv_cache_usage_perc") == 0.25
    assert sample_of(text, "longwave:num_requests_waiting") == 2
    assert sample_of(text, "longwave:prefix_cache_hits_total") == 30


def test_a_server_that_takes_no_work_says_so(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample_of(scrape(server), "longwave:server_ready") == 1
    assert sample_of(scrape(server), "longwave:engine_deaths_total") == 0
    monkeypatch.setattr(server.engine, "is_ready", False)
    monkeypatch.setattr(server.engine, "num_deaths", 2)
    assert sample_of(scrape(server), "longwave:server_ready") == 0
    assert sample_of(scrape(server), "longwave:server_live") == 1
    assert sample_of(scrape(server), "longwave:engine_deaths_total") == 2
    monkeypatch.setattr(server.engine, "alive", False)
    assert sample_of(scrape(server), "longwave:server_live") == 0


def test_one_request_is_observed_once_everywhere(server: LiveServer) -> None:
    before = scrape(server)
    server.engine.script = Script(cached=2)
    with server.client() as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": "abcd"})
    after = scrape(server)
    for name in HISTOGRAMS:
        change = 11 if name == "inter_token_latency_seconds" else 1
        assert sample_of(after, f"longwave:{name}_count") - sample_of(before, f"longwave:{name}_count") == change, name
    computed = "longwave:request_prefill_kv_computed_tokens_sum"
    assert sample_of(after, computed) - sample_of(before, computed) == 2


def test_ends_are_counted_by_reason(server: LiveServer) -> None:
    def count(reason: str) -> float:
        found = re.search(
            rf'^longwave:request_success_total{{.*finished_reason="{reason}".*}} (\S+)$', scrape(server), re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    before = {reason: count(reason) for reason in ("stop", "length", "abort", "error")}
    with server.client() as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2})
        server.engine.script = Script(fail_after=1)
        client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        server.engine.script = Script(hold_after=2)
        with client.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}) as reply:
            next(reply.iter_lines())
    wait_until(lambda: count("abort") == before["abort"] + 1)
    assert count("error") == before["error"] + 1
    assert (count("stop"), count("length")) == (before["stop"] + 1, before["length"] + 1)


def test_http_replies_are_counted_by_route_not_by_path(server: LiveServer) -> None:
    with server.client() as client:
        client.get("/v1/models/anything-at-all")
        client.request("BREW", "/pot/of/tea")
    text = scrape(server)
    assert 'http_requests_total{handler="/v1/models/{model:path}",method="GET",status="404"}' in text
    assert 'handler="unmatched",method="other"' in text
    assert "anything-at-all" not in text
    assert "BREW" not in text


def test_what_is_refused_before_its_route_keeps_its_method() -> None:
    with live_server(api_key="a-key") as server, server.client() as client:
        assert client.post("/v1/completions", json={}).status_code == 401
        text = client.get("/metrics", headers={"authorization": "Bearer a-key"}).text
    assert 'http_requests_total{handler="unmatched",method="POST",status="401"} 1.0' in text


def test_a_client_that_leaves_while_it_uploads_is_counted_as_gone(server: LiveServer) -> None:
    sample = 'http_requests_total{handler="unmatched",method="POST",status="499"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head)
    wait_until(lambda: sample in scrape(server))
    assert 'status="0"' not in scrape(server)


def test_a_callers_words_make_no_new_series(server: LiveServer) -> None:
    """Each would stay in memory for ever, and the probes are open to everybody."""
    with server.client() as client:
        replies = [client.request(method, "/health") for method in ("BREW", "MAKE", "BREW2")]
    text = scrape(server)
    assert [reply.status_code for reply in replies] == [405] * 3
    assert 'handler="/health",method="other",status="405"' in text
    assert "BREW" not in text
