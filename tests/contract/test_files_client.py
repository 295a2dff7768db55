"""/v1/files through the official client, unchanged, on a real socket. No engine: files do not wait for a model."""

import asyncio
import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from test_openapi import AbsentEngine

from server.app import create_app
from server.lifecycle import Lifecycle
from server.process import Server, uvicorn_config
from server.settings import Settings

LIMIT = 30.0
CONTENT = b"".join(
    json.dumps(
        {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}!"}]}
    ).encode()
    + b"\n"
    for number in range(200)
)


class LoadingEngine(AbsentEngine):
    async def ready(self) -> Any:
        await asyncio.Event().wait()


@contextmanager
def serving(folder: Path, **changes: Any) -> Iterator[str]:
    lifecycle = Lifecycle(Settings(data_dir=folder, **changes), LoadingEngine(), object)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn_config(create_app(lifecycle), lifecycle.settings))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive()


@contextmanager
def connected(url: str, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=2, timeout=LIMIT) as client:
        yield client


@pytest.fixture
def client(tmp_path: Path) -> Iterator[openai.OpenAI]:
    with serving(tmp_path) as url, connected(url) as client:
        yield client


def create(client: openai.OpenAI, content: bytes = CONTENT, **options: Any) -> Any:
    return client.files.create(file=("train.jsonl", content), **{"purpose": "fine-tune", **options})


def test_a_file_lives_from_create_to_delete(client: openai.OpenAI, tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    path = tmp_path / "sets" / "mine.jsonl"
    path.write_bytes(CONTENT)
    with path.open("rb") as opened:
        made = client.files.create(file=opened, purpose="fine-tune")
    assert (made.object, made.filename, made.bytes) == ("file", "mine.jsonl", len(CONTENT))
    assert (made.purpose, made.status, made.expires_at, made.status_details) == ("fine-tune", "processed", None, None)
    assert made.id.startswith("file-")
    assert client.files.retrieve(made.id) == made
    assert [file.id for file in client.files.list()] == [made.id]
    assert client.files.content(made.id).content == CONTENT
    assert client.files.wait_for_processing(made.id) == made

    gone = client.files.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "file", True)
    assert list(client.files.list()) == []
    for act in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as error:
            act(made.id)
        assert (error.value.type, error.value.param, error.value.code) == ("invalid_request_error", "id", None)
        assert error.value.body["message"] == f"No such File object: {made.id}"


def test_every_kind_of_file_the_client_sends_is_taken(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(CONTENT)
    for file in (CONTENT, path, io.BytesIO(CONTENT), ("n.jsonl", CONTENT), ("n.jsonl", CONTENT, "application/jsonl")):
        assert client.files.create(file=file, purpose="fine-tune").bytes == len(CONTENT)


def test_the_client_walks_all_pages_in_both_orders(client: openai.OpenAI) -> None:
    ids = [create(client).id for _ in range(7)]
    assert [file.id for file in client.files.list(limit=3)] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    page = client.files.list(limit=3, order="asc", after=ids[0], purpose="fine-tune")
    assert [file.id for file in page.data] == ids[1:4]
    assert page.has_more
    assert (page.first_id, page.last_id) == (ids[1], ids[3])  # not in the client's model, but on the wire
    assert list(client.files.list(purpose="batch")) == []


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": 0}, "limit"), ({"limit": 10_001}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order")],
)
def test_a_page_out_of_bounds_is_400_with_its_name(client: openai.OpenAI, query: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.files.list(**query)
    assert error.value.param == param
    assert f"'{param}'" in error.value.message


def test_a_page_after_no_file_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.files.list(after="file-none")
    assert error.value.param == "after"


def test_expires_after_is_openais(client: openai.OpenAI) -> None:
    made = create(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    with pytest.raises(openai.BadRequestError) as error:
        create(client, expires_after={"anchor": "created_at", "seconds": 60})
    assert error.value.param == "expires_after[seconds]"


@pytest.mark.parametrize("purpose", ["batch", "assistants", "vision", "user_data", "evals", "other"])
def test_other_purposes_are_refused_by_name(client: openai.OpenAI, purpose: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        create(client, purpose=purpose)
    assert (error.value.code, error.value.param) == ("unsupported_parameter", "purpose")
    assert f"'{purpose}'" in error.value.message


def test_a_bad_line_is_400_with_its_number_and_nothing_is_kept(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        create(client, CONTENT + b'{"messages": [{"role": "tool", "content": "x"}]}\n')
    assert (error.value.code, error.value.param) == ("invalid_file", "file")
    assert "Line 201: messages[0] belongs to a tool call: tools are not served." in error.value.message
    assert list(client.files.list()) == []


def test_a_file_too_large_is_413(tmp_path: Path) -> None:
    with serving(tmp_path, max_file_bytes=1000) as url, connected(url) as client:
        with pytest.raises(openai.APIStatusError) as error:
            create(client)
        assert (error.value.status_code, error.value.code) == (413, "payload_too_large")


def test_a_full_quota_is_429_and_is_not_tried_again(tmp_path: Path) -> None:
    with serving(tmp_path, max_files=1) as url, connected(url) as client:
        made = create(client)
        sent: list[Any] = []
        client._client.event_hooks["request"].append(sent.append)
        with pytest.raises(openai.RateLimitError) as error:
            create(client)
        assert (error.value.type, error.value.code, len(sent)) == ("insufficient_quota", "insufficient_quota", 1)
        client.files.delete(made.id)
        assert create(client).id != made.id


def test_another_keys_files_do_not_exist_and_outlive_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, api_key="key-a,key-b") as url, connected(url, "key-a") as a, connected(url, "key-b") as b:
        made = create(a)
        assert list(b.files.list()) == []
        for act in (b.files.retrieve, b.files.content, b.files.delete):
            with pytest.raises(openai.NotFoundError) as error:
                act(made.id)
            assert error.value.body["message"] == f"No such File object: {made.id}"
        with pytest.raises(openai.NotFoundError):
            b.files.list(after=made.id)
        with connected(url, "key-c") as stranger, pytest.raises(openai.AuthenticationError):
            create(stranger)
    with serving(tmp_path, api_key="key-a,key-b") as url, connected(url, "key-a") as a:
        assert [file.id for file in a.files.list()] == [made.id]


def test_content_is_an_attachment_under_the_servers_name(client: openai.OpenAI) -> None:
    made = client.files.create(file=("<script>.html", CONTENT), purpose="fine-tune")
    headers = client.files.with_raw_response.content(made.id).headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"] == f'attachment; filename="{made.id}.jsonl"'
    assert headers["x-content-type-options"] == "nosniff"
    assert int(headers["content-length"]) == len(CONTENT)


def test_the_routes_are_described_with_their_failures() -> None:
    schema = create_app(Lifecycle(Settings(), AbsentEngine(), object)).openapi()
    upload = schema["paths"]["/v1/files"]["post"]
    form = upload["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert (form["required"], form["additionalProperties"]) == (["file", "purpose"], False)
    assert {"400", "401", "408", "413", "415", "429", "503", "507"} <= set(upload["responses"])
    assert set(schema["paths"]["/v1/files/{file_id}"]) == {"get", "delete"}
    assert set(schema["paths"]["/v1/files/{file_id}/content"]) == {"get"}
