"""The variants that are compiled ahead of time: every kernel, head_dim tile, dtype and option at least once.

What a call needs beyond them is compiled at its first use. Knows no device.
"""

from collections.abc import Iterator

import torch

from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels.variants import (
    Options,
    combine_variant,
    decode_variant,
    f32_variant,
    forward_variant,
    store_variant,
)

#: Query rows of a group that stand for the decode kernel's widths.
_DECODE_ROWS = (8, 16, 32)


def covering_set(arch: str) -> Iterator[KernelVariant]:
    """Every variant a plain causal or full call can need, and each option once. May repeat a variant."""
    halves = (torch.float16,) if arch == "sm_75" else (torch.bfloat16, torch.float16)
    for dtype in halves:
        for paged in (False, True):
            for tile in HEAD_DIM_TILES:
                options = Options(dtype, tile, tile, paged)
                yield forward_variant(options, arch)[0]
                for rows in _DECODE_ROWS if tile in (64, 128) and paged else (8,):
                    yield decode_variant(options, arch, rows)[0]
            for odd in (Options(dtype, 72, 72, paged), Options(dtype, 192, 128, paged)):
                yield forward_variant(odd, arch)[0]
                yield decode_variant(odd, arch, 8)[0]
        for options in _with_options(dtype):
            yield forward_variant(options, arch)[0]
            yield decode_variant(options, arch, 8)[0]
        yield combine_variant(dtype, arch)
    for dtype in (*halves, torch.float32):
        for rotary in (0, 1, 2):
            yield store_variant(dtype, arch, rotary)
    for options in (Options(torch.float32, 64, 64), Options(torch.float32, 128, 128, paged=True)):
        yield f32_variant(options, arch)
    for options in _with_options(torch.float32):
        yield f32_variant(options, arch)


def _with_options(dtype: torch.dtype) -> Iterator[Options]:
    own = 1 if dtype == torch.float32 else 2
    for tile in (64, 128):
        yield Options(dtype, tile, tile, key_mask=True)
        yield Options(dtype, tile, tile, softcap=True)
        yield Options(dtype, tile, tile, alibi=True)
        yield Options(dtype, tile, tile, bias=own)
    yield Options(dtype, 256, 256, paged=True, softcap=True)  # Gemma 2
    yield Options(dtype, 64, 64, bias=1)
