from collections.abc import Iterator

import pytest
from scripted_engine import LiveServer, Script, live_server, tiny_tokenizer

from server.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(tiny_tokenizer())


@pytest.fixture(scope="session")
def shared_server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """One server for all tests that do not change its settings; its engine forgets between them."""
    engine = shared_server.engine
    engine.script = Script()
    engine.requests.clear()
    engine.aborted.clear()
    engine.held.clear()
    engine.resume.clear()
    yield shared_server
    engine.resume.set()
