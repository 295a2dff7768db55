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


def segments(tiles: Sequence[int], heads: int, blocks: int, min_tiles: int) -> Iterator[Segment]:
    """`tiles` of each sequence, at least 1."""
    prefix = [0, *accumulate(tiles)]
    work = prefix[-1] * heads
    share = max(min_tiles, -(-work // blocks))
    for block in range(blocks):
        position = min(block * share, work)
        end = min(share, work - position) + position
        while position < end:
            batch = bisect_right([start * heads for start in prefix[:-1]], position) - 1
            length, start = prefix[batch + 1] - prefix[batch], prefix[batch] * heads
            head = (position - start) // length
            pair_start, pair = start + head * length, batch * heads + head
            first_block = pair_start // share
            stop = min(end - pair_start, length)
            yield Segment(
                block,
                batch,
                head,
                position - pair_start,
                stop,
                first_block + pair,
                (pair_start + length - 1) // share - first_block + 1,
                block + pair,
            )
            position = pair_start + stop
