"""parts/decode_plan.cuh in Python: who works on which tiles of a decode, and where the results go."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Segment:
    part: int
    batch: int
    kv_head: int
    begin: int
    end: int
    first_slot: int
    num_segments: int
    slot: int


_DRAWN_FROM, _PIECE_TILES = 32, 8


def segments(tiles: Sequence[int], heads: int, blocks: int, min_tiles: int, most_pieces: int = 0) -> Iterator[Segment]:
    """`tiles` of each sequence, at least 1. `part` counts the blocks' stretches, then the pieces that blocks draw."""
    prefix = [0, *accumulate(tiles)]
    given = work = prefix[-1] * heads
    share, piece, pieces = max(min_tiles, -(-work // blocks)), 1, 0
    if most_pieces and share >= _DRAWN_FROM:
        share = work // blocks - work // blocks // 8
        given = share * blocks
        piece = max(_PIECE_TILES, -(-(work - given) // most_pieces))
        pieces = -(-(work - given) // piece)

    def part_of(at: int) -> int:
        return at // share if at < given else blocks + (at - given) // piece

    for part in range(blocks + pieces):
        if part < blocks:
            position = min(part * share, given)
            end = min(share, given - position) + position
        else:
            position = given + (part - blocks) * piece
            end = min(piece, work - position) + position
        while position < end:
            batch = bisect_right([start * heads for start in prefix[:-1]], position) - 1
            length, start = prefix[batch + 1] - prefix[batch], prefix[batch] * heads
            head = (position - start) // length
            pair_start, pair = start + head * length, batch * heads + head
            stop = min(end - pair_start, length)
            yield Segment(
                part,
                batch,
                head,
                position - pair_start,
                stop,
                part_of(pair_start) + pair,
                part_of(pair_start + length - 1) - part_of(pair_start) + 1,
                part + pair,
            )
            position = pair_start + stop
