"""Starting, draining and ending, on real sockets and with real signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from scripted_engine import LIMIT, Script, ScriptedEngine, live_server, wait_until

from server.errors import EngineUnavailable

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def probes(client: httpx.Client) -> dict[str, int]:
    return {name: client.get(f"/health/{name}").status_code for name in ("live", "ready", "startup")}


def test_probes_while_loading_and_after() -> None:
    engine = ScriptedEngine()
    engine.load.clear()
    with live_server(wait=False, engine=engine) as server, server.client() as client:
        assert probes(client) == {"live": 200, "ready": 503, "startup": 503}
        reply = client.post("/v1/chat/completions", json=CHAT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] is None
        engine.load.set()
        wait_until(lambda: server.lifecycle.is_ready)
        assert probes(client) == {"live": 200, "ready": 200, "startup": 200}
        assert client.get("/health").status_code == 200


def test_a_failed_start_is_never_live() -> None:
    engine = ScriptedEngine()
    engine.load_failure = EngineUnavailable("no such model")
    with live_server(wait=False, engine=engine) as server, server.client() as client:
        wait_until(lambda: server.lifecycle.phase == "failed")
        assert probes(client) == {"live": 503, "ready": 503, "startup": 503}


def test_a_silent_or_dead_engine_is_not_live() -> None:
    with live_server() as server, server.client() as client:
        server.engine.heartbeat_age = 31.0
        assert probes(client) == {"live": 503, "ready": 503, "startup": 200}
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
        server.engine.heartbeat_age = 0.0
        server.engine.alive = False
        assert probes(client)["live"] == 503
        error = client.post("/v1/chat/completions", json=CHAT).json()["error"]
        assert error["code"] == "engine_unavailable"
        assert "needs a restart" in error["message"]


def test_an_engine_of_long_steps_may_be_silent_for_longer() -> None:
    with live_server() as server, server.client() as client:
        assert server.engine.stats is not None
        server.engine.stats = msgspec.structs.replace(server.engine.stats, longest_turn=20.0)
        server.engine.heartbeat_age = 59.0
        assert probes(client) == {"live": 200, "ready": 200, "startup": 200}
        assert client.post("/v1/chat/completions", json={**CHAT, "stream": False}).status_code == 200
        server.engine.heartbeat_age = 61.0
        assert probes(client) == {"live": 503, "ready": 503, "startup": 200}


def test_an_engine_that_has_nothing_to_do_is_never_silent_for_long() -> None:
    """Whatever its steps take, or were thought to take when it started."""
    with live_server() as server, server.client() as client:
        assert server.engine.stats is not None
        server.engine.stats = msgspec.structs.replace(server.engine.stats, longest_turn=200.0)
        server.engine.heartbeat_age = 31.0
        assert probes(client)["live"] == 200
        server.engine.is_idle = True
        assert probes(client) == {"live": 503, "ready": 503, "startup": 200}


def test_a_head_of_a_probe_is_its_get_without_the_body() -> None:
    with live_server() as server, server.client() as client:
        for age, statuses in ((0.0, {200}), (31.0, {200, 503})):
            server.engine.heartbeat_age = age
            seen = set()
            for path in ("/health", "/health/live", "/health/ready", "/health/startup"):
                got, head = client.get(path), client.head(path)
                assert (head.status_code, head.content) == (got.status_code, b"")
                assert head.headers["content-length"] == got.headers["content-length"]
                seen.add(head.status_code)
            assert seen == statuses


def test_a_restarting_engine_is_to_be_asked_when_it_is_likely_to_be_there() -> None:
    with live_server() as server, server.client() as client:
        server.engine.is_ready, server.engine.seconds_to_ready = False, 25.0
        refused = client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert 26 <= int(refused.headers["retry-after"]) <= 35


def test_draining_refuses_new_work_and_finishes_what_runs() -> None:
    with live_server(shutdown_timeout=LIMIT) as server, server.client() as client:
        server.engine.script = Script(hold_after=5)
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as reply:
            wait_until(lambda: server.engine.held)
            drained = threading.Thread(target=lambda: server.run(server.lifecycle.drain()))
            drained.start()
            wait_until(lambda: server.lifecycle.phase == "draining")
            with server.client() as other:
                refused = other.post("/v1/chat/completions", json=CHAT)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_draining")
                assert "retry-after" in refused.headers
                assert probes(other) == {"live": 200, "ready": 503, "startup": 200}
            assert drained.is_alive()
            server.engine.resume.set()
            assert list(reply.iter_lines())[-2] == "data: [DONE]"
        drained.join(LIMIT)
        assert not drained.is_alive()


def test_what_outlives_the_budget_gets_an_error_event() -> None:
    with live_server(shutdown_timeout=0.0) as server, server.client() as client:
        server.engine.script = Script(ends=False)
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as reply:
            received = reply.iter_lines()
            next(received)
            server.run(server.lifecycle.drain())
            last = [line for line in received if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_is_draining"
        assert len(server.engine.aborted) == 1


def test_the_engine_has_time_to_write_kv_blocks_to_disk_if_there_is_one(tmp_path: Path) -> None:
    with live_server(shutdown_timeout=7.0) as server:
        server.run(server.lifecycle.drain())
        assert server.engine.shutdown_timeouts == []
    with live_server(shutdown_timeout=7.0, kv_offload_gb=1, kv_offload_dir=tmp_path) as server:
        server.run(server.lifecycle.drain())
        assert server.engine.shutdown_timeouts == [7.0]


PROGRAM = """
import sys
sys.path[:0] = [{here!r}]
import scripted_engine as fake
from server import process
from server.app import create_app
from server.lifecycle import Lifecycle
engine = fake.ScriptedEngine()
engine.script = fake.Script(text=b"x" * 300, hold_after=None if {ends} else 300)
engine.load_failure = {failure}
engine.uses_all_time = {folder!r} is not None
process.CLOSE_GRACE = {grace}
settings = fake.settings(
    shutdown_timeout={budget}, kv_offload_gb=1, kv_offload_dir={folder!r}, data_dir={data_dir!r},
    keep_alive_on_engine_death={stays_up},
)
listener = process.listen("127.0.0.1", 0)
lifecycle = Lifecycle(settings, engine, fake.tiny_tokenizer)

