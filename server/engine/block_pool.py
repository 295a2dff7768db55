"""The blocks of the KV cache as numbers: who holds them, which are free, which free one to give up next. Knows no
tokens and no tensors. Block 0 is never handed out: padding rows of the runner write there."""

from collections import Counter, OrderedDict
from collections.abc import Sequence


class IntegrityError(AssertionError):
    """The pool contradicts itself: continuing would hand one user's memory to another."""


class BlockPool:
    """Reference counts over block ids. A block at zero references is either blank or idle: idle blocks keep their
    content for a later prefix hit and are given up one by one, least recently used first, when blanks run out.

    Idle blocks are grouped by owner (a tenant's cache salt): the owner with the most idle blocks gives up its oldest,
    so one tenant's flood pushes out its own blocks first. Some may be retired ahead of time (their content has been
    copied elsewhere, say): they go before all others.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks: at least 2 are needed, since block 0 is reserved")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))  # popped from the end: low numbers first
        self._idle: dict[bytes, OrderedDict[int, None]] = {}  # owner -> ids, least recently used first
        self._retired: OrderedDict[int, bytes] = OrderedDict()  # id -> owner, in the order of giving up
        self._num_idle = 0  # retired ones included

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._blank) + self._num_idle

    @property
    def num_ready(self) -> int:
        """Blocks that can be taken at no loss: blank or retired."""
        return len(self._blank) + len(self._retired)

    def take(self) -> tuple[int, bool] | None:
        """A block with one reference, and whether it was idle (its old content must be forgotten). None: all in use."""
        if self._blank:
            block, was_idle = self._blank.pop(), False
        elif self._num_idle:
            block, was_idle = self._give_up(), True
        else:
            return None
        self.references[block] = 1
        return block, was_idle

    def share(self, block: int, owner: bytes) -> None:
        """One more reference to a block that is in use or idle."""
        if self.references[block] == 0:
            self._remove_idle(block, owner)
        self.references[block] += 1

    def drop(self, block: int, owner: bytes | None) -> None:
        """One reference less. `owner` is None for blank content, else whose idle block it becomes."""
        count = self.references[block]
        if count <= 0:
            raise IntegrityError(f"block {block} was freed twice")
        self.references[block] = count - 1
        if count > 1:
            return
        if owner is None:
            self._blank.append(block)
        else:
            self._idle.setdefault(owner, OrderedDict())[block] = None
            self._num_idle += 1

    def next_to_retire(self) -> tuple[int, bytes] | None:
        """The idle block that would be given up after all retired ones, and its owner."""
        if self._num_idle == len(self._retired):
            return None
        owner = self._largest_owner()
        return next(iter(self._idle[owner])), owner

    def retire(self, block: int, owner: bytes) -> None:
        """An idle block becomes the last of those that go first."""
        self._remove_idle(block, owner)
        self._retired[block] = owner
        self._num_idle += 1

    def blank(self, block: int, owner: bytes) -> None:
        """An idle block whose content must not be found again."""
        self._remove_idle(block, owner)
        self._blank.append(block)

    def is_idle(self, block: int) -> bool:
        return self.references[block] == 0

    def _remove_idle(self, block: int, owner: bytes) -> None:
        self._num_idle -= 1
        if self._retired.pop(block, None) is not None:
            return
        group = self._idle[owner]
        del group[block]
        if not group:
            del self._idle[owner]

    def _largest_owner(self) -> bytes:
        groups = self._idle
        return next(iter(groups)) if len(groups) == 1 else max(groups, key=lambda name: len(groups[name]))

    def _give_up(self) -> int:
        self._num_idle -= 1
        if self._retired:
            return self._retired.popitem(last=False)[0]
        owner = self._largest_owner()
        group = self._idle[owner]
        block, _ = group.popitem(last=False)
        if not group:
            del self._idle[owner]
        return block

    def idle_blocks(self) -> list[tuple[int, bytes]]:
        idle = [(block, owner) for owner, group in self._idle.items() for block in group]
        return [*idle, *self._retired.items()]

    def used_last_first(self) -> list[int]:
        """Idle blocks, owners in turns; the retired ones of each at its end."""
        turns: Counter[bytes] = Counter()
        found: list[tuple[int, int]] = []
        idle = ((block, owner) for owner, group in self._idle.items() for block in reversed(group))
        for block, owner in (*idle, *reversed(self._retired.items())):
            found.append((turns[owner], block))
            turns[owner] += 1
        return [block for _, block in sorted(found, key=lambda entry: entry[0])]

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises IntegrityError unless free + used == total and every count equals the tables that name the block."""
        expected = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise IntegrityError("a block table names a block twice")
            for block in table:
                expected[block] += 1
        if expected[0]:
            raise IntegrityError("block 0 is in a block table")
        for block, (counted, held) in enumerate(zip(expected, self.references, strict=True)):
            if counted != held:
                raise IntegrityError(f"block {block}: {held} references, {counted} tables")
        free = [*self._blank, *(block for block, _ in self.idle_blocks())]
        used = sum(count > 0 for count in expected)
        if len(free) != self.num_free or len(set(free)) != len(free) or any(expected[block] for block in free):
            raise IntegrityError("the free blocks overlap each other or the used ones")
        if len(free) + used != self.num_usable or 0 in free:
            raise IntegrityError(f"{len(free)} free and {used} used blocks of {self.num_usable}")
