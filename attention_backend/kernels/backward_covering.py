"""The generic backward's variants that are compiled ahead of time. Knows no device."""

from collections.abc import Iterator

import torch

from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels.backward_variants import backward_variant, postprocess_variant, preprocess_variant
from attention_backend.kernels.flash_bwd_parts import sum_parts_variant
from attention_backend.kernels.variants import Options


def backward_covering_set(arch: str) -> Iterator[KernelVariant]:
    """Every head_dim, the deterministic sums, and each other option once. May repeat a variant."""
    main, other = (torch.float16,) * 2 if arch == "sm_75" else (torch.bfloat16, torch.float16)
    for tile in HEAD_DIM_TILES:
        yield preprocess_variant(main, tile, arch)
        for short in (False, True):
            yield backward_variant(Options(main, tile, tile), arch, deterministic=False, short=short)[0]
        yield postprocess_variant(main, tile, arch)
    yield sum_parts_variant(main, arch)
    yield sum_parts_variant(other, arch)
    yield preprocess_variant(other, 128, arch)
    yield backward_variant(Options(other, 128, 128), arch, deterministic=False)[0]
    yield postprocess_variant(other, 128, arch)
    for tile in (64, 128, 256):
        yield backward_variant(Options(main, tile, tile), arch, deterministic=True)[0]
    for extra in (
        Options(main, 72, 72),
        Options(main, 192, 128),
        Options(main, 64, 64, key_mask=True),
        Options(main, 64, 64, alibi=True),
        Options(main, 128, 128, dropout=True),
        Options(main, 256, 256, softcap=True),
    ):
        yield backward_variant(extra, arch, deterministic=False)[0]
