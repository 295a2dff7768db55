"""Blocks on their way from files to host memory, and whether that is worth it: reading takes as long as it took of
late, computing as long as steps do. Knows no tensors and no scheduling."""

import logging
import time
from collections.abc import Callable, Collection

from server.engine.disk_tier import HANG_SECONDS, DiskResult, DiskTier
from server.engine.host_slots import Held, HostSlots
from server.engine.prefixes import Prefix

logger = logging.getLogger(__name__)

MAX_READS = 64  # blocks on their way at once

#: (tokens before, further ones of the same prompt) -> predicted seconds of computing those: that of the steps' model.
ComputeSeconds = Callable[[int, int], float]


class DiskReads:
    def __init__(
        self, disk: DiskTier, slots: HostSlots, slot_bytes: Callable[[int], memoryview], compute_seconds: ComputeSeconds
    ) -> None:
        """`slot_bytes`: the memory of a slot, which are counted from 0 there."""
        self._disk = disk
        self._slots = slots
        self._slot_bytes = slot_bytes
        self.compute_seconds = compute_seconds
        self._arriving: dict[int, tuple[Held, float]] = {}  # by slot, which is the ticket; since when, the oldest first
        self._hangs = False
        self.num_declined = 0  # blocks that were on disk, and computed

    @property
    def arriving(self) -> Collection[Held]:
        return [held for held, _ in self._arriving.values()]

    def room(self, num_blocks: int, context: int, count: int) -> int | None:
        """How many of `num_blocks` may begin to be read now, 0 to wait for others; None: computing is faster. All of
        them would bring `count` tokens back (some are in host memory), after `context` ones.

        All or nothing: a block deeper in a prompt takes longer to compute, and as long to read. Queues for the disk are
        left out, as are those for the device. While the speed is not known, no more is read than tells it."""
        seconds = float("inf") if self._hangs else self._disk.read_seconds(num_blocks)
        if seconds is None:
            return self._disk.reads_missing
        if seconds >= self.compute_seconds(context, count):
            self.num_declined += num_blocks
            return None
        return max(0, MAX_READS - len(self._arriving))

    def begin(self, prefix: Prefix) -> Held | None:
        """Of a block that is on disk. None: there is no slot for it."""
        held = self._slots.take(prefix)
        if held is not None:
            self._arriving[held.slot] = held, time.monotonic()
            self._disk.read(prefix, self._slot_bytes(held.slot - 1), held.slot)
        return held

    def give_up_late(self) -> None:
        """What is read too slowly is not to be found: who waits for it computes. Its slot is the read's until that
        ends, and nothing more is read before."""
        limit = time.monotonic() - HANG_SECONDS
        late = [held for held, since in self._arriving.values() if since < limit]
        if late and not self._hangs:
            logger.warning(
                "%s has not given a KV block for %.0f s: prefixes are computed until it does", self._disk, HANG_SECONDS
            )
        self._hangs = bool(late)
        for held in late:
            if not held.is_forgotten:
                self._slots.forget(held)

    def end(self, result: DiskResult) -> None:
        held, _ = self._arriving.pop(result.ticket)
        held.is_arriving = False
        if result.succeeded:
            self._slots.unpin(held)
        else:
            self._slots.lose(held)
