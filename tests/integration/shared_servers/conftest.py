"""Servers that all tests of this folder share: one process each for the whole session."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from ..conftest import FLAGS, SMALL
from ..server_process import ServerProcess

KEY = "sk-integration-0123456789"


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
    """KV blocks for about four of the tests' requests: running ones are preempted and recomputed."""
    pool = ("--block-size", "16", "--num-gpu-blocks-override", "30")
    with ServerProcess(*SMALL, "--max-model-len", "320", *pool) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
