"""When a pass over shared pages pays. Pure arithmetic: no torch, no device."""

#: Packed query rows (requests x query heads of a key head) of one tile of the pass: up to so many cost as much as one.
TILE_ROWS = 128

#: What a level costs a layer beside its keys, in bytes of keys and values that could be read meanwhile. On a GPU, two
#: more launches, partial results and the merge: some 10 us at 4.3 TB/s, times two, as requests that walk the same pages
#: side by side find half of them in the L2 (64 requests on 100k keys: 3.1 ms apart, 0.23 ms together, on an H200). A
#: further level is a launch less, as one merge does for all; it must save as much. On a CPU, a few more torch calls.
LEVEL_BYTES = {"cuda": 96 << 20, "cpu": 6 << 20}


def least_saved_keys(device: str, bytes_per_key: int) -> int:
    """Keys of one layer that must be read less often in a step before a level of sharing pays. `bytes_per_key`: of keys
    and values of that layer, all heads."""
    return -(-LEVEL_BYTES[device] // bytes_per_key)
