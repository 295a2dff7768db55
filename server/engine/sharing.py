"""Which running requests begin with the same blocks, so that the attention can read those once for all of them. Knows
block tables only.

Requests that share stand side by side: the list of all is a walk through the tree of their tables, and how many leading
blocks two neighbours share says the rest. It changes only when a request gets its table or loses it: blocks that a
table gets later are new, so no other table has them yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from models.shared_runs import Levels, SharedRun, SharingLimits
from server.engine.request import Request

__all__ = ["PrefixSharing", "SharingLimits"]

_STRIDE = 256  # blocks compared at a time
_DEEPEST = 8  # prefixes within prefixes that are looked at: more are a pathology, and looking takes time


@dataclass(slots=True)
class _Node:
    """Rows `first` to `end - 1` share `blocks` leading blocks; those of a child more."""

    first: int
    end: int
    blocks: int
    children: list["_Node"]
    tiles: int = 0  # that each block is read less often if the rows read it together


@dataclass(frozen=True, slots=True)
class _Memory:
    """The last question and its answer: mostly the same requests decode as in the step before."""

    asked: list[Request]
    rows: list[int] | None
    arranged: list[Request]
    levels: Levels


class PrefixSharing:
    def __init__(self, limits: SharingLimits) -> None:
        self.limits = limits
        self._order: list[Request] = []
        self._common: list[int] = []  # leading blocks that a request shares with the next one; 0 for the last
        self._memory: dict[bool, _Memory] = {}  # of questions with rows, and without

    def join(self, request: Request) -> None:
        """The request has its first blocks. Compares it with what may be its neighbours only."""
        order, common, table = self._order, self._common, request.block_ids
        place, best, after, shared = 0, 0, 0, 0
        for i, member in enumerate(order):
            between = common[i - 1] if i else 0
            if between == shared:
                shared = _common_blocks(table, member.block_ids, shared)
            elif between < shared:
                shared = between
            if shared >= best:  # behind all with whom it shares most, so that it parts none who share more
                place, best, after = i + 1, shared, 0
            elif i == place:
                after = shared
        order.insert(place, request)
        common.insert(place, after)
        if place:
            common[place - 1] = best
        self._memory.clear()

    def leave(self, request: Request) -> None:
        """The request gives up its blocks. One that never joined is none of our business."""
        if request not in self._order:
            return
        place = self._order.index(request)
        del self._order[place]
        gone = self._common.pop(place)
        if place:
            self._common[place - 1] = min(self._common[place - 1], gone)
        self._memory.clear()

    def arrange(self, requests: Sequence[Request], rows: Sequence[int] | None = None) -> tuple[list[Request], Levels]:
        """An order of the requests in which those that share stand side by side, and the runs of blocks to read once;
        the order as it is when none is worth it. `rows`: query rows of each request (None: one)."""
        memory = self._memory.get(rows is None)
        if memory is None or memory.asked != requests or memory.rows != rows:
            arranged, levels = self._arrange(requests, [1] * len(requests) if rows is None else rows)
            memory = _Memory(list(requests), None if rows is None else list(rows), arranged, levels)
            self._memory[rows is None] = memory
        return list(memory.arranged), memory.levels

    def _could_save(self, requests: Sequence[Request], rows: Sequence[int]) -> bool:
        """Whether it would be worth it if all had the same blocks: not for chunks that fill tiles alone."""
        if len(requests) < 2:
            return False
        lengths = sorted(len(request.block_ids) for request in requests)
        tile = self.limits.tile_rows
        saved = sum(-(-n // tile) for n in rows) - -(-sum(rows) // tile)
        return saved > 0 and saved * lengths[-2] >= self.limits.least_saved_blocks

    def _arrange(self, requests: Sequence[Request], rows: Sequence[int]) -> tuple[list[Request], Levels]:
        if not self._could_save(requests, rows):
            return list(requests), ()
        count = dict(zip(requests, rows, strict=True))
        chosen: list[Request] = []
        between: list[int] = []  # leading blocks that chosen[i] and chosen[i + 1] share
        shared = 0
        for request, common in zip(self._order, self._common, strict=True):
            if request in count:
                chosen.append(request)
                between.append(shared)
                shared = common
            else:
                shared = min(shared, common)
        if len(chosen) != len(count):
            raise ValueError("asked for a request that has not joined")
        if not any(between):
            return list(requests), ()
        levels = _best_levels(between[1:], [count[request] for request in chosen], self.limits)
        return _sharing_first(chosen, levels) if levels else (list(requests), ())


def _common_blocks(a: Sequence[int], b: Sequence[int], known: int) -> int:
    """Equal leading entries; the first `known` are."""
    limit = min(len(a), len(b))
    while known < limit and a[known] == b[known]:
        end = min(known + _STRIDE, limit)
        if a[known:end] == b[known:end]:
            known = end
        else:
            known += 1
    return known


def _tree(between: Sequence[int], rows: Sequence[int], tile: int) -> tuple[list[_Node], int]:
    """The nodes with blocks at the top, of rows of which i and i + 1 share `between[i]` blocks; and what all nodes
    would save, each as a run of its own: no levels save more."""
    roots: list[_Node] = []
    most = 0
    open_nodes: list[_Node] = []  # each within the one before
    row_sums, tile_sums = [0, *accumulate(rows)], [0, *accumulate(-(-n // tile) for n in rows)]
    for row, common in enumerate([*between, 0]):
        first, child = row, None
        while open_nodes and open_nodes[-1].blocks > common:
            child = open_nodes.pop()
            child.end = end = row + 1
            first = child.first
            # Rows apart read as many tiles as they fill, rows together as few as all of them fill.
            apart, together = tile_sums[end] - tile_sums[first], -(-(row_sums[end] - row_sums[first]) // tile)
            child.tiles = apart - together
            most += child.tiles * (child.blocks - max(common, open_nodes[-1].blocks if open_nodes else 0))
            if open_nodes and open_nodes[-1].blocks >= common:
                open_nodes[-1].children.append(child)
                child = None
        if common > (open_nodes[-1].blocks if open_nodes else 0):
            open_nodes.append(_Node(first, row + 1, common, [] if child is None else [child]))
        elif child is not None:
            roots.append(child)
    return roots, most


@dataclass(frozen=True, slots=True)
class _Pick:
    """A node whose blocks from `start` on are read once, and picks of the next level within it."""

    node: _Node
    start: int
    below: list["_Pick"]


def _best_levels(between: Sequence[int], rows: Sequence[int], limits: SharingLimits) -> Levels:
    """The runs that save most after the cost of their levels; none when nothing saves more than it costs."""
    roots, most = _tree(between, rows, limits.tile_rows)

    def best(nodes: Sequence[_Node], start: int, levels: int, depth: int) -> tuple[int, list[_Pick]]:
        total, picks = 0, []
        for node in nodes:
            deeper = node.children if depth < _DEEPEST else ()
            passed, passed_picks = best(deeper, start, levels, depth + 1) if deeper else (0, [])
            below, below_picks = best(deeper, node.blocks, levels - 1, depth + 1) if deeper and levels > 1 else (0, [])
            taken = node.tiles * (node.blocks - start) + below
            total += max(passed, taken)
            if taken > passed:
                picks.append(_Pick(node, start, below_picks))
            else:
                picks += passed_picks
        return total, picks

    found: tuple[int, list[_Pick]] = (0, [])
    for levels in range(1, limits.max_levels + 1):
        most_after_cost = most - levels * limits.least_saved_blocks
        if most_after_cost < found[0] or (found[1] and most_after_cost == found[0]):
            break  # without looking for it: mostly there are no prefixes within prefixes, or none that pay
        saved, picks = best(roots, 0, levels, 1)
        after_cost = saved - levels * limits.least_saved_blocks
        if picks and after_cost >= found[0] and (not found[1] or after_cost > found[0]):
            found = after_cost, picks
    return _runs(found[1])


def _runs(picks: Sequence[_Pick]) -> Levels:
    levels: list[tuple[SharedRun, ...]] = []
    while picks:
        levels.append(tuple(SharedRun(p.node.first, p.node.end, p.start, p.node.blocks) for p in picks))
        picks = [below for pick in picks for below in pick.below]
    return tuple(levels)


def _sharing_first(chosen: Sequence[Request], levels: Levels) -> tuple[list[Request], Levels]:
    """Requests without a run at the end, so that they make one group."""
    order: list[int] = [row for run in levels[0] for row in range(run.first, run.end)]
    place = {row: new for new, row in enumerate(order)}
    alone = [request for row, request in enumerate(chosen) if row not in place]
    moved = tuple(
        tuple(SharedRun(place[run.first], place[run.first] + run.end - run.first, run.start, run.stop) for run in level)
        for level in levels
    )
    return [chosen[row] for row in order] + alone, moved
