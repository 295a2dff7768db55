"""The sign that answers are open, across processes, and what raises it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_engine import Script, live_server, wait_until

from server.answering import AnsweringSign, SignReader

READS = """
import sys
from server.answering import SignReader
reader = SignReader(int(sys.argv[1]))
for _ in sys.stdin:
    print(reader.is_up(), flush=True)
"""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("system", ["Linux", "others"])
def test_a_process_that_inherits_it_sees_every_change(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "others":
        monkeypatch.delattr("os.memfd_create")
    sign = AnsweringSign()
    with subprocess.Popen(
        [sys.executable, "-c", READS, str(sign.fd)],
        pass_fds=(sign.fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for answering in (False, True, True, False, True):
            sign.show(answering)
            process.stdin.write("look\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{answering}\n"
        process.stdin.close()


def test_it_is_down_at_first_and_readers_cannot_raise_it() -> None:
    sign = AnsweringSign()
    reader = SignReader(sign.fd)
    assert not reader.is_up()
    with pytest.raises(TypeError):
        reader._byte[0] = 1


def test_processes_that_nobody_passes_it_to_do_not_inherit_it() -> None:
    sign = AnsweringSign()
    assert not os.get_inheritable(sign.fd)
    fd = sign.fd
    del sign
    with pytest.raises(OSError):
        os.fstat(fd)


def test_what_is_no_sign_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "empty").open("w+b") as file, pytest.raises((OSError, ValueError)):
        SignReader(file.fileno())


def test_it_is_up_from_the_first_request_to_the_end_of_the_last() -> None:
    with live_server() as server, server.client() as client:
        reader = SignReader(server.lifecycle.answering.fd)
        assert not reader.is_up()
        client.get("/v1/models")
        assert not reader.is_up()
        server.engine.script = Script(text=b"x" * 100, ends=False)
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}):
            wait_until(reader.is_up)
            assert client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}).status_code == 200
            assert reader.is_up()
        wait_until(lambda: not reader.is_up())


def test_a_request_that_is_refused_leaves_it_down() -> None:
    with live_server() as server, server.client() as client:
        assert client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 10**6}).status_code == 400
        assert not SignReader(server.lifecycle.answering.fd).is_up()


def test_a_server_that_shuts_down_lets_training_reach_its_end() -> None:
    with live_server(shutdown_timeout=30.0) as server, server.client() as client:
        reader = SignReader(server.lifecycle.answering.fd)
        server.engine.script = Script(hold_after=2)
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
            wait_until(reader.is_up)
            server.loop.call_soon_threadsafe(lambda: server.loop.create_task(server.lifecycle.drain()))
            wait_until(lambda: not reader.is_up())
            server.engine.resume.set()
            assert reply.read().endswith(b"data: [DONE]\n\n")
