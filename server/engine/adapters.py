"""The LoRA adapters of an engine: which there are, which lie in the runner's slots, and who uses them. Plain data:
knows no weights and no files.

Few are resident (a slot each), many are registered. A running request keeps its adapter in its slot; of the others,
the least recently used gives up its slot when one is wanted. Slots that are never idle go round: after so many requests
the adapter that has waited for longest is next, whoever wants it, and the one that has had its slot for longest takes
no requests until then. Others go on, and however many wait there is one turn for so many requests."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

STARTS = 64  # of requests, in a turn: from when an adapter that was next got its slot until another is
KEPT = 64  # steps for which a free slot is kept for the next: its requests may find no blocks


@dataclass(eq=False, slots=True)
class Adapter:
    """Mutable; only the table writes to it, and the executor to `is_placed`."""

    number: int  # what the runner knows it by; never used again
    name: str
    digest: str  # of its files
    slot: int = -1
    is_placed: bool = False  # whether its weights have been copied into the slot
    is_registered: bool = True  # new requests may name it
    num_open: int = 0  # requests that named it and have not ended
    num_running: int = 0  # of these, the ones with rows in steps
    last_used: int = 0
    in_slot_since: int = 0
    num_passed: int = 0  # requests that have started while it was wanted and had no slot


class AdapterTable:
    def __init__(self, max_loras: int = 0, max_registered: int = 0) -> None:
        self.max_loras = max_loras
        self.max_registered = max_registered
        self._by_name: dict[str, Adapter] = {}
        self._retired: list[Adapter] = []  # their last requests are still open
        self._slots: list[Adapter | None] = [None] * max_loras
        self._dropped: list[int] = []
        self._uses = count(1)
        self._next: Adapter | None = None
        self._num_starts = 0  # in this turn, while some were wanted and had no slot
        self._num_kept = 0

    @property
    def num_kept(self) -> int:
        """Adapters whose weights are kept, retired ones included."""
        return len(self._by_name) + len(self._retired)

    def num_kept_with(self, names: Iterable[str]) -> int:
        """The same once these names, all different, have been registered: one that takes the place of an adapter takes
        nothing more, unless requests keep the old one."""
        before = map(self._by_name.get, names)
        return self.num_kept + sum(adapter is None or adapter.num_open > 0 for adapter in before)

    def find(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def register(self, number: int, name: str, digest: str) -> None:
        """From now on the name means this adapter. One that had the name is retired."""
        self.retire(name)
        self._by_name[name] = Adapter(number, name, digest)

    def retire(self, name: str) -> Adapter | None:
        """No new request finds the name; open ones keep their adapter until they end. None: no such name."""
        adapter = self._by_name.pop(name, None)
        if adapter is not None:
            adapter.is_registered = False
            self._retired.append(adapter)
            self._drop_unused(adapter)
        return adapter

    def open(self, adapter: Adapter) -> None:
        """A request that names it has been accepted."""
        adapter.num_open += 1

    def close(self, adapter: Adapter) -> None:
        """Such a request has ended."""
        adapter.num_open -= 1
        if not adapter.num_open:
            self._served(adapter)
        self._drop_unused(adapter)

    def may_start(self, adapter: Adapter) -> bool:
        """Whether it has a slot, or could have one. While another is next, no other takes a slot that comes free."""
        if self._next is None or adapter is self._next:
            return adapter.slot >= 0 or self._find_slot() is not None
        return adapter.slot >= 0 and any(
            other is not None and other.in_slot_since < adapter.in_slot_since for other in self._slots
        )

    def look(self) -> None:
        """Once a step, while requests wait."""
        if self._next is not None and self._find_slot() is not None:
            self._num_kept += 1
            if self._num_kept > KEPT:
                self._served(self._next)

    def start(self, adapter: Adapter) -> None:
        """One of its requests gets rows from now on. The caller has asked may_start()."""
        if adapter.slot < 0:
            slot = self._find_slot()
            assert slot is not None, "start() without may_start()"
            before = self._slots[slot]
            if before is not None:
                before.slot, before.is_placed = -1, False
            self._slots[slot], adapter.slot = adapter, slot
            adapter.in_slot_since = next(self._uses)
            self._served(adapter)
        adapter.num_running += 1
        adapter.last_used = next(self._uses)
        self._pass()

    def stop(self, adapter: Adapter) -> None:
        """One of its requests has no rows any more."""
        adapter.num_running -= 1
        adapter.last_used = next(self._uses)

    def take_dropped(self) -> list[int]:
        """Numbers of adapters that nobody can name or use any more."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def running(self) -> list[str]:
        return sorted({adapter.name for adapter in self._all() if adapter.num_running})

    def waiting(self) -> list[str]:
        return sorted({adapter.name for adapter in self._all() if adapter.num_open > adapter.num_running})

    def _all(self) -> list[Adapter]:
        return [*self._by_name.values(), *self._retired]

    def _pass(self) -> None:
        """A request has started: those that are wanted and have no slot have waited for one more."""
        wanted = [adapter for adapter in self._all() if adapter.slot < 0 and adapter.num_open]
        for adapter in wanted:
            adapter.num_passed += 1
        self._num_starts += bool(wanted)
        if wanted and self._next is None and self._num_starts >= STARTS:
            self._next = max(wanted, key=lambda adapter: adapter.num_passed)

    def _served(self, adapter: Adapter) -> None:
        """It waits no more, or from now on only."""
        adapter.num_passed = 0
        if adapter is self._next:
            self._next, self._num_starts, self._num_kept = None, 0, 0

    def _find_slot(self) -> int | None:
        """The lowest empty one (a step's products reach to its highest slot), else the least recently used idle one."""
        best: Adapter | None = None
        for slot, adapter in enumerate(self._slots):
            if adapter is None:
                return slot
            if not adapter.num_running and (best is None or adapter.last_used < best.last_used):
                best = adapter
        return None if best is None else best.slot

    def _drop_unused(self, adapter: Adapter) -> None:
        if adapter.is_registered or adapter.num_open:
            return
        self._retired.remove(adapter)
        if adapter.slot >= 0:
            self._slots[adapter.slot] = None
            adapter.slot = -1
        self._dropped.append(adapter.number)
