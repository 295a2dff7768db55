"""KV blocks in a directory that the operator names: which are there, which go first, and the threads that read and
write them. Knows no device and no request. A failure of the disk costs copies, never a request."""

import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue

from models.host import usable_cpus
from server.engine.block_files import BlockFile, block_path, file_bytes, lock, owner_of, sweep
from server.engine.block_pool import BlockPool, IntegrityError
from server.engine.offload_stats import DiskStats
from server.engine.prefixes import Prefix
from server.engine.read_speed import ReadSpeed

logger = logging.getLogger(__name__)

READERS = 4, 8  # threads, at least and at most; between the two, one for two CPUs
#: Seconds after which a thread that computes lets others go on: for each block a reader or writer waits for the
#: interpreter some six times. With Python's 5 ms, 8.5 GB took 70 s to write beside a thread that never rested.
SWITCH_INTERVAL = 0.0005
HANG_SECONDS = 30.0  # without the end of a read, or of a write, that was begun: the disk hangs
PAUSE = 60.0  # seconds without writes after one has failed: there may be room again


class DiskTierError(Exception):
    """The directory cannot be used as asked; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class DiskResult:
    """A read or write that ended."""

    ticket: int  # the caller's
    succeeded: bool


@dataclass(frozen=True, slots=True)
class _Work:
    place: int
    is_read: bool
    begun: float


class DiskTier:
    """All methods are for one thread. Blocks are given up as in the pool of the device: the owner with most of them
    gives up what it used longest ago. The memory of a read or write is the threads' until finished() names its ticket.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        fingerprint: bytes,
        block_bytes: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fingerprint` (32 bytes) stands for all that a block's bytes depend on besides its tokens. Raises
        DiskTierError when the directory is another engine's or cannot be written, or `max_bytes` hold no block."""
        self._fingerprint = fingerprint
        self._folder = directory / fingerprint.hex()
        self._file_bytes = file_bytes(block_bytes, block_size)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock(directory)
            found = sweep(directory, self._folder, max_bytes=max_bytes, block_file_bytes=self._file_bytes)
        except BlockingIOError:
            raise DiskTierError(f"{directory} is in use by another engine") from None
        except OSError as error:
            raise DiskTierError(f"{directory} cannot hold KV blocks: {error}") from error
        if found.num_places < 1:
            os.close(self._lock)
            raise DiskTierError(f"{max_bytes} bytes on disk hold no KV block: one has {self._file_bytes}")
        self._pool = BlockPool(found.num_places + 1)
        self._places: dict[bytes, int] = {}  # hash -> place
        self._contents: dict[int, tuple[bytes, bytes]] = {}  # place -> hash, owner
        self._working: dict[int, _Work] = {}  # by ticket
        self._ended: SimpleQueue[tuple[int, Exception | None, float]] = SimpleQueue()
        self.num_readers = min(max(usable_cpus() // 2, READERS[0]), READERS[1])
        self._readers = ThreadPoolExecutor(self.num_readers, "kv-read")
        self._speed = ReadSpeed(self.num_readers)
        self._writer = ThreadPoolExecutor(1, "kv-write")  # one: files are written and deleted in the order asked
        self._read_bytes = self._written_bytes = self._num_damaged = 0
        self._clock = clock
        self._paused_until = 0.0
        self._last_ended = {True: -inf, False: -inf}  # of reads, and of writes
        self._has_failed = False  # since the last write that did not
        self._writer_hangs = False  # and the log says so
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL, self._switch_interval))
        for block_hash, owner in found.blocks:
            self._adopt(block_hash, owner)

    def __str__(self) -> str:
        return str(self._folder.parent)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    def read(self, prefix: Prefix, memory: memoryview, ticket: int) -> None:
        """Begins to fill `memory` with a block that is here."""
        place = self._places[prefix.hash]
        owner = self._contents[place][1]
        self._pool.share(place, owner)
        now = self._clock()
        self._working[ticket] = _Work(place, is_read=True, begun=now)
        self._speed.begin(now)
        file = BlockFile(block_path(self._folder, owner, prefix.hash), self._fingerprint, prefix)

        def read() -> None:
            if not file.read(memory):
                raise ValueError(f"{file.path} is damaged, or not of this prefix")

        self._run(self._readers, ticket, read)

    def read_seconds(self, num_blocks: int) -> float | None:
        """What reading so many is predicted to take, from those that were read of late. None: nobody knows."""
        return self._speed.seconds(num_blocks * self._file_bytes, self._clock())

    @property
    def reads_missing(self) -> int:
        """Blocks that must begin to be read, for read_seconds() to be known."""
        return self._speed.missing(self._clock())

    @property
    def num_places(self) -> int:
        return self._pool.num_usable

    @property
    def num_written(self) -> int:
        """Blocks since the start, of those that finished() has told."""
        return self._written_bytes // self._file_bytes

    def write(self, prefix: Prefix, memory: memoryview, ticket: int, *, used_ns: int | None = None) -> bool:
        """Begins to write a block that is not here. `used_ns`: when it was used last, since 1970; None: now. False: it
        cannot be written now."""
        if self._is_paused or (taken := self._pool.take()) is None:
            return False
        place, was_idle = taken
        if was_idle:
            self._delete(place)
        owner = owner_of(prefix.cache_salt)
        self._places[prefix.hash] = place
        self._contents[place] = (prefix.hash, owner)
        self._working[ticket] = _Work(place, is_read=False, begun=self._clock())
        file = BlockFile(block_path(self._folder, owner, prefix.hash), self._fingerprint, prefix)
        self._run(self._writer, ticket, lambda: file.write(memory, used_ns))
        return True

    def wait(self) -> None:
        """Until all writes that were begun have ended."""
        self._writer.submit(lambda: None).result()

    def finished(self) -> list[DiskResult]:
        results: list[DiskResult] = []
        while True:
            try:
                ticket, error, ended = self._ended.get_nowait()
            except Empty:
                return results
            work = self._working.pop(ticket)
            if error is not None and work.place in self._contents:
                self._delete(work.place)
            content = self._contents.get(work.place)  # None: failed, or forgotten meanwhile
            self._pool.drop(work.place, None if content is None else content[1])
            self._last_ended[work.is_read] = ended
            self._count(work, error)
            if work.is_read:
                self._speed.end(0 if error else self._file_bytes, ended)
            results.append(DiskResult(ticket, error is None))

    def look_at_writer(self) -> None:
        """Says once that it hangs: nobody waits for what it keeps back, so nobody else would."""
        hangs = self._hangs(is_read=False)
        if hangs and not self._writer_hangs:
            logger.warning(
                "%s has not taken a KV block for %.0f s: few more go there until it does", self, HANG_SECONDS
            )
        self._writer_hangs = hangs

    def forget(self, block_hash: bytes) -> None:
        """What is here under this hash is not to be read again."""
        place = self._places.get(block_hash)
        if place is None:
            return
        owner = self._contents[place][1]
        self._delete(place)
        if self._pool.is_idle(place):
            self._pool.blank(place, owner)

    def stats(self) -> DiskStats:
        return DiskStats(
            num_blocks=len(self._places),
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            num_damaged=self._num_damaged,
            is_full=self._is_paused,
            is_hanging=self._hangs(is_read=True) or self._hangs(is_read=False),
        )

    @property
    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def _hangs(self, *, is_read: bool) -> bool:
        """Writes wait for each other: that one is old says nothing while others end."""
        limit = self._clock() - HANG_SECONDS
        if self._last_ended[is_read] >= limit:
            return False
        return any(work.is_read is is_read and work.begun < limit for work in self._working.values())

    def check_integrity(self) -> None:
        """Raises IntegrityError unless places and names agree. O(places)."""
        self._pool.check([[work.place] for work in self._working.values()])
        named = {place: block_hash for block_hash, place in self._places.items()}
        if named != {place: block_hash for place, (block_hash, _) in self._contents.items()}:
            raise IntegrityError("a block on disk is not where it is looked for")
        for place, owner in self._pool.idle_blocks():
            if place not in named or self._contents[place][1] != owner:
                raise IntegrityError(f"place {place} on disk is idle without content, or not under its owner")

    def close(self) -> None:
        """Waits for what was begun."""
        self._readers.shutdown()
        self._writer.shutdown()
        os.close(self._lock)
        sys.setswitchinterval(self._switch_interval)

    def _adopt(self, block_hash: bytes, owner: bytes) -> None:
        taken = self._pool.take()
        if taken is None or taken[1]:
            raise IntegrityError("more blocks on disk than places")
        self._places[block_hash] = taken[0]
        self._contents[taken[0]] = (block_hash, owner)
        self._pool.drop(taken[0], owner)

    def _delete(self, place: int) -> None:
        block_hash, owner = self._contents.pop(place)
        del self._places[block_hash]
        path = block_path(self._folder, owner, block_hash)
        self._writer.submit(lambda: path.unlink(missing_ok=True))

    def _run(self, threads: ThreadPoolExecutor, ticket: int, work: Callable[[], None]) -> None:
        def report() -> None:
            try:
                work()
            except Exception as error:  # of any kind: a ticket that never ends would hold memory for ever
                self._ended.put((ticket, error, self._clock()))
            else:
                self._ended.put((ticket, None, self._clock()))

        threads.submit(report)

    def _count(self, work: _Work, error: Exception | None) -> None:
        if error is None and work.is_read:
            self._read_bytes += self._file_bytes
        elif error is None:
            self._written_bytes += self._file_bytes
            self._has_failed = False
        elif work.is_read:
            self._num_damaged += 1
            logger.warning("a KV block on disk could not be used and is deleted: %s", error)
        else:
            self._paused_until = self._clock() + PAUSE
            if not self._has_failed:
                logger.warning("a KV block could not be written to %s, later ones may be: %s", self, error)
            self._has_failed = True
