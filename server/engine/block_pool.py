"""The blocks of the KV cache as numbers: who holds them, which are free, which free one to give up next. Knows no
tokens and no tensors. Block 0 is never handed out: padding rows of the runner write there."""

from collections import OrderedDict
from collections.abc import Sequence


class IntegrityError(AssertionError):
    """The pool contradicts itself: continuing would hand one user's memory to another."""


class BlockPool:
    """Reference counts over block ids. A block at zero references is either blank or idle: idle blocks keep their
    content for a later prefix hit and are given up one by one, least recently used first, when blanks run out.

    Idle blocks are grouped by owner (a tenant's cache salt): the owner with the most idle blocks gives up its oldest,
    so one tenant's flood pushes out its own blocks first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks: at least 2 are needed, since block 0 is reserved")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))  # popped from the end: low numbers first
        self._idle: dict[bytes, OrderedDict[int, None]] = {}  # owner -> ids, least recently used first
        self._num_idle = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._blank) + self._num_idle

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

    def blank(self, block: int, owner: bytes) -> None:
        """An idle block whose content must not be found again."""
        self._remove_idle(block, owner)
        self._blank.append(block)

    def is_idle(self, block: int) -> bool:
        return self.references[block] == 0

    def _remove_idle(self, block: int, owner: bytes) -> None:
        group = self._idle[owner]
        del group[block]
        self._num_idle -= 1
        if not group:
            del self._idle[owner]

    def _give_up(self) -> int:
        groups = self._idle
        owner = next(iter(groups)) if len(groups) == 1 else max(groups, key=lambda name: len(groups[name]))
        block, _ = groups[owner].popitem(last=False)
        self._num_idle -= 1
        if not groups[owner]:
            del groups[owner]
        return block

    def idle_blocks(self) -> list[tuple[int, bytes]]:
        return [(block, owner) for owner, group in self._idle.items() for block in group]

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
