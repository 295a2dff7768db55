"""When a pass over shared pages pays, and how often it splits its keys. Pure arithmetic: no torch, no device."""

from functools import lru_cache

#: Packed query rows (requests x query heads of a key head) of one tile of the pass: up to so many cost as much as one.
TILE_ROWS = 128
_SHORTEST = 512  # keys of a split, below which it is all beginning and end
_FIXED = 256  # what a tile costs beyond its keys, in keys: its start, and its partial result written and read again
_MOST = 128
_LIKELY_GROUPS = (1, 2, 4)

#: What a level costs a layer beside its keys, in bytes of keys and values that could be read meanwhile. On a GPU, two
#: more launches, partial results and the merge: some 10 us at 4.3 TB/s, times two, as requests that walk the same pages
#: side by side find half of them in the L2 (64 requests on 100k keys: 3.1 ms apart, 0.23 ms together, on an H200). A
#: further level is a launch less, as one merge does for all; it must save as much. On a CPU, a few more torch calls.
LEVEL_BYTES = {"cuda": 96 << 20, "cpu": 6 << 20}


def least_saved_keys(device: str, bytes_per_key: int) -> int:
    """Keys of one layer that must be read less often in a step before a level of sharing pays. `bytes_per_key`: of keys
    and values of that layer, all heads."""
    return -(-LEVEL_BYTES[device] // bytes_per_key)


@lru_cache(maxsize=1024)  # the layers of a step have one
def prefix_splits(rows: int, groups: int, num_heads: int, num_kv_heads: int, max_keys: int, num_sms: int) -> int:
    """The number of splits whose last wave of tiles ends first. `rows` are query rows of all `groups` together;
    `groups` and `max_keys` may be upper bounds, as they are when a CUDA graph is captured."""

    def time(splits: int, filled: int) -> float:
        # A tile packs the query heads of a key head's group; every group of requests may leave one tile part empty.
        tiles = (-(-rows * (num_heads // num_kv_heads) // TILE_ROWS) + filled - 1) * num_kv_heads
        return -(-tiles * splits // num_sms) * (max_keys / splits + _FIXED)

    likely = [filled for filled in _LIKELY_GROUPS if filled <= groups]
    return min(
        range(1, max(1, min(_MOST, max_keys // _SHORTEST)) + 1),
        key=lambda splits: sum(time(splits, filled) for filled in likely),
    )
