"""parts/decode_plan.cuh in Python: who works on which tiles of a decode, and where the results go."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Segment:
    block: int
    batch: int
    kv_head: int
    begin: int
    end: int
    first_slot: int
    num_segments: int
    slot: int


def segments(tiles: Sequence[int], heads: int, parts: int, min_tiles: int) -> Iterator[Segment]:
    """`tiles` of each sequence: at least 1, or 0 where it has no rows."""
    prefix = [0, *accumulate(tiles)]
    work = prefix[-1]
    share = max(min_tiles, -(-work // parts))
    for block in range(parts * heads):
        part, head = divmod(block, heads)
        position = min(part * share, work)
        end = min(share, work - position) + position
        while position < end:
            batch = bisect_right(prefix[:-1], position) - 1
            start, length = prefix[batch], prefix[batch + 1] - prefix[batch]
            first_part, first_slot = start // share, head * (parts + len(tiles)) + batch
            stop = min(end - start, length)
            yield Segment(
                block,
                batch,
                head,
                position - start,
                stop,
                first_slot + first_part,
                (start + length - 1) // share - first_part + 1,
                first_slot + part,
            )
            position = start + stop
