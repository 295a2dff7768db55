"""`longwave bench` with the bundled model: against `longwave serve`, and with an engine of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def bench(server: ServerProcess, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "server", "bench", "serve", "--base-url", server.url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def results(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_open_loop_counts_every_token(server: ServerProcess, tmp_path: Path) -> None:
    before = server.metrics()
    sizes = ("--num-prompts", "6", "--random-input-len", "40", "--random-output-len", "6")
    files = ("--result-filename", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))
    done = bench(server, *sizes, "--request-rate", "20", "--goodput", "ttft:60000", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(tmp_path / "r.json")
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (6, 240, 36)
    assert found["request_goodput"] == found["request_throughput"]
    assert found["duration"] >= found["p99_e2el_ms"] / 1e3 > found["p99_ttft_ms"] / 1e3 > 0
    after = server.metrics()
    assert after["longwave:generation_tokens_total"] - before["longwave:generation_tokens_total"] == 36
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert done.stderr == ""  # no progress bar where nobody looks


def test_closed_loop_with_texts_of_exact_length(server: ServerProcess, bundled_model: Path, tmp_path: Path) -> None:
    sizes = ("--num-prompts", "4", "--random-input-len", "30", "--random-output-len", "4", "--max-concurrency", "2")
    text = ("--prompt-format", "text", "--tokenizer", str(bundled_model))
    done = bench(server, *sizes, *text, "--result-filename", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(tmp_path / "r.json")
    assert (found["completed"], found["total_input_tokens"]) == (4, 120)
    assert found["max_concurrent_requests"] <= 2


def test_a_prompt_that_cannot_fit_fails_the_run(server: ServerProcess) -> None:
    done = bench(server, "--num-prompts", "2", "--random-input-len", "5000", "--random-output-len", "4")
    assert done.returncode == 1
    assert "2 failed: the server replied 400" in done.stdout


@pytest.mark.parametrize(
    ("command", "requests"), [("latency", 4), pytest.param("throughput", 3, marks=pytest.mark.thorough)]
)
def test_the_engine_alone(little_model: Path, tmp_path: Path, command: str, requests: int) -> None:
    load = {
        "latency": ("--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"),
        "throughput": ("--num-prompts", "3"),
    }[command]
    limits = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8")
    sizes = ("--input-len", "16", "--output-len", "3", "--output-json", str(tmp_path / "r.json"))
    arguments = [
        sys.executable,
        "-m",
        "server",
        "bench",
        command,
        *load,
        *sizes,
        *limits,
        "--model",
        str(little_model),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(tmp_path / "r.json")
    assert (found["completed"], found["failed"]) == (requests, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (16 * requests, 3 * requests)
    assert found["p90_e2el_ms"] > found["p90_ttft_ms"] > 0
