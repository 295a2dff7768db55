"""Uploads over real sockets: slow and vanishing clients, early refusals, many at once, and memory that stays flat."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from scripted_engine import LIMIT, LiveServer, live_server, wait_until
from training_files import CHAT, CONTENT_TYPE, LIMITS, PAIR, body, kept, part, upload

from server.app import create_app
from server.files import receiving
from server.files.store import FileStore
from server.files.upload import Upload
from server.lifecycle import Phase

PAUSE = 0.3


@pytest.fixture
def uploads(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(data_dir=tmp_path, max_file_bytes=2**28) as server:
        yield server


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "PIECE_BYTES", 1000)


def post(server: LiveServer, sent: bytes, **headers: str) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/files", content=sent, headers={"content-type": CONTENT_TYPE, **headers})


def listed(server: LiveServer) -> list[str]:
    with server.client() as client:
        return [file["id"] for file in client.get("/v1/files").json()["data"]]


def connect(server: LiveServer, length: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT)
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {length}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def test_an_upload_may_be_larger_than_other_bodies(tmp_path: Path) -> None:
    with live_server(data_dir=tmp_path, max_body_bytes=2048) as server:
        reply = post(server, body(PAIR * 1000))
        assert (reply.status_code, reply.json()["bytes"]) == (200, len(PAIR) * 1000)
        with server.client() as client:
            for path in ("/v1/files/", "/v1/files/x", "/v1/completions"):
                assert client.post(path, content=b"x" * 4096).status_code == 413, path
            assert client.put("/v1/files", content=b"x" * 4096).status_code == 413


@pytest.mark.parametrize("chunked", [True, False])
def test_a_file_over_the_limit_is_413_before_all_of_it_came(tmp_path: Path, chunked: bool) -> None:
    with live_server(data_dir=tmp_path, max_file_bytes=1000) as server:
        sent = body(PAIR * 40_000)
        with server.client() as client:
            content = iter([sent[:5000], sent[5000:]]) if chunked else sent
            reply = client.post("/v1/files", content=content, headers={"content-type": CONTENT_TYPE})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (413, "payload_too_large", "file")
        assert error["message"] == "The file is larger than 1000 bytes."
        assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 415),
        ({"content-type": ""}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-type": "multipart/form-data"}, 400),
        ({"content-type": "multipart/form-data; boundary=" + "x" * 5000}, 400),
    ],
)
def test_bodies_that_are_no_form_are_refused(
    uploads: LiveServer, tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    reply = post(uploads, body(PAIR), **headers)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert kept(tmp_path) == []


def test_the_first_bad_line_ends_an_upload_that_still_comes(
    uploads: LiveServer, tmp_path: Path, small_pieces: None
) -> None:
    sent = part("purpose", b"fine-tune") + part("file", CHAT * 100 + b"[]\n" + CHAT * 100, "x")
    with connect(uploads, 10_000_000) as connection:
        connection.sendall(sent)
        reply = connection.recv(65536)
        while b"\r\n\r\n" not in reply or b"}" not in reply:
            reply += connection.recv(65536)
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in reply
        assert b"Line 101: it is an array" in reply
    wait_until(lambda: kept(tmp_path) == [])


def test_a_client_that_vanishes_leaves_nothing(uploads: LiveServer, tmp_path: Path, small_pieces: None) -> None:
    sent = body(PAIR * 1000)
    for cut in (100, 5000, len(sent) - 1):
        connection = connect(uploads, len(sent))
        connection.sendall(sent[:cut])
        wait_until(lambda: kept(tmp_path))
        connection.close()
        wait_until(lambda: kept(tmp_path) == [])
    assert listed(uploads) == []
    assert post(uploads, sent).status_code == 200


def test_a_slow_client_is_waited_for_while_it_sends(tmp_path: Path, small_pieces: None) -> None:
    """Every piece is on the disk before the next one is sent: no clock is needed."""
    sent = body(PAIR * 200)
    with live_server(data_dir=tmp_path) as server, connect(server, len(sent)) as connection:
        for start in range(0, len(sent), 1500):
            connection.sendall(sent[start : start + 1500])
            wait_until(lambda start=start: stored_bytes(tmp_path) >= min(start, len(PAIR) * 200) - 1000)
        assert connection.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
        assert len(listed(server)) == 1


def stored_bytes(folder: Path) -> int:
    content = folder / "files" / "content"
    try:
        return sum(path.stat().st_size for path in content.iterdir())
    except FileNotFoundError:  # there is none yet, or it has just got its last name
        return 0


@pytest.mark.parametrize("limits", [{"body_timeout": PAUSE}, {"upload_timeout": PAUSE}])
def test_a_client_that_stops_sending_gets_408_and_leaves_nothing(tmp_path: Path, limits: dict[str, float]) -> None:
    with live_server(data_dir=tmp_path, **limits) as server, connect(server, 100_000) as connection:
        connection.sendall(body(PAIR * 20)[:300])
        assert connection.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 408"
        wait_until(lambda: kept(tmp_path) == [])


def test_many_clients_upload_at_once_and_probes_are_answered(uploads: LiveServer) -> None:
    contents = [b'{"prompt": "%d", "completion": "x"}\n' % number * 3000 for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(post, uploads, body(content)) for content in contents]
        with uploads.client() as client:
            assert client.get("/health/live").status_code == 200
            ids = [reply.result(LIMIT).json()["id"] for reply in replies]
            assert sorted(listed(uploads)) == sorted(ids)
            for file_id, content in zip(ids, contents, strict=True):
                assert client.get(f"/v1/files/{file_id}/content").content == content


def test_a_cancelled_upload_leaves_nothing(uploads: LiveServer, tmp_path: Path) -> None:
    store = create_app(uploads.lifecycle).state.files

    async def cancel_in_the_middle() -> None:
        came = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield body(PAIR * 100)[:2000]
            came.set()
            await asyncio.Event().wait()

        running = asyncio.create_task(receiving.receive_file(store, CONTENT_TYPE, pieces(), ""))
        await came.wait()
        assert kept(tmp_path)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    try:
        asyncio.run(cancel_in_the_middle())
    finally:
        store.close()
    assert kept(tmp_path) == []


def test_an_upload_that_is_cancelled_while_it_begins_leaves_nothing(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class SlowToBegin(FileStore):
        def begin(self, content_type: str, owner: str) -> Upload:
            upload = super().begin(content_type, owner)
            begun.set()
            assert go_on.wait(LIMIT)
            return upload

    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("the body of a cancelled request is not read")
        yield b""

    async def cancel(store: FileStore) -> None:
        running = asyncio.create_task(receiving.receive_file(store, CONTENT_TYPE, nothing(), ""))
        assert await asyncio.to_thread(begun.wait, LIMIT)
        running.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    store = SlowToBegin(tmp_path / "files", replace(LIMITS, max_files=1))
    with contextlib.closing(store):
        asyncio.run(cancel(store))
        assert kept(tmp_path) == []
        assert upload(store, PAIR).examples == 1  # the place of the only file is free again


def test_a_draining_server_takes_no_files(uploads: LiveServer) -> None:
    uploads.lifecycle.phase = Phase.DRAINING
    reply = post(uploads, body(PAIR))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_is_draining")


def test_a_data_directory_that_cannot_be_used_is_507_and_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("not a folder")
    with live_server(data_dir=tmp_path) as server:
        reply = post(server, body(PAIR))
        assert (reply.status_code, reply.json()["error"]["code"]) == (507, "insufficient_storage")
        assert str(tmp_path) not in reply.text
        with server.client() as client:
            answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.status_code == 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_flat_for_200_mb(uploads: LiveServer) -> None:
    """Server and client are this process; the file is made while it is sent."""
    line = b'{"prompt": "' + b"p" * 8000 + b'", "completion": "' + b"c" * 8000 + b'"}\n'
    piece, pieces = line * 64, 200 * 2**20 // (len(line) * 64) + 1
    peak = 0

    def sent() -> Iterator[bytes]:
        nonlocal peak
        yield part("purpose", b"fine-tune") + part("file", b"", "big.jsonl")[:-2]
        for _ in range(pieces):
            peak = max(peak, resident_bytes())
            yield piece
        yield b"\r\n--cut--\r\n"

    assert post(uploads, body(PAIR * 1000)).status_code == 200
    gc.collect()
    before = resident_bytes()
    with uploads.client() as client:
        reply = client.post("/v1/files", content=sent(), headers={"content-type": CONTENT_TYPE})
    assert reply.status_code == 200
    assert reply.json()["bytes"] == len(piece) * pieces > 200 * 2**20
    assert peak - before < 48 * 2**20