def begin():
    engine.alive = {lives}
    print(listener.getsockname()[1], flush=True)

code = process.serve(lambda: create_app(lifecycle), lifecycle, listener, begin)
print("engine shut down", engine.was_shut_down, flush=True)
sys.exit(code)
"""


@contextmanager
def program(
    *,
    budget: float,
    ends: bool = False,
    failure: str = "None",
    folder: str | None = None,
    lives: bool = True,
    stays_up: bool = True,
    data_dir: str | None = None,
    grace: float = 5,
) -> Iterator[subprocess.Popen[str]]:
    """`folder`: of KV blocks; the engine needs all the time it gets to write them. `lives`: as soon as it serves."""
    text = PROGRAM.format(
        here=str(HERE),
        budget=budget,
        ends=ends,
        failure=failure,
        folder=folder,
        lives=lives,
        stays_up=stays_up,
        data_dir=data_dir,
        grace=grace,
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        with process:
            yield process
            assert process.wait(LIMIT * 2) is not None
    finally:
        process.kill()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_sigterm_lets_streams_finish_and_exits_0() -> None:
    with program(budget=60.0, ends=True) as process:
        url = f"http://127.0.0.1:{port_of(process)}"
        body = {**CHAT, "n": 8}
        with (
            httpx.Client(base_url=url, timeout=LIMIT * 2) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as reply,
        ):
            received = reply.iter_lines()
            next(received)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in received if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(LIMIT * 2) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "engine shut down True\n"


def test_sigterm_past_the_budget_sends_an_error_event_and_exits_0() -> None:
    with program(budget=0.1) as process:
        url = f"http://127.0.0.1:{port_of(process)}"
        with (
            httpx.Client(base_url=url, timeout=LIMIT * 2) as client,
            client.stream("POST", "/v1/chat/completions", json=CHAT) as reply,
        ):
            received = reply.iter_lines()
            next(received)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in received if line]
        assert "server_is_draining" in rest[-1]
        assert process.wait(LIMIT * 2) == 0


def test_a_second_sigterm_cuts_what_runs_and_leaves_no_traceback() -> None:
    with program(budget=3600.0) as process:
        url = f"http://127.0.0.1:{port_of(process)}"
        with (
            httpx.Client(base_url=url, timeout=LIMIT * 2) as client,
            client.stream("POST", "/v1/chat/completions", json=CHAT) as reply,
        ):
            received = reply.iter_lines()  # kept: dropping it would hang up
            next(received)
            process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=url, timeout=LIMIT) as other:
                wait_until(lambda: other.get("/health/ready").status_code == 503)
            process.send_signal(signal.SIGTERM)
            assert "server_is_draining" in [line for line in received if line][-1]
        assert process.wait(LIMIT) == 0
        assert process.stdout is not None
        assert "engine shut down True" in process.stdout.read()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_model_that_cannot_load_ends_the_process_with_1() -> None:
    failure = "fake.EngineUnavailable('no such model')"
    with program(budget=1.0, failure=failure) as process:
        assert process.wait(LIMIT * 2) == 1


def test_an_engine_that_is_given_up_ends_the_process_with_4_where_it_is_to() -> None:
    """Docker restarts who has ended, and nobody who is unhealthy."""
    with program(budget=60.0, lives=False, stays_up=False) as process:
        assert process.wait(LIMIT * 2) == 4
        assert process.stdout is not None
        assert process.stdout.read().endswith("engine shut down True\n")
        assert process.stderr is not None
        assert "the engine stays down" in process.stderr.read()


def test_a_process_that_was_to_end_when_the_engine_does_ends_with_0_by_a_signal() -> None:
    with program(budget=60.0, stays_up=False) as process:
        port_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0


def test_by_default_it_stays_up_and_says_that_a_restart_would_help() -> None:
    with program(budget=60.0, lives=False) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port_of(process)}", timeout=LIMIT) as client:
            assert probes(client)["live"] == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0


@contextmanager
def ending(process: subprocess.Popen[str], port: int) -> Iterator[None]:
    """It has had the signal, and time to cut what it does not wait for."""
    process.send_signal(signal.SIGTERM)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as client:
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        told = time.monotonic()
        wait_until(lambda: client.get("/health/ready").status_code == 503 and time.monotonic() - told > 0.5)
    yield
    assert process.wait(LIMIT) == 0


def reply_to(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    return b"".join(iter(lambda: client.recv(65536), b""))


FORM = b'--cut\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n'
FORM_TYPE = {"content-type": "multipart/form-data; boundary=cut"}


def form(content: bytes) -> bytes:
    fields = FORM % (b"purpose", b"") + b"fine-tune\r\n" + FORM % (b"file", b'; filename="a.jsonl"')
    return fields + content + b"\r\n--cut--\r\n"


def test_an_upload_under_way_is_taken_before_the_server_ends(tmp_path: Path) -> None:
    body = form(b'{"prompt": "a", "completion": "b"}\n' * 100)
    head = f"Host: here\r\nContent-Type: {FORM_TYPE['content-type']}\r\nContent-Length: {len(body)}\r\n"
    with program(budget=60.0, data_dir=str(tmp_path), grace=0.1) as process:
        port = port_of(process)
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as client:
            client.sendall(f"POST /v1/files HTTP/1.1\r\n{head}Expect: 100-continue\r\n\r\n".encode())
            assert client.recv(65536).startswith(b"HTTP/1.1 100 ")  # it reads
            client.sendall(body[:500])
            with ending(process, port):
                client.sendall(body[500:])
                reply = reply_to(client)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b'"bytes":3500' in reply


def test_a_file_is_read_to_its_end_before_the_server_ends(tmp_path: Path) -> None:
    content = (b'{"prompt": "%s", "completion": "b"}\n' % (b"a" * 100_000)) * 160
    with program(budget=60.0, data_dir=str(tmp_path), grace=0.1) as process:
        port = port_of(process)
        uploaded = httpx.post(
            f"http://127.0.0.1:{port}/v1/files", content=form(content), headers=FORM_TYPE, timeout=LIMIT
        )
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as client:
            path = f"/v1/files/{uploaded.json()['id']}/content"
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
            head, _, received = client.recv(65536).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            with ending(process, port):
                received += reply_to(client)
    assert received == content


def test_who_never_sends_a_whole_body_holds_a_server_up_for_its_budget_and_no_longer() -> None:
    with program(budget=0.5, grace=0.1) as process:
        with socket.create_connection(("127.0.0.1", port_of(process)), timeout=LIMIT) as client:
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n")
            client.sendall(b"Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 100 ")
            process.send_signal(signal.SIGTERM)
            reply = reply_to(client)
        assert process.wait(LIMIT) == 0
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b'"server_is_draining"' in reply


def test_an_idle_server_ends_at_once_whoever_keeps_a_connection() -> None:
    with (
        program(budget=3600.0) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port_of(process)}", timeout=LIMIT) as client,
    ):
        assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0


def test_a_second_sigterm_ends_the_writing_of_kv_blocks(tmp_path: Path) -> None:
    with program(budget=3600.0, folder=str(tmp_path)) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port_of(process)}", timeout=LIMIT) as client:
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/health/ready").status_code == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
