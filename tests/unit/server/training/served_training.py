"""/v1/training on a real socket, over a process that follows the script in its folder, and a caller of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_training import write_script
from scripted_engine import MODEL, LiveServer, live_server

from server.api import training as routes
from server.settings import Settings
from server.training import TrainingConfig

LORA = {"rank": 8}
DATUM = {"model_input": [1, 2, 3], "loss_fn_inputs": {"target_tokens": [2, 3, 4], "weights": [0, 1, 1.5]}}


@contextmanager
def training_server(folder: Path, **flags: Any) -> Iterator[LiveServer]:
    make = Settings.training_config

    def scripted(settings: Settings) -> TrainingConfig:
        return replace(make(settings), worker="scripted_training_worker", max_models=50)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "training_config", scripted)
        patch.setattr(routes, "WAIT_SECONDS", 0.3)
        patch.setenv("TRAINING_SCRIPT", str(folder / "script.json"))
        follow(folder)
        with live_server(data_dir=folder / "data", **flags) as server:
            yield server


def follow(folder: Path, **script: Any) -> None:
    write_script(folder, script)


def training_client(server: LiveServer, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/v1/training", timeout=60, **options)


def post(client: httpx.Client, call: str, /, **body: Any) -> Any:
    reply = client.post(f"/{call}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def error(client: httpx.Client, call: str, status: int, /, **body: Any) -> Any:
    reply = client.post(f"/{call}", json=body)
    assert reply.status_code == status, reply.text
    told = reply.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    return told


def ended(client: httpx.Client, request_id: str) -> httpx.Response:
    """The reply that is not try_again."""
    while True:
        reply = client.post("/retrieve_future", json={"request_id": request_id})
        if reply.status_code != 200 or reply.json().get("type") != "try_again":
            return reply


def retrieve(client: httpx.Client, request_id: str) -> Any:
    reply = ended(client, request_id)
    assert reply.status_code == 200, reply.text
    return reply.json()


def create(client: httpx.Client) -> str:
    future = post(client, "create_model", base_model=MODEL, lora_config=LORA)
    result = retrieve(client, future["request_id"])
    assert result == {"type": "create_model", "model_id": future["model_id"], "trainable_parameters": 10}
    return str(future["model_id"])
