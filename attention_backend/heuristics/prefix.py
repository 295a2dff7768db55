"""How often the pass over shared pages splits its keys. Pure arithmetic: no torch, no device."""

_TILE_ROWS = 128
_SHORTEST = 512  # keys of a split, below which it is all beginning and end
_FIXED = 256  # what a tile costs beyond its keys, in keys: its start, and its partial result written and read again
_MOST = 128


def prefix_splits(rows: int, groups: int, num_heads: int, num_kv_heads: int, max_keys: int, num_sms: int) -> int:
    """The number of splits whose last wave of tiles ends first. `rows` are query rows of all `groups` together;
    `max_keys` may be an upper bound, as it is when a CUDA graph is captured."""
    # A tile packs the query heads of a key head's group; every group of requests may leave one tile part empty.
    tiles = (-(-rows * (num_heads // num_kv_heads) // _TILE_ROWS) + groups - 1) * num_kv_heads

    def time(splits: int) -> float:
        return -(-tiles * splits // num_sms) * (max_keys / splits + _FIXED)

    return min(range(1, max(1, min(_MOST, max_keys // _SHORTEST)) + 1), key=time)
