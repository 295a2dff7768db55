"""A job's events as server-sent events: the oldest first, as they come, ended by the job's end, resumed where they
broke. Real sockets and trainer processes; engine and trainer follow scripts."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import LIMIT, MAX_MODEL_LEN, MODEL, LiveServer, live_server, wait_until
from working import CONFIG, PAIR, script

from models.training import TrainingPlan
from server.equal_parts import EqualParts
from server.finetune import TrainerConfig
from server.settings import Settings

pytestmark = pytest.mark.timeout(180)
JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(Settings, "trainer_config", lambda _: TrainerConfig(MODEL, **CONFIG))
    with live_server(data_dir=tmp_path, ping_interval=0.5) as server:
        yield server


def create(client: httpx.Client, steps: int = 4) -> str:
    file = client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", PAIR * 2)}).json()["id"]
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": steps, "batch_size": 2}}}
    reply = client.post(JOBS, json={"model": MODEL, "training_file": file, "method": method})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def blocks(reply: httpx.Response) -> Iterator[tuple[str | None, Any]]:
    """(id, data) of every event; pings left out."""
    name = None
    for line in reply.iter_lines():
        if line.startswith("id: "):
            name = line.removeprefix("id: ")
        elif line.startswith("data: "):
            text = line.removeprefix("data: ")
            yield name, text if text == "[DONE]" else json.loads(text)
            name = None


def test_a_job_is_trained_for_the_length_that_the_engine_serves(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch)
    with server.client() as client:
        job = create(client)
        wait_until(lambda: client.get(f"{JOBS}/{job}").json()["status"] in ("succeeded", "failed"))
    plan = TrainingPlan.from_json((tmp_path / "plan").read_bytes())
    assert (plan.max_length, plan.max_model_len) == (2, MAX_MODEL_LEN)


def test_a_stream_tells_everything_in_order_and_ends_with_the_job(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = script(tmp_path, monkeypatch, hold_at=3)
    with server.client() as client:
        job = create(client)
        with client.stream("GET", f"{JOBS}/{job}/events", headers={"accept": "text/event-stream"}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            told = []
            for name, data in blocks(reply):
                told.append((name, data))
                if data != "[DONE]" and data["message"].startswith("Step 2/4"):
                    go.touch()  # what came until now, came while the job ran
        assert told[-1] == (None, "[DONE]")
        listed = client.get(f"{JOBS}/{job}/events", params={"limit": 100}).json()["data"][::-1]
        assert [data for _, data in told[:-1]] == listed
        assert [name for name, _ in told[:-1]] == [event["id"] for event in listed]
        assert listed[-1]["message"] == "The job has successfully completed"
        metrics = next(event["data"] for event in listed if event["type"] == "metrics")
        assert type(metrics["step"]) is int
        assert metrics == {"step": 1, "train_loss": 2.0, "train_mean_token_accuracy": 0.5, "total_steps": 4}
        tuned = client.get(f"{JOBS}/{job}").json()["fine_tuned_model"]
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL, tuned]
        checkpoints = client.get(f"{JOBS}/{job}/checkpoints").json()["data"]
        assert [point["step_number"] for point in checkpoints] == [4, 2]
        assert checkpoints[0]["fine_tuned_model_checkpoint"] == f"{tuned}:ckpt-step-4"
        assert type(checkpoints[0]["metrics"]["step"]) is int
        assert checkpoints[0]["metrics"] == {"step": 4, "train_loss": 0.5, "train_mean_token_accuracy": 0.5}


@pytest.mark.parametrize("way", ["header", "query"])
def test_a_client_that_comes_back_misses_nothing_and_hears_nothing_twice(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    script(tmp_path, monkeypatch)
    with server.client() as client:
        job = create(client)
        address = f"{JOBS}/{job}/events?stream=true"
        with client.stream("GET", address) as reply:
            heard = [next(block) for block in [blocks(reply)] for _ in range(3)]
        last = str(heard[-1][0])
        headers = {"last-event-id": last} if way == "header" else {}
        with client.stream("GET", address + (f"&after={last}" if way == "query" else ""), headers=headers) as reply:
            heard += list(blocks(reply))
        listed = client.get(f"{JOBS}/{job}/events", params={"limit": 100}).json()["data"][::-1]
        assert [name for name, _ in heard[:-1]] == [event["id"] for event in listed]
        assert heard[-1][1] == "[DONE]"


def test_the_stream_of_a_job_that_has_ended_is_whole_and_ends_at_once(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, hold_at=1)
    with server.client() as client:
        job = create(client)
        client.post(f"{JOBS}/{job}/cancel")
        with client.stream("GET", f"{JOBS}/{job}/events?stream=true") as reply:
            *events, end = blocks(reply)
        assert events[-1][1]["message"] == "The job was cancelled"
        assert end == (None, "[DONE]")


def test_an_unknown_event_or_job_is_404_before_the_stream_begins(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, hold_at=1)
    with server.client() as client:
        job = create(client)
        reply = client.get(f"{JOBS}/{job}/events?stream=true", headers={"last-event-id": "ftevent-none"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "invalid_request_error")
        assert client.get(f"{JOBS}/ftjob-none/events?stream=true").status_code == 404


def test_a_quiet_stream_is_kept_alive(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, hold_at=1)
    with server.client() as client:
        job = create(client)
        with client.stream("GET", f"{JOBS}/{job}/events?stream=true") as reply:
            pings = 0
            for line in reply.iter_lines():
                pings += line == ":"
                if pings == 3:
                    break
        assert pings == 3


def test_too_many_streams_are_503_and_one_that_is_left_gives_its_place_back(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, hold_at=1)
    with server.client() as client, server.client() as other:
        job = create(client)
        monkeypatch.setattr(EqualParts, "has_room", lambda parts, _owner, more: parts.held + more <= 1)
        address = f"{JOBS}/{job}/events?stream=true"
        with client.stream("GET", address) as reply:
            received = reply.iter_lines()  # kept: dropping it would hang up
            next(received)
            refused = other.get(address)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        wait_until(lambda: _opens(other, address))  # the first one's place is free again


def _opens(client: httpx.Client, address: str) -> bool:
    with client.stream("GET", address) as reply:
        return reply.status_code == 200


def test_a_drain_pauses_the_job_and_ends_its_streams_without_done(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = script(tmp_path, monkeypatch, hold_at=3)
    with server.client() as client:
        job = create(client)
        with client.stream("GET", f"{JOBS}/{job}/events?stream=true") as reply:
            events = blocks(reply)
            for _, data in events:
                if data["message"].startswith("Step 2/4"):
                    break
            drained = threading.Thread(target=lambda: server.run(server.lifecycle.drain()))
            drained.start()
            wait_until(lambda: server.lifecycle.phase == "draining")
            with server.client() as other:
                refused = other.post(JOBS, json={"model": MODEL, "training_file": "file-1"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_draining")
            go.touch()
            rest = [data for _, data in events]
        assert rest[-1]["error"]["code"] == "server_is_draining"
        drained.join(LIMIT)
        assert not drained.is_alive()
        assert client.get(f"{JOBS}/{job}").json()["status"] == "queued"


def test_metrics_count_the_jobs(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch)
    with server.client() as client:
        job = create(client)
        wait_until(lambda: client.get(f"{JOBS}/{job}").json()["status"] == "succeeded")
        wait_until(
            lambda: 'longwave:finetune_jobs{engine="0",model_name="tiny",status="succeeded"} 1.0' in scrape(client)
        )
        text = scrape(client)
        assert 'longwave:finetune_steps_total{engine="0",model_name="tiny"} 4.0' in text
        assert 'longwave:finetune_jobs_ended_total{engine="0",model_name="tiny",status="succeeded"} 1.0' in text


def scrape(client: httpx.Client) -> str:
    return client.get("/metrics").text
