"""The slots of host memory as names: which content is in which, and which is given up next. Knows no tensors, and not
how content gets there."""

from collections.abc import Iterable
from dataclasses import dataclass

from server.engine.block_pool import BlockPool, IntegrityError
from server.engine.prefixes import Prefix


@dataclass(slots=True, eq=False)
class Held:
    """A block's content in a host slot."""

    prefix: Prefix
    slot: int  # from 1, as blocks are
    is_arriving: bool = True  # the bytes are not there yet
    is_forgotten: bool = False


class HostSlots:
    """Given up as in the pool of the device: the owner with most of them gives up what it used longest ago."""

    def __init__(self, num_slots: int) -> None:
        self._pool = BlockPool(num_slots + 1)
        self._by_hash: dict[bytes, Held] = {}
        self._by_slot: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def num_ready(self) -> int:
        """Slots that can be taken at no loss."""
        return self._pool.num_ready

    def find(self, block_hash: bytes) -> Held | None:
        return self._by_hash.get(block_hash)

    def take(self, prefix: Prefix) -> Held | None:
        """A slot for content that is about to arrive, pinned. None: all are in use."""
        taken = self._pool.take()
        if taken is None:
            return None
        slot, was_idle = taken
        if was_idle:
            del self._by_hash[self._by_slot.pop(slot).prefix.hash]
        held = self._by_hash[prefix.hash] = self._by_slot[slot] = Held(prefix, slot)
        return held

    def pin(self, held: Held) -> None:
        """It is not given up before unpin(). Raises IntegrityError when it has been already."""
        if not held.is_forgotten and self._by_slot.get(held.slot) is not held:
            raise IntegrityError(f"host slot {held.slot} has another content by now")
        self._pool.share(held.slot, held.prefix.cache_salt)

    def unpin(self, held: Held) -> None:
        self._pool.drop(held.slot, None if held.is_forgotten else held.prefix.cache_salt)

    def lose(self, held: Held) -> None:
        """It did not arrive."""
        if not held.is_forgotten:
            self.forget(held)
        self.unpin(held)

    def forget(self, held: Held) -> None:
        """Not to be found again."""
        held.is_forgotten = True
        del self._by_hash[held.prefix.hash], self._by_slot[held.slot]
        if self._pool.is_idle(held.slot):
            self._pool.blank(held.slot, held.prefix.cache_salt)

    def retire(self, held: Held) -> None:
        """There is a copy elsewhere: it goes before others, unless it is pinned."""
        if not held.is_forgotten and self._pool.is_idle(held.slot):
            self._pool.retire(held.slot, held.prefix.cache_salt)

    def next_to_retire(self) -> Held | None:
        found = self._pool.next_to_retire()
        return None if found is None else self._by_slot[found[0]]

    def idle(self) -> list[Held]:
        """Those that nobody pins, in the order of BlockPool.used_last_first()."""
        return [self._by_slot[slot] for slot in self._pool.used_last_first()]

    def check_integrity(self, on_their_way: Iterable[Held]) -> None:
        """Raises IntegrityError unless slots and names agree, and just those `on_their_way` are pinned. O(slots)."""
        self._pool.check([[held.slot] for held in on_their_way])
        idle = dict(self._pool.idle_blocks())
        for slot, held in self._by_slot.items():
            if held.slot != slot or self._by_hash.get(held.prefix.hash) is not held or held.is_forgotten:
                raise IntegrityError(f"host slot {slot}: its content is not found under its name")
            if self._pool.is_idle(slot) and idle.get(slot) != held.prefix.cache_salt:
                raise IntegrityError(f"host slot {slot}: held and free, but not under its owner")
        if len(self._by_hash) != len(self._by_slot) or not idle.keys() <= self._by_slot.keys():
            raise IntegrityError("host memory names slots that do not know it")
