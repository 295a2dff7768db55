"""A `longwave serve` of its own process on a free port. Knows how to start, watch and end it; no request but probes."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 180
END_SECONDS = 60
POLL_SECONDS = (0.02, 0.25)  # between two looks: at first, and at most


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Looks more rarely the longer it takes: looking costs the server time, too."""
    begun = time.monotonic()
    first, most = POLL_SECONDS
    while not condition():
        waited = time.monotonic() - begun
        if waited > seconds:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(min(max(first, waited / 20), most))  # between two looks at the condition


class ServerProcess:
    """`with ServerProcess("--api-key", "k") as server:` is ready to answer when the block begins."""

    def __init__(self, *flags: str, api_key: str | None = None, device: str = "cpu") -> None:
        self.api_key = api_key
        self._device = device
        self._flags = [*flags, *(["--api-key", api_key] if api_key else [])]

    def __enter__(self) -> Self:
        self._log = tempfile.NamedTemporaryFile("w+", prefix="longwave-", suffix=".log")
        with _held_port() as port:
            self.url = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "server", "serve", "--port", str(port), "--device", self._device]
            command += self._flags
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
            try:
                wait_until(self._is_ready, "the server is ready", START_SECONDS)
            except BaseException:
                self._stop()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def client(self, *, api_key: str | None = None) -> openai.OpenAI:
        """To be closed by the caller. Never retries: a test wants the first answer."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key or self.api_key or "none", max_retries=0, timeout=120
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=30)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=self.headers, timeout=120)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over their labels."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def wait_until_idle(self) -> None:
        """No request in the engine, every KV block free again (cached prefixes count as free)."""
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

        def is_idle() -> bool:
            metrics = self.metrics()
            return all(metrics[f"longwave:{name}"] == 0 for name in gauges)

        wait_until(is_idle, "the engine is idle and its KV blocks are free")

    def children(self, module: str) -> list[int]:
        """Processes of this one that run the module. By /proc/PID/stat: not every kernel lists children."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                command = (path.parent / "cmdline").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            if parent == self.process.pid and module.encode() in command:
                found.append(int(path.parent.name))
        return found

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(END_SECONDS)

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log()}")
        try:
            return self.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _stop(self) -> None:
        if self.process.poll() is None:
            self.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


@contextmanager
def _held_port() -> Iterator[int]:
    """A free one, which nobody else is given meanwhile, to listen or to connect from: it is bound. Who reuses addresses
    as the server does may listen there, since nobody else does."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
