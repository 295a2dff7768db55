"""A `longwave serve` of its own process on a free port, for benchmarks that measure through HTTP. Asks nothing but
whether it is ready."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_TIMEOUT = 300.0
END_TIMEOUT = 60.0
POLL_SECONDS = 0.1


@contextmanager
def started_server(model: Path | str, flags: Sequence[str]) -> Iterator[tuple[str, float]]:
    """A running server's URL, and the seconds until it was ready. Raises SystemExit when it does not become that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "server", "serve", "--model", str(model), "--port", str(port), *flags]
    begin = time.perf_counter()
    with subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent) as process:
        try:
            _wait(url, process, begin)
            yield url, time.perf_counter() - begin
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(url: str, process: subprocess.Popen[bytes], begin: float) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode} before it was ready")
        if time.perf_counter() - begin > START_TIMEOUT:
            raise SystemExit(f"the server was not ready within {START_TIMEOUT:.0f} s")
        try:
            if httpx.get(f"{url}/health/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_SECONDS)
