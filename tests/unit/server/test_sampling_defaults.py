"""The sampling that a model's authors ask for, where a request names none."""

from typing import Any

import pytest
from scripted_engine import ScriptedEngine, live_server, wait_until

from models.batch import SamplingParams

ASKED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def asked_for(body: dict[str, Any], **changes: Any) -> SamplingParams:
    engine = ScriptedEngine()
    engine.sampling_defaults = ASKED
    with live_server(engine=engine, **changes) as server, server.client() as client:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        assert client.post(path, json=body).status_code == 200
    return engine.requests[0].sampling


@pytest.mark.parametrize("body", [CHAT, {"model": "tiny", "prompt": "hi"}])
def test_a_request_that_names_none_has_the_models(body: dict[str, Any]) -> None:
    got = asked_for(body)
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.6, 0.9, 20, 0.0, 1.0)


def test_what_a_request_names_counts_zero_too() -> None:
    got = asked_for({**CHAT, "temperature": 0, "top_k": -1})
    assert (got.temperature, got.top_p, got.top_k) == (0.0, 0.9, 0)


def test_vllm_means_neutral() -> None:
    got = asked_for(CHAT, generation_config="vllm")
    assert (got.temperature, got.top_p, got.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    "wrong", [{"temperature": 5.0}, {"top_p": -0.1}, {"top_k": 0.5}, {"repetition_penalty": 0.001}]
)
def test_sampling_that_no_request_could_ask_for_fails_the_start(
    wrong: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine()
    engine.sampling_defaults = wrong
    with live_server(wait=False, engine=engine) as server:
        wait_until(lambda: server.lifecycle.phase == "failed")
    assert f"{next(iter(wrong))} {next(iter(wrong.values()))}: Input should be" in caplog.text
    assert "--generation-config vllm" in caplog.text
