"""Servers that many tests share, one process each for the whole session, and the truth to compare with."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from .eager_answers import EagerAnswers
from .server_process import ServerProcess

MAX_MODEL_LEN = 1024
#: Small steps and a small pool: servers share two cores and start quickly.
SMALL = ("--dtype", "float32", "--max-num-seqs", "32", "--max-num-batched-tokens", "256")
KEY = "sk-integration-0123456789"
FLAGS = (*SMALL, "--kv-cache-memory-bytes", str(400 << 20), "--max-model-len", str(MAX_MODEL_LEN))


@pytest.fixture(scope="session")
def eager(bundled_model: Path) -> EagerAnswers:
    return EagerAnswers(bundled_model)


@pytest.fixture(scope="session")
def server(bundled_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS) as process:
        yield process
        process.terminate()
        assert process.wait() == 0, "an idle server exits with 0, whatever it has answered"


@pytest.fixture(scope="session")
def chunking_server(bundled_model: Path) -> Iterator[ServerProcess]:
    """Every prompt takes several steps, mixed with others' decode rows; no prefix is ever reused. It wants KEY."""
    limits = ("--max-num-seqs", "16", "--max-num-batched-tokens", "24")
    with ServerProcess(*FLAGS, *limits, "--no-enable-prefix-caching", api_key=KEY) as process:
        yield process


@pytest.fixture(scope="session")
def tight_server(bundled_model: Path) -> Iterator[ServerProcess]:
    """KV blocks for about three of the tests' requests: running ones are preempted and recomputed."""
    pool = ("--block-size", "16", "--num-gpu-blocks-override", "30")
    with ServerProcess(*SMALL, "--max-model-len", "320", *pool) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
