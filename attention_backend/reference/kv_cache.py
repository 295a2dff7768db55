"""New keys and values into the pages of a KV cache. Knows no sequences, only slots."""

from torch import Tensor

from attention_backend.reference.contents import ByContents

_places: ByContents[tuple[Tensor, Tensor, Tensor | None]] = ByContents()


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes token t to slot `slot_mapping[t]` = block * block_size + offset; negative slots are skipped.

    k `[T, Hkv, D]`, v `[T, Hkv, Dv]`, caches `[num_blocks, Hkv, block_size, D or Dv]` of any strides, slot_mapping
    integer `[T]`.
    """
    block_size = k_cache.shape[2]
    block, offset, kept = _places.get(lambda: _split(slot_mapping, block_size), (slot_mapping,), block_size)
    if kept is not None:
        k, v = k[kept], v[kept]
    # Indices on both sides of a slice put the indexed dimension first: [T, Hkv, D], the shape of k.
    k_cache[block, :, offset] = k.to(k_cache.dtype)
    v_cache[block, :, offset] = v.to(v_cache.dtype)


def _split(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(block, offset, which tokens are stored) of each stored token, int64; None for all."""
    kept = slots >= 0
    stored = slots[kept].long()
    return stored // block_size, stored % block_size, None if bool(kept.all()) else kept
