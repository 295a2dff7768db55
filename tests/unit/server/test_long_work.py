"""Long work has few pieces in a turn of the event loop, however many requests have some."""

import asyncio
import concurrent.futures
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scripted_engine
from scripted_engine import LiveServer

from models.batch import PromptLogprobs
from server.api.sse import FEW_LOGPROBS
from server.engine.messages import AddRequest
from server.long_work import PIECES, LongWork
from server.schemas.whole_choice import WholeChoice
from server.text.details import TokenDetail
from server.text.scored_prompt import ScoredPrompt

MANY = 24  # requests


class Turns:
    """Counts what is done in each turn of a loop."""

    def __init__(self) -> None:
        self.count = self.most = self.total = 0

    def add(self, num_tokens: int = 64) -> None:
        """Few tokens are no long work."""
        self.count += num_tokens > FEW_LOGPROBS
        self.total += num_tokens > FEW_LOGPROBS

    async def watch(self) -> None:
        while True:
            self.most, self.count = max(self.most, self.count), 0
            await asyncio.sleep(0)


def test_a_turn_has_few_pieces_in_the_order_in_which_they_were_wanted() -> None:
    turns, done = Turns(), []

    async def work(long_work: LongWork, number: int) -> None:
        for _ in range(3):
            async with long_work.piece():
                turns.add()
                done.append(number)

    async def main() -> None:
        watching, long_work = asyncio.create_task(turns.watch()), LongWork()
        await asyncio.gather(*(work(long_work, number) for number in range(MANY)))
        watching.cancel()

    asyncio.run(main())
    assert turns.most == PIECES
    assert done == [*range(MANY)] * 3


def test_whoever_leaves_takes_nobody_s_place() -> None:
    async def main() -> None:
        long_work, entered = LongWork(), asyncio.Event()

        async def stay() -> None:
            async with long_work.piece():
                entered.set()
                await asyncio.Event().wait()

        inside = [asyncio.create_task(stay()) for _ in range(PIECES)]
        await entered.wait()
        waiting = [asyncio.create_task(long_work.next(iter([number]))) for number in range(MANY)]
        await asyncio.sleep(0)
        for task in (*inside, *waiting[::2]):
            task.cancel()
        async with asyncio.timeout(60):
            assert await asyncio.gather(*waiting[1::2]) == [*range(MANY)][1::2]
            assert await long_work.next(iter(())) is None

    asyncio.run(main())


def in_large_pieces(request: AddRequest) -> Iterator[PromptLogprobs]:
    """As the scripted engine's, all in one, as a step has them."""
    count, wanted = len(request.prompt_token_ids) - 1, request.sampling.prompt_logprobs or 0
    values = -np.arange(1, count + 1, dtype=np.float32)
    ids = np.tile(np.arange(wanted, dtype=np.int32), (count, 1))
    top = values[:, None] - np.arange(wanted, dtype=np.float32)
    yield PromptLogprobs(wanted, values.tobytes(), np.ones(count, np.int32).tobytes(), ids.tobytes(), top.tobytes())


@pytest.mark.parametrize("stream", [True, False])
def test_scored_prompts_of_many_requests_are_spelled_and_written_few_in_a_turn(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(scripted_engine, "_prompt_logprobs", in_large_pieces)
    turns, feed, add = Turns(), ScoredPrompt.feed, WholeChoice.add_logprobs

    def spell(*given: Any) -> Iterator[Any]:
        for said in feed(*given):
            turns.add(len(said.details))
            yield said

    def write(choice: WholeChoice, details: tuple[TokenDetail, ...]) -> None:
        turns.add(len(details))
        add(choice, details)

    monkeypatch.setattr(ScoredPrompt, "feed", spell)
    monkeypatch.setattr(WholeChoice, "add_logprobs", write)
    watching = asyncio.run_coroutine_threadsafe(turns.watch(), server.loop)
    body = {"model": "tiny", "prompt": [1] * 400, "max_tokens": 1, "echo": True, "logprobs": 5, "stream": stream}
    with server.client() as client, concurrent.futures.ThreadPoolExecutor(MANY) as threads:
        replies = list(threads.map(lambda _: client.post("/v1/completions", json=body), range(MANY)))
    watching.cancel()
    assert {reply.status_code for reply in replies} == {200}
    assert turns.total > 5 * MANY
    assert turns.most <= 2 * PIECES  # the watch is not always first in a turn: it sees parts of two
