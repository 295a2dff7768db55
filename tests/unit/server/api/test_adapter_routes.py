"""Adapters as models: listed, named in requests, loaded and unloaded by vLLM's routes, seen by their owner only."""

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from scripted_engine import MAX_MODEL_LEN, MODEL, LiveServer, ScriptedEngine, live_server, settings, wait_until

from server.engine.adapter_registry import AdapterInfo
from server.errors import EngineUnavailable, InvalidAdapter, QuotaExceeded
from server.files.folder import make_private
from server.finetune.store import JobStore
from server.lifecycle import NOT_SERVED, WHOLE_MODELS, Phase

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def lora_server(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(
        enable_lora=True, allow_runtime_lora_updating=True, lora_dir=tmp_path, data_dir=tmp_path / "data"
    ) as server:
        yield server


def load(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": "fr", "lora_path": "french", **body})


def error(reply: httpx.Response) -> tuple[int, str | None, str | None]:
    return reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]


def test_an_adapter_is_a_model_from_loading_to_unloading(lora_server: LiveServer, tmp_path: Path) -> None:
    with lora_server.client() as client, openai.OpenAI(base_url=f"{lora_server.url}/v1", api_key="x") as official:
        reply = load(client)
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'fr' added successfully.")
        assert lora_server.engine.infos["fr"].within == str(tmp_path)
        base, adapter = official.models.list().data
        assert (base.id, base.to_dict()["parent"]) == (MODEL, None)
        card = adapter.to_dict()
        assert (card["id"], card["parent"], card["root"]) == ("fr", MODEL, "french")
        assert card["max_model_len"] == MAX_MODEL_LEN
        assert official.models.retrieve("fr") == adapter
        answer = official.chat.completions.create(model="fr", messages=MESSAGES)  # type: ignore[arg-type]
        assert answer.model == "fr"
        official.completions.create(model="fr", prompt="a", n=2)
        official.completions.create(model=MODEL, prompt="a")
        assert [request.adapter for request in lora_server.engine.requests] == ["fr", "fr", "fr", None]
        assert client.post("/tokenize", json={"model": "fr", "prompt": "a"}).status_code == 200
        reply = client.post("/v1/unload_lora_adapter", json={"lora_name": "fr"})
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'fr' removed successfully.")
        assert [model.id for model in official.models.list().data] == [MODEL]
        with pytest.raises(openai.NotFoundError, match="`fr` does not exist"):
            official.chat.completions.create(model="fr", messages=MESSAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fr", "longwave://train-1/weights/mine"])
def test_an_adapter_is_not_trained_further_by_a_job(lora_server: LiveServer, name: str) -> None:
    with lora_server.client() as client:
        lora_server.engine.infos[name] = AdapterInfo(name, "french", "", None, "digest", 8, 1, None, 1_700_000_000)
        assert client.post("/v1/completions", json={"model": name, "prompt": "a"}).status_code == 200
        pair = b'{"prompt": "a", "completion": "b"}\n'
        file = client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", pair)}).json()["id"]
        asked = {"model": name, "training_file": file}
        assert error(client.post("/v1/fine_tuning/jobs", json=asked)) == (400, "unsupported_parameter", "model")
        assert client.post("/v1/fine_tuning/jobs", json={**asked, "model": MODEL}).status_code == 200


def test_a_name_is_loaded_over_only_when_asked_for(lora_server: LiveServer) -> None:
    with lora_server.client() as client:
        load(client)
        refused = load(client)
        assert error(refused) == (409, "adapter_exists", "lora_name")
        assert refused.headers["x-should-retry"] == "false"
        assert load(client, load_inplace=True, lora_path="other").status_code == 200
        assert lora_server.engine.infos["fr"].folder == "other"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"lora_name": MODEL}, (409, "adapter_exists", "lora_name")),
        ({"lora_name": "ft:tiny:x:1"}, (400, "invalid_adapter", "lora_name")),
        ({"lora_name": "longwave://train-1/weights/x"}, (400, "invalid_adapter", "lora_name")),
        ({"lora_name": ""}, (400, None, "lora_name")),
        ({"lora_name": None}, (400, None, "lora_name")),
        ({"lora_path": ""}, (400, None, "lora_path")),
        ({"lora_path": "x" * 5000}, (400, None, "lora_path")),
        ({"load_inplace": "yes"}, (400, None, "load_inplace")),
        ({"is_3d_lora_weight": True}, (400, "unsupported_parameter", "is_3d_lora_weight")),
        ({"unknown": 1}, (400, None, "unknown")),
    ],
)
def test_wrong_commands_are_refused(lora_server: LiveServer, body: dict[str, Any], expected: Any) -> None:
    with lora_server.client() as client:
        assert error(load(client, **body)) == expected
    assert not lora_server.engine.infos


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (InvalidAdapter("wrong"), (400, "invalid_adapter", "lora_path")),
        (InvalidAdapter("no name", param="lora_name"), (400, "invalid_adapter", "lora_name")),
        (QuotaExceeded("full"), (429, "insufficient_quota", None)),
        (EngineUnavailable("away"), (503, "engine_unavailable", None)),
    ],
)
def test_the_engines_refusals_reach_the_caller(lora_server: LiveServer, refusal: Any, expected: Any) -> None:
    lora_server.engine.refusal = refusal
    with lora_server.client() as client:
        assert error(load(client)) == expected


