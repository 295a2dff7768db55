"""How many streams of a job's events are open, and what gives a place back. No sockets; the jobs are a fake."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from scripted_engine import MODEL, ScriptedEngine, settings, tiny_tokenizer

from server.api.deps import Origin
from server.api.fine_tuning import list_events
from server.api.job_events import MAX_STREAMS, EventFeed, EventFeeds
from server.asgi import Message
from server.errors import JobMissing, ServerOverloaded
from server.lifecycle import Lifecycle

ORIGIN = Origin(0.0, b"", "", 0)


class Jobs:
    """Of which the store answers after a turn of the event loop, or fails, or never answers."""

    def __init__(self, failure: Exception | None = None, *, answers: bool = True) -> None:
        self.failure = failure
        self.answers = answers

    async def get(self, *_: object) -> object:
        if not self.answers:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return object()

    async def follow(self, *_: object) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return self._nothing()

    async def _nothing(self) -> AsyncIterator[None]:
        while True:
            await asyncio.sleep(0)
            yield None


async def opened(feeds: EventFeeds, jobs: Jobs) -> EventFeed:
    lifecycle = Lifecycle(settings(), ScriptedEngine(), tiny_tokenizer)
    feed = await list_events(MODEL, lifecycle, cast(Any, jobs), feeds, ORIGIN, stream=True)
    assert isinstance(feed, EventFeed)
    return feed


async def until_left(feed: EventFeed, *, after: int) -> list[Message]:
    """What a client is sent that leaves when it has had so many messages."""
    sent: list[Message] = []
    enough = asyncio.Event()

    async def receive() -> Message:
        if len(sent) < after:
            await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) >= after:
            enough.set()

    await feed({"type": "http"}, receive, send)
    return sent


def test_streams_that_are_asked_for_at_once_pass_the_limit_no_more_than_others() -> None:
    async def main() -> None:
        feeds, jobs = EventFeeds(), Jobs()
        asked = [opened(feeds, jobs) for _ in range(MAX_STREAMS + 9)]
        got = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(one, EventFeed) for one in got) == feeds.num_open == MAX_STREAMS
        assert sum(isinstance(one, ServerOverloaded) for one in got) == 9

    asyncio.run(main())


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_client_that_leaves_gives_its_place_back_whenever_it_does(after: int) -> None:
    async def main() -> None:
        feeds = EventFeeds()
        feed = await opened(feeds, Jobs())
        assert feeds.num_open == 1
        assert len(await until_left(feed, after=after)) >= after
        assert feeds.num_open == 0

    asyncio.run(main())


def test_a_stream_that_never_begins_has_no_place() -> None:
    async def main() -> None:
        feeds = EventFeeds()
        with pytest.raises(JobMissing):
            await opened(feeds, Jobs(JobMissing("No such event.")))
        asking = asyncio.create_task(opened(feeds, Jobs(answers=False)))
        await asyncio.sleep(0)
        assert feeds.num_open == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        del asking
        dropped = await opened(feeds, Jobs())
        assert feeds.num_open == 1
        del dropped  # no route has called it
        assert feeds.num_open == 0

    asyncio.run(main())
