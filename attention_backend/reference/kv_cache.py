"""New keys and values into the pages of a KV cache. Knows no sequences, only slots."""

from torch import Tensor


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes token t to slot `slot_mapping[t]` = block * block_size + offset; negative slots are skipped.

    k `[T, Hkv, D]`, v `[T, Hkv, Dv]`, caches `[num_blocks, Hkv, block_size, D or Dv]` of any strides, slot_mapping
    integer `[T]`.
    """
    slots = slot_mapping.long()
    kept = slots >= 0
    if not bool(kept.all()):
        slots, k, v = slots[kept], k[kept], v[kept]
    block_size = k_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    # Indices on both sides of a slice put the indexed dimension first: [T, Hkv, D], the shape of k.
    k_cache[block, :, offset] = k.to(k_cache.dtype)
    v_cache[block, :, offset] = v.to(v_cache.dtype)
