"""A job's events as they come, until it has ended. Knows no HTTP and no SQL."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from server.finetune.records import Event
from server.finetune.store import JobStore
from server.finetune.writer import Writer

EVENTS_AT_ONCE = 100
NEWS_SECONDS = 1.0


async def follow(writer: Writer, job_id: str, seen: float) -> AsyncIterator[Event | None]:
    """Those behind the place `seen` (a sequence number, or one between two), the oldest first. None now and then: no
    news. Raises InsufficientStorage."""
    changed = writer.listen(news=True)
    try:
        while True:
            changed.clear()
            ended = await writer.store(partial(JobStore.has_ended, job_id=job_id))
            events = await writer.store(partial(_events_after, job_id, seen))
            for event in events:
                yield event
                seen = event.sequence
            if ended is not False and len(events) < EVENTS_AT_ONCE:
                return
            if not events:
                with contextlib.suppress(TimeoutError):  # other servers' news are not announced
                    async with asyncio.timeout(NEWS_SECONDS):
                        await changed.wait()
                yield None
    finally:
        writer.forget(changed)


def _events_after(job_id: str, seen: float, store: JobStore) -> list[Event]:
    return store.journal.events(job_id, after=seen, before=None, limit=EVENTS_AT_ONCE)