def test_unloading_what_is_not_there_is_404(lora_server: LiveServer) -> None:
    with lora_server.client() as client:
        for name, expected in (
            ("fr", (404, "model_not_found", "lora_name")),
            ("ft:tiny:x:1", (400, "invalid_adapter", "lora_name")),
            ("longwave://train-1/weights/x", (400, "invalid_adapter", "lora_name")),
        ):
            assert error(client.post("/v1/unload_lora_adapter", json={"lora_name": name})) == expected


def test_what_belongs_to_a_key_is_not_unloaded_by_the_route_whatever_its_name(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"enable_lora": True, "allow_runtime_lora_updating": True, "lora_dir": tmp_path}
    names = ("longwave://train-1/sampler_weights/x", "ft:tiny:x:1", "plain")
    with live_server(api_key="one,two", data_dir=tmp_path / "data", **flags) as server:
        for name in names:
            server.run(server.lifecycle.load_adapter(name, tmp_path, "owner"))
        server.run(server.lifecycle.load_adapter("everybodys", tmp_path))
        with server.client(headers={"authorization": "Bearer two"}) as client:
            for name in names:
                reply = client.post("/v1/unload_lora_adapter", json={"lora_name": name})
                assert reply.status_code in (400, 404)
            unknown = client.post("/v1/unload_lora_adapter", json={"lora_name": "unknown"})
            assert error(reply) == error(unknown) == (404, "model_not_found", "lora_name")
            assert client.post("/v1/unload_lora_adapter", json={"lora_name": "everybodys"}).status_code == 200
        assert tuple(server.engine.infos) == names


def test_the_routes_are_not_there_without_the_setting(server: LiveServer) -> None:
    with server.client() as client:
        assert error(load(client)) == (404, "unknown_url", None)
        assert "--allow-runtime-lora-updating" in load(client).json()["error"]["message"]
        unload = client.post("/v1/unload_lora_adapter", json={"lora_name": "fr"})
        assert error(unload) == (404, "unknown_url", None)


def test_a_server_that_stops_or_starts_loads_nothing(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.load.clear()
    flags: dict[str, Any] = {"enable_lora": True, "allow_runtime_lora_updating": True, "lora_dir": tmp_path}
    with (
        live_server(wait=False, engine=engine, data_dir=tmp_path / "data", **flags) as server,
        server.client() as client,
    ):
        assert error(load(client)) == (503, "engine_unavailable", None)
        engine.load.set()
        wait_until(lambda: server.lifecycle.is_ready)
        server.run(server.lifecycle.drain())
        assert error(load(client)) == (503, "server_is_draining", None)
    assert not engine.infos


def test_an_adapter_of_one_key_does_not_exist_for_another() -> None:
    with live_server(api_key="one,two") as server:
        owners = {}
        for key in ("one", "two"):
            with server.client(headers={"authorization": f"Bearer {key}"}) as client:
                reply = client.post("/v1/completions", json={"model": "mine", "prompt": "x"})
                assert reply.status_code == 404
                owners[key] = hashlib.sha256(f"owner:{key}".encode()).hexdigest()
        for key in ("one", "two"):
            server.run(server.lifecycle.load_adapter(f"ft:tiny:{key}:1", Path("/data"), owners[key]))
        server.run(server.lifecycle.load_adapter("everybodys", Path("/folder")))
        with server.client(headers={"authorization": "Bearer one"}) as client:
            listed = client.get("/v1/models").json()["data"]
            assert [card["id"] for card in listed] == [MODEL, "ft:tiny:one:1", "everybodys"]
            assert [card["root"] for card in listed] == [MODEL, MODEL, "/folder"]
            for path, status in (("ft:tiny:one:1", 200), ("ft:tiny:two:1", 404), ("everybodys", 200)):
                assert client.get(f"/v1/models/{path}").status_code == status
                reply = client.post("/v1/completions", json={"model": path, "prompt": "x"})
                assert reply.status_code == status
                assert client.post("/tokenize", json={"model": path, "prompt": "x"}).status_code == status
            assert client.delete("/v1/models/ft:tiny:two:1").status_code == 404


def test_a_fine_tuned_model_that_cannot_be_deleted_is_served_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    make_private(tmp_path / "finetune")
    store = JobStore(tmp_path / "finetune" / "jobs.sqlite3")
    row = ("ft:tiny::1", "", "ftjob-1", settings().model, 1.0)
    store.connection.execute("INSERT INTO adapters VALUES (?, ?, ?, ?, ?)", row)
    store.close()
    with live_server(data_dir=tmp_path) as server, server.client() as client:
        assert [*server.engine.infos] == ["ft:tiny::1"]
        with monkeypatch.context() as patch:
            patch.setattr(JobStore, "remove_adapter", full)
            assert error(client.delete("/v1/models/ft:tiny::1")) == (507, "insufficient_storage", None)
        assert [*server.engine.infos] == ["ft:tiny::1"]
        assert client.delete("/v1/models/ft:tiny::1").json()["deleted"]
        assert not server.engine.infos


def test_only_models_that_were_fine_tuned_here_are_deleted(lora_server: LiveServer) -> None:
    with lora_server.client() as client:
        load(client)
        for name in (MODEL, "fr"):
            assert error(client.delete(f"/v1/models/{name}")) == (400, None, "model")
        assert error(client.delete("/v1/models/nothing")) == (404, "model_not_found", "model")
        assert error(client.delete("/v1/models/ft:tiny:x:1")) == (404, "model_not_found", "model")
        told = client.get("/v1/models/ft:tiny:x:1:ckpt-step-4").json()["error"]["message"]
        assert told.endswith("(Checkpoints are not served, only the finished model is.)")
    assert "fr" in lora_server.engine.infos


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({}, WHOLE_MODELS),
        ({"fine_tuning_max_full_parameters": 0}, NOT_SERVED),
        ({"enable_fine_tuning": False}, "access to it."),
    ],
)
def test_of_a_fine_tuned_model_that_is_not_here_its_owner_is_told_where_to_look(
    settings: dict[str, Any], hint: str, tmp_path: Path
) -> None:
    with (
        live_server(data_dir=tmp_path, **{"enable_fine_tuning": True, **settings}) as server,
        server.client() as client,
    ):
        assert client.get("/v1/models/ft:tiny:x:1").json()["error"]["message"].endswith(hint)


