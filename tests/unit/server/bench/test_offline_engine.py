"""The engine alone under load: what it cannot serve is refused in words, before it is computed."""

import asyncio

import pytest

from server.bench.offline import OfflineEngine, batches
from server.engine.client import EngineClient
from server.engine.config import EngineConfig
from server.engine.messages import EngineReady


@pytest.fixture
def engine() -> OfflineEngine:
    """Nothing runs behind it."""
    ready = EngineReady("m", "cpu", "float32", 100, 5000, [0], 64, 10, {}, {}, {})
    return OfflineEngine(EngineClient(EngineConfig(model="m")), ready)


@pytest.mark.parametrize(
    ("lengths", "vocab_size", "said"),
    [
        ((80, 21), 5000, "a prompt of 80 tokens and an answer of 21 are 101: the engine serves 100 together"),
        ((80, 20), 5001, "--vocab-size is 5001: the model has 5000 tokens"),
    ],
)
def test_what_the_engine_does_not_serve_is_refused(
    engine: OfflineEngine, lengths: tuple[int, int], vocab_size: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        asyncio.run(batches(engine, 1, 1, *lengths, vocab_size, 0))
    engine.check(80, 20, 5000)
