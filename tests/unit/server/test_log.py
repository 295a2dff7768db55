"""The log's lines reach stderr, and hold up nobody when nobody reads them."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from scripted_engine import LIMIT

from server import log
from server.log import LineWriter

SMALL_PIPE = 4096  # bytes: the least that Linux gives
SERVING = """
from scripted_engine import ScriptedEngine, settings, tiny_tokenizer
from server import process
from server.app import create_app
from server.cli import _begin_log
from server.lifecycle import Lifecycle
_begin_log("INFO")
lifecycle = Lifecycle(settings(), ScriptedEngine(), tiny_tokenizer)
listener = process.listen("127.0.0.1", 0)
def on_ready():
    print(listener.getsockname()[1], flush=True)
process.end(process.serve(lambda: create_app(lifecycle), lifecycle, listener, on_ready))
"""


@contextmanager
def logger(descriptor: int | None) -> Iterator[logging.Logger]:
    """What it was told has been written, or given up, afterwards."""
    one = logging.Logger("one")
    writer = LineWriter(descriptor)
    one.addHandler(writer)
    yield one
    writer.flush()


def told(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_what_was_said_is_written_by_the_end(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file, logger(file.fileno()) as one:
        for number in range(500):
            one.info("line %d \ud800", number)
    assert told(tmp_path / "log") == [f"line {number} \\ud800" for number in range(500)]


def test_a_pipe_that_nobody_reads_holds_up_nobody_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MOST_LINES", 10)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, SMALL_PIPE)
    os.write(writing, b"\n" * SMALL_PIPE)
    with logger(writing) as one:
        for number in range(25):
            one.info("line %d", number)
        os.read(reading, SMALL_PIPE)  # somebody reads again
        one.handlers[0].flush()
        one.info("the last")
    lines = os.read(reading, SMALL_PIPE).decode().splitlines()
    os.close(reading)
    os.close(writing)
    lines.remove("15 lines of the log could not be written")
    assert lines == [*(f"line {number}" for number in range(10)), "the last"]


def test_a_reader_that_has_gone_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with logger(writing) as one:
        for _ in range(10):
            one.info("for nobody")
    os.close(writing)
    assert capfd.readouterr().err == ""


def test_a_pipe_that_cannot_take_more_just_now_is_waited_for() -> None:
    """Whoever shares a terminal or a pipe may have made it so."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, SMALL_PIPE)
    os.set_blocking(writing, False)
    received = b""
    with logger(writing) as one:
        one.info("x" * 3 * SMALL_PIPE)
        while not received.endswith(b"\n"):
            received += os.read(reading, SMALL_PIPE)
    os.close(reading)
    os.close(writing)
    assert received == b"x" * 3 * SMALL_PIPE + b"\n"


def test_without_a_stderr_nothing_is_written_anywhere() -> None:
    with logger(None) as one:
        one.info("for nobody")


def test_a_server_whose_log_stands_still_answers_and_ends() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, SMALL_PIPE)
    path = os.pathsep.join([str(Path(__file__).parents[3]), str(Path(__file__).parent)])
    with subprocess.Popen(
        [sys.executable, "-c", SERVING], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=writing
    ) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            with httpx.Client(base_url=url, timeout=LIMIT, headers={"x-request-id": "x" * 128}) as client:
                assert {client.get("/v1/models").status_code for _ in range(60)} == {200}
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 0
        finally:
            process.kill()
    os.close(reading)
    os.close(writing)
