"""The decode and store kernels that are compiled ahead of time, as `covering` wants them. May repeat a variant."""

from collections.abc import Iterator

import torch

from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.jit.spec import KernelVariant, capability_of
from attention_backend.kernels.decode_variants import FP8_FROM, decode_variant, hopper_decode_variant, store_variant
from attention_backend.kernels.dequantize_pages import dequantize_variant
from attention_backend.kernels.variants import Options


def decode_covering_set(arch: str) -> Iterator[KernelVariant]:
    """What the server runs (16-bit over pages, every head_dim) and each other option once."""
    # The served dtype, and the other one: Turing has no bfloat16.
    main, other = (torch.float16,) * 2 if arch == "sm_75" else (torch.bfloat16, torch.float16)
    fp8 = capability_of(arch) >= FP8_FROM
    for tile in HEAD_DIM_TILES:
        yield decode_variant(Options(main, tile, tile, paged=True), arch, 8)[0]
        if arch == "sm_90a":
            yield hopper_decode_variant(Options(main, tile, tile, paged=True), 8, 64)[0]
    for rows in (16, 32):
        yield decode_variant(Options(main, 128, 128, paged=True), arch, rows)[0]
        yield decode_variant(Options(other, 256, 256), arch, rows)[0]
    for odd in (Options(main, 72, 72), Options(main, 192, 128, paged=True)):
        yield decode_variant(odd, arch, 8)[0]
    for extra in (
        Options(main, 64, 64, key_mask=True),
        Options(main, 128, 128, alibi=True),
        Options(main, 64, 64, bias=2),
        Options(main, 128, 128, bias=1),
        Options(main, 256, 256, paged=True, softcap=True),  # Gemma 2
    ):
        yield decode_variant(extra, arch, 8)[0]
    if fp8:
        yield decode_variant(Options(main, 128, 128, paged=True), arch, 8, fp8_kv=True)[0]
        yield decode_variant(Options(other, 64, 64), arch, 16, fp8_kv=True)[0]
        yield store_variant(main, arch, 0, fp8_kv=True)
        yield store_variant(main, arch, 1, fp8_kv=True)
        for dtype in (main, other):
            yield dequantize_variant(dtype, arch)
    if arch == "sm_90a":
        yield from _hopper(main, other)
    for dtype, rotary in ((main, 0), (main, 1), (main, 2), (other, 0), (torch.float32, 0), (torch.float32, 1)):
        yield store_variant(dtype, arch, rotary)


def _hopper(main: torch.dtype, other: torch.dtype) -> Iterator[KernelVariant]:
    for rows in (16, 32):
        yield hopper_decode_variant(Options(main, 128, 128, paged=True), rows, 16)[0]
        yield hopper_decode_variant(Options(other, 256, 256), rows, 0)[0]
    for fp8_dim, rows in ((128, 8), (64, 16), (256, 8)):
        yield hopper_decode_variant(Options(main, fp8_dim, fp8_dim, paged=True), rows, 64, fp8_kv=True)[0]
    yield hopper_decode_variant(Options(main, 128, 128, alibi=True), 8, 0)[0]
    yield hopper_decode_variant(Options(main, 64, 64, bias=1), 8, 0)[0]
    yield hopper_decode_variant(Options(main, 256, 256, paged=True, softcap=True), 8, 64)[0]
