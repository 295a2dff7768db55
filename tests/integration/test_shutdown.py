"""SIGTERM: no new work, running answers finish, exit 0. (The shared server is terminated when idle.)"""

import socket
from pathlib import Path

import httpx
import pytest

from .conftest import FLAGS
from .questions import CAPITAL, MODEL
from .server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": CAPITAL}],
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}


def test_a_stream_finishes_a_body_that_drips_is_told_and_the_server_exits_with_0(little_model: Path) -> None:
    named = "--model", str(little_model), "--served-model-name", MODEL
    # Shorter than a body may take, so that the drain's end comes first.
    with ServerProcess(*FLAGS, *named, "--shutdown-timeout", "15") as server:
        address = httpx.URL(server.url).host, httpx.URL(server.url).port or 80
        url = f"{server.url}/v1/chat/completions"
        with socket.create_connection(address, timeout=60) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
            client.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n{")
            with httpx.stream("POST", url, json=BODY, timeout=60) as reply:
                lines = reply.iter_lines()
                wait_until(lambda: '"content"' in next(lines), "the first text")  # by now both connections are open
                server.terminate()
                wait_until(lambda: server.get("/health/ready").status_code == 503, "readiness is false")
                refused = server.post("/v1/chat/completions", BODY)
                rest = "\n".join(lines)
            dripped = b"".join(iter(lambda: client.recv(65536), b""))

        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert '"finish_reason":"length"' in rest.replace(": ", ":")
        assert rest.rstrip().endswith("data: [DONE]")

        status, _, rest_of_it = dripped.partition(b"\r\n")
        assert status == b"HTTP/1.1 503 Service Unavailable"
        assert b"\r\nconnection: close\r\n" in rest_of_it.lower()
        assert b'"server_is_draining"' in rest_of_it

        assert server.wait() == 0
        assert "Traceback" not in server.log()