def test_of_a_fine_tuned_model_that_cannot_be_served_its_owner_is_told_why(tmp_path: Path) -> None:
    with live_server(data_dir=tmp_path, enable_fine_tuning=True) as server, server.client() as client:
        known = {"ft:tiny:x:1": "its weights are not what they were"}
        server.lifecycle.why_not_served = lambda name, _: known.get(name)
        for ask in (
            client.get("/v1/models/ft:tiny:x:1"),
            client.post("/v1/completions", json={"model": "ft:tiny:x:1", "prompt": "a"}),
        ):
            assert (ask.status_code, ask.json()["error"]["code"]) == (404, "model_not_found")
            assert ask.json()["error"]["message"].endswith(
                " It is finished and kept, but not served now: its weights are not what they were"
            )
        assert client.get("/v1/models/ft:tiny:x:2").json()["error"]["message"].endswith(WHOLE_MODELS)


def test_adapters_of_the_settings_are_loaded_before_the_server_is_ready(tmp_path: Path) -> None:
    modules = f"a={tmp_path / 'a'},b={tmp_path / 'b=c'}"
    with live_server(enable_lora=True, lora_modules=modules) as server, server.client() as client:
        assert [(info.name, info.folder) for info in server.engine.adapters()] == [
            ("a", str(tmp_path / "a")),
            ("b", str(tmp_path / "b=c")),
        ]
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [MODEL, "a", "b"]


def test_an_adapter_of_the_settings_that_cannot_be_served_stops_the_start(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    engine.refusal = InvalidAdapter("The adapter `a` cannot be loaded: there is no folder /a.")
    with live_server(wait=False, engine=engine, enable_lora=True, lora_modules="a=/a") as server:
        wait_until(lambda: server.lifecycle.phase is Phase.FAILED)
    assert "there is no folder /a" in caplog.text


def test_what_adapters_do_is_in_the_metrics_and_names_are_those_that_everybody_may_know() -> None:
    owned = ("ft:tiny:x:1", "longwave://train-1/current/1", "longwave://train-1/weights/x")
    with live_server(api_key="one,two") as server:
        for name in "abc":
            server.run(server.lifecycle.load_adapter(name, Path("/folder")))
        for name in owned:
            server.run(server.lifecycle.load_adapter(name, Path("/folder"), "owner"))
        assert server.engine.stats is not None
        server.engine.stats = msgspec.structs.replace(
            server.engine.stats,
            max_loras=4,
            running_adapters=("a", "b", *owned[:2]),
            waiting_adapters=("c", owned[2], "unloaded"),
            adapter_placements=7,
        )
        with server.client(headers={"authorization": "Bearer two"}) as client:
            text = client.get("/metrics").text
    labels = 'engine="0",max_lora="4",model_name="tiny",running_lora_adapters="a,b",waiting_lora_adapters="c"'
    assert f"longwave:lora_requests_info{{{labels}}}" in text
    for state in ("running", "waiting"):
        assert f'longwave:lora_owned_adapters{{engine="0",model_name="tiny",state="{state}"}} 2.0' in text
    assert 'longwave:lora_placements_total{engine="0",model_name="tiny"} 7.0' in text
    assert not any(name in text for name in (*owned, "unloaded"))
