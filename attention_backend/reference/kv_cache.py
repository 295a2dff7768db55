"""New keys and values into the pages of a KV cache. Knows no sequences, only slots."""

import torch
from torch import Tensor

from attention_backend.reference.contents import ByContents

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max

_places: ByContents[tuple[Tensor, Tensor, Tensor | None]] = ByContents()


def store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes token t to slot `slot_mapping[t]` = block * block_size + offset; negative slots are skipped.

    k `[T, Hkv, D]`, v `[T, Hkv, Dv]`, caches `[num_blocks, Hkv, block_size, D or Dv]` of any strides, slot_mapping
    integer `[T]`. float8_e4m3fn caches need the scales, float32 `[Hkv]`: what is stored is the value over its head's
    scale, within +-448.
    """
    block_size = k_cache.shape[2]
    block, offset, kept = _places.get(lambda: _split(slot_mapping, block_size), (slot_mapping,), block_size)
    if kept is not None:
        k, v = k[kept], v[kept]
    # Indices on both sides of a slice put the indexed dimension first: [T, Hkv, D], the shape of k.
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if cache.dtype == FP8:
            if scale is None:
                raise ValueError(f"{FP8} caches need k_scale and v_scale")
            # Indexed assignment knows no float8: bytes are bytes.
            cache.view(torch.uint8)[block, :, offset] = quantised(new, scale).view(torch.uint8)
        else:
            cache[block, :, offset] = new.to(cache.dtype)


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """x `[..., heads, D]` over its head's scale as float8_e4m3fn, +-448 beyond."""
    return (x.float() / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(FP8)


def _split(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(block, offset, which tokens are stored) of each stored token, int64; None for all."""
    kept = slots >= 0
    stored = slots[kept].long()
    return stored // block_size, stored % block_size, None if bool(kept.all()) else kept
