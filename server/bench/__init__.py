"""Measuring: load on any OpenAI-compatible server, and on our engine alone. Knows the engine by its client only, and of
HTTP what a client needs."""

from server.bench.metrics import Measurement, measure
from server.bench.outcome import Outcome
from server.bench.stream_client import StreamClient, Target
from server.bench.workload import Conversation, RandomPrompts, SharedDocuments, Turn

__all__ = [
    "Conversation",
    "Measurement",
    "Outcome",
    "RandomPrompts",
    "SharedDocuments",
    "StreamClient",
    "Target",
    "Turn",
    "measure",
]
