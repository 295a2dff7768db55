"""/v1/training on the wire: Tinker's forms, strict fields, futures that can be asked again. The process is scripted."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import MAX_MODEL_LEN, MODEL, LiveServer, live_server

sys.path.append(str(Path(__file__).parent.parent / "training"))  # the process follows the room's own tests' script

from served_training import DATUM, create, ended, error, follow, post, retrieve, training_client, training_server

KEYS = {"me": {"authorization": "Bearer key-1"}, "you": {"authorization": "Bearer key-2"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with training_server(folder, api_key=("key-1", "key-2")) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with training_client(server, headers=KEYS["me"]) as client:
        yield client


@pytest.fixture
def model(client: httpx.Client) -> Iterator[str]:
    model = create(client)
    yield model
    client.delete(f"/models/{model}")


def test_models_are_trained_for_the_length_that_the_engine_serves(model: str, folder: Path) -> None:
    assert json.loads((folder / "arguments").read_bytes())["max_model_len"] == MAX_MODEL_LEN


def test_a_loop_of_calls_has_tinkers_replies(client: httpx.Client, model: str) -> None:
    path = f"longwave://{model}/weights/one"
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            "forward_backward",
            {"data": [DATUM], "loss_fn": "cross_entropy"},
            {
                "loss_fn_output_type": "TorchLossReturn",
                "loss_fn_outputs": [{"logprobs": {"data": [0.0, 0.0, 0.0], "dtype": "float32", "shape": [3]}}],
                "metrics": {"loss:sum": 1.5, "tokens:sum": 3.0},
            },
        ),
        (
            "optim_step",
            {"adam_params": {"learning_rate": 1e-3}},
            {"type": "optim_step", "metrics": {"grad_norm": 2.5, "step": 1.0}},
        ),
        ("save_weights", {"path": "one"}, {"type": "save_weights", "path": path}),
        ("load_weights", {"path": path, "optimizer": True}, {"type": "load_weights", "path": path, "step": 1}),
        (
            "save_weights_for_sampler",
            {"path": "one"},
            {"type": "save_weights_for_sampler", "path": f"longwave://{model}/sampler_weights/one"},
        ),
        (
            "sample",
            {"prompt": [1, 2], "num_samples": 2, "sampling_params": {"max_tokens": 2}},
            {
                "type": "sample",
                "sequences": [{"stop_reason": "length", "tokens": [104, 101], "logprobs": [-0.5, -0.5]}] * 2,
            },
        ),
        ("unload_model", {}, {"type": "unload_model", "model_id": model}),
    ]
    futures = [
        post(client, path, model_id=model, seq_id=number, **body)
        for number, (path, body, _) in enumerate(calls, start=1)
    ]
    for number, (future, (_, _, expected)) in enumerate(zip(futures, calls, strict=True), start=1):
        assert future == {"request_id": f"{model}:{number}", "model_id": model, "seq_id": number}
        assert retrieve(client, future["request_id"]) == expected
        assert retrieve(client, future["request_id"]) == expected  # results are kept


def test_tinkers_own_forms_of_input_are_taken(client: httpx.Client, model: str) -> None:
    chunks = {"chunks": [{"type": "encoded_text", "tokens": [1]}, {"tokens": [2, 3]}]}
    inputs = {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "logprobs": {"data": [-1, -2.5, -3], "dtype": "float32"},
        "advantages": {"data": [1.0, 0.0, -1.0], "dtype": "float32", "shape": [3]},
    }
    config = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}
    body = {"data": [{"model_input": chunks, "loss_fn_inputs": inputs}], "loss_fn": "ppo", "loss_fn_config": config}
    first = post(client, "forward_backward", model_id=model, seq_id=1, **body)
    plain = {"target_tokens": [2, 3, 4], "logprobs": [-1, -2.5, -3], "advantages": [1, 0, -1]}
    body["data"] = [{"model_input": [1, 2, 3], "loss_fn_inputs": plain}]
    assert post(client, "forward_backward", model_id=model, seq_id=1, **body) == first  # the same call
    retrieve(client, first["request_id"])
    assert retrieve(client, post(client, "sample", model_id=model, prompt=chunks)["request_id"])["type"] == "sample"


def test_a_call_that_has_not_ended_says_try_again(client: httpx.Client, model: str) -> None:
    late = post(client, "optim_step", model_id=model, seq_id=2)
    waiting = post(client, "retrieve_future", request_id=late["request_id"])
    assert waiting == {"type": "try_again", "request_id": late["request_id"], "queue_state": "active"}
    first = post(client, "forward_backward", model_id=model, seq_id=1, data=[DATUM])
    assert retrieve(client, late["request_id"])["type"] == "optim_step"
    assert retrieve(client, first["request_id"])["metrics"]["loss:sum"] == 1.5


def test_a_number_belongs_to_one_call(client: httpx.Client, model: str) -> None:
    future = post(client, "optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.5})
    assert post(client, "optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.5}) == future
    told = error(client, "optim_step", 409, model_id=model, seq_id=1, adam_params={"learning_rate": 0.25})
    assert (told["code"], told["param"]) == ("sequence_conflict", "seq_id")


def test_null_is_as_good_as_nothing(client: httpx.Client) -> None:
    model = post(client, "create_model", base_model=MODEL, lora_config=None, seed=1)["model_id"]
    assert post(client, "get_info", model_id=model)["lora_rank"] == 16
    whole = {"data": [1, 0, 2.0], "dtype": "int64"}
    inputs = {**DATUM["loss_fn_inputs"], "weights": whole}  # type: ignore[dict-item]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("forward_backward", {"data": [{**DATUM, "loss_fn_inputs": inputs}]}),
        ("optim_step", {"adam_params": None}),
        ("sample", {"prompt": [1], "sampling_params": None}),
    ]
    for call, body in calls:
        retrieve(client, post(client, call, model_id=model, **body)["request_id"])
    client.delete(f"/models/{model}")


def test_a_failed_call_has_openais_error_shape(client: httpx.Client, model: str, folder: Path) -> None:
    follow(folder, fail="Compute", kind="diverged")
    try:
        future = post(client, "forward_backward", model_id=model, data=[DATUM])
        reply = ended(client, future["request_id"])
    finally:
        follow(folder)
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": "It is so.", "type": "invalid_request_error", "param": None, "code": "training_diverged",
    }  # fmt: skip


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("forward_backward", {"data": []}, "data", "at least 1"),
    ("forward_backward", {"data": [{**DATUM, "more": 1}]}, "data[0].more", "Unrecognized request argument"),
    ("forward_backward", {"data": [DATUM], "loss_fn": "dro"}, "loss_fn", "importance_sampling"),
    ("forward_backward", {"data": [DATUM], "loss_fn": "ppo"}, "data[0].loss_fn_inputs.logprobs", "Missing required"),
    (
        "forward_backward",
        {"data": [{**DATUM, "model_input": [1, 2]}]},
        "data[0].loss_fn_inputs.target_tokens",
        "has 2 tokens in its model_input and 3 numbers",
    ),
    ("forward_backward", {"data": [{**DATUM, "model_input": [1, 2, 100]}]}, "data[0].model_input", "vocabulary of 100"),
    ("forward_backward", {"data": [DATUM], "loss_fn_config": {"clip_low_threshold": 0.5}}, "loss_fn_config", "ppo has"),
    ("forward_backward", {"data": [DATUM], "seq_id": 0}, "seq_id", "greater than or equal to 1"),
    ("forward_backward", {"data": [DATUM], "seq_id": 100}, "seq_id", "too far ahead: the next is 1"),
    ("optim_step", {"adam_params": {"learning_rate": "1"}}, "adam_params.learning_rate", "valid number"),
    ("optim_step", {"adam_params": {"beta3": 1}}, "adam_params.beta3", "Unrecognized request argument"),
    (
        "forward_backward",
        {"data": [{"model_input": [1, 2], "loss_fn_inputs": {
            "target_tokens": [2, 3], "weights": {"data": [1, 0.5], "dtype": "int64"}}}]},
        "data[0].loss_fn_inputs.weights",
        "the dtype is int64, but 0.5 is no whole number",
    ),
    ("save_weights", {"path": "../up"}, "path", "match pattern"),
    ("sample", {"prompt": [100]}, "prompt", "vocabulary of 100"),
    ("sample", {"prompt": [1], "num_samples": 100}, "num_samples", "at most 8"),
    ("sample", {"prompt": [1], "prompt_logprobs": True}, "prompt_logprobs", "not served"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param", "told"), WRONG, ids=[f"{path}-{at}" for at, (path, *_) in enumerate(WRONG)]
)
def test_wrong_calls_are_refused_with_the_fields_name_and_take_no_number(
    client: httpx.Client, model: str, path: str, body: dict[str, Any], param: str, told: str
) -> None:
    refused = error(client, path, 400, model_id=model, **body)
    assert (refused["param"] or "") == param
    assert told in refused["message"]
    assert post(client, "get_info", model_id=model)["next_seq_id"] == 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"base_model": "gpt-5"}, 404, "base_model"),
        ({"base_model": MODEL, "lora_config": {"rank": 32}}, 400, "lora_config.rank"),
        ({"base_model": MODEL, "lora_config": {"rank": 8, "train_unembed": True}}, 400, "lora_config.train_unembed"),
        ({"base_model": MODEL, "lora_config": {"rank": 8, "seed": 1}, "seed": 2}, 400, "seed"),
    ],
)
def test_models_that_cannot_be_made_are_refused(client: httpx.Client, body: Any, status: int, param: str) -> None:
    assert (error(client, "create_model", status, **body)["param"] or "") == param


def test_a_model_is_known_to_its_owner_alone(server: LiveServer, client: httpx.Client, model: str) -> None:
    info = post(client, "get_info", model_id=model)
    assert (info["model_name"], info["lora_rank"], info["status"], info["is_lora"]) == (MODEL, 8, "live", True)
    assert model in [one["model_id"] for one in client.get("/models").json()["data"]]
    with training_client(server, headers=KEYS["you"]) as stranger:
        assert stranger.get("/models").json()["data"] == []
        assert error(stranger, "get_info", 404, model_id=model)["param"] == "model_id"
        assert error(stranger, "optim_step", 404, model_id=model)["param"] == "model_id"
        assert error(stranger, "retrieve_future", 404, request_id=f"{model}:0")["param"] == "request_id"
        assert stranger.delete(f"/models/{model}").status_code == 404


def test_served_weights_are_a_model_of_their_owner_whose_folder_is_not_told(
    server: LiveServer, client: httpx.Client, model: str
) -> None:
    path = retrieve(client, post(client, "save_weights_for_sampler", model_id=model, path="s")["request_id"])["path"]
    (card,) = [
        card for card in httpx.get(f"{server.url}/v1/models", headers=KEYS["me"]).json()["data"] if card["id"] == path
    ]
    assert (card["root"], card["parent"]) == (MODEL, MODEL)
    ask = {"model": path, "prompt": "x"}
    answers = {
        who: httpx.post(f"{server.url}/v1/completions", headers=headers, json=ask).status_code
        for who, headers in KEYS.items()
    }
    assert answers == {"me": 200, "you": 404}
    assert server.engine.requests[-1].adapter == path

    def mine() -> list[Any]:
        return [one for one in client.get("/weights").json()["data"] if model in one["path"]]

    assert [(one["path"], one["kind"], one["served"]) for one in mine()] == [(path, "sampler_weights", True)]
    assert post(client, "delete_weights", path=path) == {"path": path, "deleted": True}
    assert mine() == []
    assert error(client, "delete_weights", 404, path=path)["param"] == "path"


def test_a_deleted_model_is_gone_at_once(client: httpx.Client, model: str) -> None:
    future = post(client, "optim_step", model_id=model, seq_id=2)
    assert client.delete(f"/models/{model}").json() == {"model_id": model, "deleted": True}
    assert "was deleted" in error(client, "retrieve_future", 404, request_id=future["request_id"])["message"]
    assert "was deleted" in error(client, "optim_step", 404, model_id=model)["message"]
    assert post(client, "get_info", model_id=model)["status"] == "ended"


def test_the_server_says_what_it_takes(client: httpx.Client) -> None:
    told = client.get("/get_server_capabilities").json()
    assert told["supported_models"] == [{"model_name": MODEL}]
    assert told["loss_fns"] == ["cross_entropy", "importance_sampling", "ppo"]
    assert (told["max_lora_rank"], told["max_models"]) == (16, 50)


def test_a_model_whose_rank_nobody_named_has_one_that_is_served(tmp_path: Path) -> None:
    with training_server(tmp_path, max_lora_rank=8) as server:
        with training_client(server) as client:
            for lora in ({}, {"lora_config": {}}, {"lora_config": {"alpha": 8}}):
                future = post(client, "create_model", base_model=MODEL, **lora)
                assert retrieve(client, future["request_id"])["type"] == "create_model"
                assert post(client, "get_info", model_id=future["model_id"])["lora_rank"] == 8
            refused = error(client, "create_model", 400, base_model=MODEL, lora_config={"rank": 9})
            assert (refused["param"], "up to rank 8" in refused["message"]) == ("lora_config.rank", True)
        schema = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]["LoraConfigRequest"]
        assert "16, or --max-lora-rank where that is lower" in schema["properties"]["rank"]["description"]


def test_without_the_setting_there_are_no_routes(tmp_path: Path) -> None:
    with live_server(enable_training=False, data_dir=tmp_path) as server:
        reply = httpx.get(f"{server.url}/v1/training/models")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
