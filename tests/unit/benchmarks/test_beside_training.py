"""What chats cost beside a job is compared with a server that is warm: nothing is compiled or recorded in the answers
that count."""

import asyncio
from typing import Any

import pytest

from benchmarks.beside_training import Load, chats
from server.bench import Outcome, Turn


class Client:
    """Answers at once."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def complete(self, turn: Turn) -> Outcome:
        self.asked.append(len(turn.prompt))
        await asyncio.sleep(0)
        return Outcome(len(turn.prompt), 0.0, 0.0, [(0.1, 1), (0.2, 1)], 2)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_every_stream_asks_at_least_once_however_little_time_there_is(seconds: float) -> None:
    client: Any = Client()
    found = asyncio.run(chats(client, Load(3, 4, 2, seconds, 0), 100, 0))
    assert found.completed == len(client.asked) >= 3
    assert set(client.asked) == {4}
