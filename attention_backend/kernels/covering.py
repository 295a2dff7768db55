"""The variants that are compiled ahead of time: every kernel, head_dim tile, dtype and option at least once.

What a call needs beyond them is compiled at its first use. Knows no device.
"""

from collections.abc import Iterator

import torch

from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.heuristics.sm90 import HEAD_DIMS
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels.decode_variants import combine_variant, decode_variant, store_variant
from attention_backend.kernels.variants import (
    Options,
    f32_variant,
    forward_variant,
    hopper_variant,
)


def covering_set(arch: str) -> Iterator[KernelVariant]:
    """What the server runs (16-bit over pages, every head_dim) and each other option once. May repeat a variant."""
    # The served dtype, and the other one: Turing has no bfloat16.
    main, other = (torch.float16,) * 2 if arch == "sm_75" else (torch.bfloat16, torch.float16)
    for tile in HEAD_DIM_TILES:
        yield forward_variant(Options(main, tile, tile, paged=True), arch)[0]
        yield decode_variant(Options(main, tile, tile, paged=True), arch, 8)[0]
        yield forward_variant(Options(other, tile, tile), arch)[0]
    for rows in (16, 32):
        yield decode_variant(Options(main, 128, 128, paged=True), arch, rows)[0]
        yield decode_variant(Options(other, 256, 256), arch, rows)[0]
    for odd in (Options(main, 72, 72), Options(main, 192, 128, paged=True)):
        yield forward_variant(odd, arch)[0]
        yield decode_variant(odd, arch, 8)[0]
    for extra in _extras(main):
        yield forward_variant(extra, arch)[0]
        yield decode_variant(extra, arch, 8)[0]
    if arch == "sm_90a":
        yield from _hopper()
    for dtype in (main, other):
        yield combine_variant(dtype, arch)
    for dtype, rotary in ((main, 0), (main, 1), (main, 2), (other, 0), (torch.float32, 0), (torch.float32, 1)):
        yield store_variant(dtype, arch, rotary)
    yield f32_variant(Options(torch.float32, 64, 64), arch)
    yield f32_variant(Options(torch.float32, 128, 128, paged=True), arch)
    yield f32_variant(Options(torch.float32, 256, 256, key_mask=True, softcap=True, alibi=True, bias=1), arch)


def _hopper() -> Iterator[KernelVariant]:
    bf16, fp16 = torch.bfloat16, torch.float16
    for head_dim in HEAD_DIMS:
        yield hopper_variant(Options(bf16, head_dim, head_dim, paged=True), False, 64)[0]
        yield hopper_variant(Options(fp16, head_dim, head_dim), True, 0)[0]
        yield hopper_variant(Options(bf16, head_dim, head_dim), False, 0)[0]
    yield hopper_variant(Options(bf16, 128, 128, paged=True, softcap=True), False, 64)[0]


def _extras(dtype: torch.dtype) -> Iterator[Options]:
    yield Options(dtype, 64, 64, key_mask=True)
    yield Options(dtype, 128, 128, alibi=True)
    yield Options(dtype, 64, 64, bias=2)
    yield Options(dtype, 128, 128, bias=1)
    yield Options(dtype, 256, 256, paged=True, softcap=True)  # Gemma 2
