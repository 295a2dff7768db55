"""The check by which Docker knows whether the server lives, run as Docker runs it."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9"  # no proxy listens on the discard port


def checks() -> dict[str, list[str]]:
    """The command of the image and of each service that serves."""
    joined = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    image = re.search(r"^HEALTHCHECK .*? CMD (\[.*\])$", joined, re.MULTILINE)
    assert image is not None
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    composed = {name: services[name]["healthcheck"]["test"][1:] for name in ("longwave-gpu", "longwave-cpu")}
    return {"image": json.loads(image[1])} | composed


@contextmanager
def replying(status: int) -> Iterator[int]:
    """A server that says `status` to /health/live and 404 to the rest; yields its port."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/live" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def exit_status(command: list[str], port: int, **variables: str) -> int:
    assert command[0] == "python"
    assert command[-1].count("8000") == 1
    there = [sys.executable, *command[1:-1], command[-1].replace("8000", str(port))]
    return subprocess.run(there, env=os.environ | variables, stderr=subprocess.DEVNULL, check=False).returncode


@pytest.mark.parametrize("command", checks().values(), ids=checks().keys())
class TestHealthCheck:
    def test_a_server_that_lives_is_healthy_whatever_proxy_is_named(self, command: list[str]) -> None:
        with replying(200) as port:
            assert exit_status(command, port) == 0
            assert exit_status(command, port, http_proxy=NOBODY, HTTP_PROXY=NOBODY, no_proxy="") == 0

    def test_one_that_says_no_or_is_gone_is_not(self, command: list[str]) -> None:
        with replying(503) as port:
            assert exit_status(command, port) == 1
        assert exit_status(command, port) == 1


def test_the_image_asks_the_port_that_its_environment_names() -> None:
    _, *arguments = checks()["image"]
    with replying(200) as port:
        there = os.environ | {"LONGWAVE_PORT": str(port)}
        subprocess.run([sys.executable, *arguments], env=there, check=True)
