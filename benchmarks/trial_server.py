"""A server of ours that a trial has to itself, and what its processes hold: memory, files, threads, KV blocks. Sends
nothing but probes."""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.fault_clients import Target
from benchmarks.process_tree import children
from benchmarks.started_server import started
from models import registry
from models.descriptions import read_config

ENGINE = "server.engine.worker"
SEATS, QUEUE = 16, 32  # that run, and that wait
BLOCKS = ("--num-gpu-blocks-override", "400")  # of 32 tokens: what the model can take, and half as much again
SMALL = ("--max-num-seqs", str(SEATS), "--max-queued-requests", str(QUEUE), *BLOCKS)
LITTLE = "little"  # a model that knows nothing and costs little: it is the server that is tried
SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
IDLE_LIMIT = 120.0
POLL = 0.02
CLOSING = 0.2  # seconds in which a server has noticed that a look at its metrics is over, and closed its connection
MB = 1e6


@dataclass(frozen=True, slots=True)
class Held:
    """By one process."""

    rss_mb: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class TrialServer:
    target: Target

    @property
    def url(self) -> str:
        return self.target.url

    @property
    def pid(self) -> int:
        assert self.target.process is not None
        return self.target.process.pid

    def engine(self) -> int | None:
        """The engine's process; None while there is none."""
        return child(self.pid, ENGINE)

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels but the model's, as Prometheus reads them."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return samples(text)

    def is_idle(self) -> bool:
        """No request in the engine, every KV block free again (cached prefixes count as free)."""
        now = self.metrics()
        return not any(now.get(f"longwave:{name}", 0.0) for name in BUSY)

    def idle_after(self) -> float:
        """Seconds until it is; IDLE_LIMIT if it is not by then. What it holds afterwards is nothing of the look."""
        begin = time.monotonic()
        while not self.is_idle():
            if time.monotonic() - begin > IDLE_LIMIT:
                return IDLE_LIMIT
            time.sleep(POLL)
        seconds = time.monotonic() - begin
        time.sleep(CLOSING)
        return seconds

    def status(self, path: str) -> int | None:
        """None: no reply in ten seconds."""
        try:
            return httpx.get(self.url + path, timeout=10).status_code
        except httpx.TransportError:
            return None

    def held(self) -> Held:
        return held(self.pid)


@contextmanager
def trial_server(
    model: str,
    flags: Sequence[str] = SMALL,
    environment: Mapping[str, str] | None = None,
    template: str | None = None,
    weights: bool = False,
) -> Iterator[TrialServer]:
    """On a CPU and with a data folder of its own. `model`: LITTLE, which may have another chat template and, to be
    trained, `weights`, or what a server takes."""
    with tempfile.TemporaryDirectory() as parent:
        random = ["--load-format", "dummy"] if model == LITTLE and not weights else []
        folder = little_model(Path(parent), template) if model == LITTLE else registry.resolve(model).fetch()
        if model == LITTLE and weights:
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        command = [sys.executable, "-m", "server", "serve", "--model", str(folder), "--device", "cpu", *random]
        command += ["--data-dir", str(Path(parent) / "data"), "--log-level", "critical", *flags]
        whole = {**os.environ, "HF_HUB_OFFLINE": "1"} if environment is None else dict(environment)
        with started(command, "/health/ready", whole) as (url, process):
            yield TrialServer(Target(url, str(folder), read_config(folder).max_position_embeddings, process))


def little_model(parent: Path, template: str | None) -> Path:
    """The bundled one's tokenizer, template and family, of SHAPE; no weights: they are drawn at random."""
    folder = parent / LITTLE
    folder.mkdir()
    for file in registry.resolve("bundled").fetch().iterdir():
        if file.suffix != ".safetensors" and file.name != "manifest.json":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SHAPE))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def samples(text: str) -> dict[str, float]:
    """Of Prometheus' text: name -> value, summed over labels; name{reason}, too, where there is a finished_reason."""
    sums: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        reason = re.search(r'finished_reason="(\w+)"', labels)
        for key in (name, *([f"{name}{{{reason[1]}}}"] if reason else [])):
            sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def child(pid: int, module: str) -> int | None:
    """The process that runs the module; None while there is none."""
    return next((other for other in children(pid) if module.encode() in _command(other)), None)


def held(pid: int) -> Held:
    """Raises OSError when the process is gone."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss, threads = (int(_field(status, name)) for name in ("VmRSS", "Threads"))
    return Held(rss * 1024 / MB, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    return found[1] if found else "0"
