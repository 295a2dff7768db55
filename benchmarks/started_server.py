"""A server of its own process on a free port, `longwave serve` or another, for benchmarks that measure through HTTP.
Asks nothing but whether it is ready."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_TIMEOUT = 300.0
END_TIMEOUT = 60.0
POLL_SECONDS = 0.1


@contextmanager
def started_server(model: Path | str, flags: Sequence[str]) -> Iterator[tuple[str, float]]:
    """A running server's URL, and the seconds until it was ready. Raises SystemExit when it does not become that."""
    command = [sys.executable, "-m", "server", "serve", "--model", str(model), *flags]
    begin = time.perf_counter()
    with started(command, "/health/ready") as (url, _):
        yield url, time.perf_counter() - begin


@contextmanager
def started(
    command: Sequence[str], ready: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of any kind, which is told its --port: its URL and process, as soon as it answers `ready` with 200.
    Raises SystemExit when it does not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    whole, root = [*command, "--port", str(port)], Path(__file__).resolve().parent.parent
    begin = time.perf_counter()
    with _sigterm_as_sigint(), subprocess.Popen(whole, cwd=root, env=environment) as process:
        try:
            _wait(url + ready, process, begin)
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """A benchmark that is told to end, by `timeout` say, ends what it has started, as one that is interrupted does."""
    if threading.current_thread() is not threading.main_thread():  # no other may say so
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(url: str, process: subprocess.Popen[bytes], begin: float) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode} before it was ready")
        if time.perf_counter() - begin > START_TIMEOUT:
            raise SystemExit(f"the server was not ready within {START_TIMEOUT:.0f} s")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_SECONDS)
