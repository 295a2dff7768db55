"""The one thread that reads and writes the job store, and everybody's way to it. Knows no HTTP and no processes."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from server.errors import InsufficientStorage, StorageBusy
from server.files.ballast import Ballast
from server.files.folder import make_private
from server.finetune.database import DatabaseError
from server.finetune.folders import Folders
from server.finetune.holders import Holders
from server.finetune.leases import Leases
from server.finetune.records import MAX_EVENTS
from server.finetune.stats import FineTuningStats
from server.finetune.store import JobStore

logger = logging.getLogger("longwave")

SAID_AGAIN = 60.0  # seconds, of the same failure

T = TypeVar("T")


class Writer:
    """Opens the store when it is first asked for something. Of whatever it is asked, one thing happens at a time."""

    def __init__(
        self,
        folder: Path,
        holder: str,
        lease_seconds: float,
        back_off: float,
        max_events: int = MAX_EVENTS,
        clock: Callable[[], float] = time.time,
        *,
        stats: FineTuningStats | None = None,
    ) -> None:
        """`stats`: where failures are counted; nowhere, by default."""
        self.clock = clock
        self._max_events = max_events
        self._back_off = back_off
        self._folder = folder
        self._file = folder / "jobs.sqlite3"
        self._holder = holder
        self._ballast = Ballast(folder / "ballast")
        self._holders = Holders(folder / "holders", holder)
        self._lease_seconds = lease_seconds
        self._stats = stats or FineTuningStats()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fine-tuning-store")
        self._opened: tuple[JobStore, Leases] | None = None
        self._said = ("", 0.0)  # what, and when
        self._workers: set[asyncio.Event] = set()
        self._readers: set[asyncio.Event] = set()

    async def store(self, work: Callable[[JobStore], T]) -> T:
        """`work` on the thread. Raises what it raises, and InsufficientStorage when the database cannot be used
        (StorageBusy: for the moment)."""
        return await self._run(lambda store, _: work(store))

    async def freeing(self, work: Callable[[JobStore], T]) -> T:
        """As `store`, of one transaction after which something can be deleted: also where the disk is full."""
        return await self._run(lambda store, _: self._ballast.delete(lambda: work(store)))

    async def keep_room(self) -> None:
        """For what is `freeing`, if the disk has some again since that took it."""
        await self._run(lambda *_: self._ballast.take())

    async def leases(self, work: Callable[[Leases], T]) -> T:
        return await self._run(lambda _, leases: work(leases))

    def listen(self, *, news: bool = False) -> asyncio.Event:
        """An event that is set whenever there may be something to do; with `news`, also when there is something to
        tell. `forget` it afterwards."""
        event = asyncio.Event()
        (self._readers if news else self._workers).add(event)
        return event

    def forget(self, event: asyncio.Event) -> None:
        self._readers.discard(event)
        self._workers.discard(event)

    def announce(self) -> None:
        """There may be something to do."""
        for event in self._workers | self._readers:
            event.set()

    def announce_news(self) -> None:
        """A step, say: nobody who works needs to look."""
        for event in self._readers:
            event.set()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._leave)
        self._thread.shutdown()

    async def _run(self, work: Callable[[JobStore, Leases], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._attempt, work)

    def _attempt(self, work: Callable[[JobStore, Leases], T]) -> T:
        try:
            return work(*self._open())
        except (OSError, sqlite3.Error, DatabaseError) as error:
            self._say(str(error))
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                self._close()  # damaged while it was open: the next call looks at it anew
            if _is_held(error):
                raise StorageBusy(
                    "Another server on this data directory holds its fine-tuning jobs for longer than this one waits."
                ) from error
            self._stats.storage_failures += 1
            raise InsufficientStorage(
                "The server cannot keep fine-tuning jobs: its disk is full, or its data directory cannot be used."
            ) from error

    def _say(self, what: str) -> None:
        """A disk that is full is tried every second."""
        last, when = self._said
        now = time.monotonic()
        if what != last or now - when >= SAID_AGAIN:
            self._said = (what, now)
            logger.error("fine-tuning jobs in %s: %s", self._folder, what)

    def _open(self) -> tuple[JobStore, Leases]:
        if not self._file.exists():  # it has never been there, or is gone: what is written to it would be, too
            self._close()
        if self._opened is None:
            make_private(self._folder)
            self._holders.enter()
            had_jobs = Folders(self._folder).have_work()
            store = JobStore(self._file, self._max_events, had_jobs=had_jobs)
            leases = Leases(store, self._holder, self._lease_seconds, self._back_off, self._holders.is_gone)
            self._opened = store, leases
            self._ballast.take()
        return self._opened

    def _leave(self) -> None:
        self._close()
        self._holders.leave()

    def _close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None


def _is_held(error: Exception) -> bool:
    """By a process that stands still in the midst of a transaction."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
