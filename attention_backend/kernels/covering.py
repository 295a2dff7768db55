"""The variants that are compiled ahead of time: every kernel, head_dim tile, dtype and option at least once.

What a call needs beyond them is compiled at its first use. Knows no device.
"""

from collections.abc import Iterator
from itertools import product

import torch

from attention_backend.heuristics import sm90
from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.heuristics.sm90 import BY_HEADS, BY_ROWS
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import flash_fwd_fp8_sm90, hopper_backward_variants, linear_variants
from attention_backend.kernels.backward_covering import backward_covering_set
from attention_backend.kernels.choose_tokens import choice_variant
from attention_backend.kernels.copy_pages import copy_pages_variant
from attention_backend.kernels.decode_covering import decode_covering_set
from attention_backend.kernels.flash_merge import merge_variant
from attention_backend.kernels.hopper_variants import HopperOptions, can_be_tall, hopper_variant, reads_fp8_pages
from attention_backend.kernels.layer_covering import layer_covering_set
from attention_backend.kernels.variants import Options, f32_variant, forward_variant


def covering_set(arch: str) -> Iterator[KernelVariant]:
    """What the server runs (16-bit over pages, every head_dim) and each other option once. May repeat a variant."""
    # The served dtype, and the other one: Turing has no bfloat16.
    main, other = (torch.float16,) * 2 if arch == "sm_75" else (torch.bfloat16, torch.float16)
    for tile in HEAD_DIM_TILES:
        yield forward_variant(Options(main, tile, tile, paged=True), arch)[0]
        yield forward_variant(Options(other, tile, tile), arch)[0]
    for odd in (Options(main, 72, 72), Options(main, 192, 128, paged=True)):
        yield forward_variant(odd, arch)[0]
    for extra in _extras(main):
        yield forward_variant(extra, arch)[0]
    if arch == "sm_90a":
        yield from _hopper()
        yield from _pairs_of_packed_tiles()
        yield from flash_fwd_fp8_sm90.covering_set()
        yield from hopper_backward_variants.covering_set()
    yield from linear_variants.covering(arch)
    yield from layer_covering_set(arch)
    for head_dim in (32, 64, 128, 256):
        yield merge_variant(main, head_dim, arch)
    yield merge_variant(other, 128, arch)
    yield merge_variant(torch.float32, 128, arch)
    for dtype in dict.fromkeys((main, other, torch.float32)):
        yield choice_variant(dtype, arch)
    for to_pages in (False, True):
        yield copy_pages_variant(arch, to_pages=to_pages)
    yield from decode_covering_set(arch)
    yield from backward_covering_set(arch)
    yield f32_variant(Options(torch.float32, 64, 64), arch)[0]
    yield f32_variant(Options(torch.float32, 128, 128, paged=True), arch)[0]
    yield f32_variant(Options(torch.float32, 256, 256, key_mask=True, softcap=True, alibi=True, bias=1), arch)[0]


def _hopper() -> Iterator[KernelVariant]:
    bf16, fp16 = torch.bfloat16, torch.float16
    for tile in sm90.HEAD_DIM_TILES:
        paged = HopperOptions(Options(bf16, tile, tile, paged=True), page_size=64)
        yield hopper_variant(paged)
        yield hopper_variant(paged, pack=True)
        yield hopper_variant(paged, pack=True, split=True)
        yield hopper_variant(paged._replace(long=True), pack=True)
        yield hopper_variant(paged._replace(left_bounds=True), pack=True)
        yield hopper_variant(HopperOptions(Options(bf16, tile, tile), left_bounds=True))
        if reads_fp8_pages(paged.options):
            yield hopper_variant(paged._replace(fp8=True), pack=True, split=True)
        yield hopper_variant(HopperOptions(Options(fp16, tile, tile)))
        yield hopper_variant(HopperOptions(Options(bf16, tile, tile), long=True))
        yield hopper_variant(HopperOptions(Options(bf16, tile, tile), sparse=True))
        for extra in (
            Options(bf16, tile, tile, key_mask=True),
            Options(bf16, tile, tile, softcap=True),
            Options(bf16, tile, tile, alibi=True),
            Options(bf16, tile, tile, dropout=True),
        ):
            yield hopper_variant(HopperOptions(extra))
    for tile, tile_v in sm90.MIXED_TILES:
        yield hopper_variant(HopperOptions(Options(bf16, tile, tile_v)))
        yield hopper_variant(HopperOptions(Options(bf16, tile, tile_v, paged=True), page_size=64), pack=True)
    yield hopper_variant(HopperOptions(Options(bf16, 128, 128, paged=True, softcap=True), page_size=64), pack=True)
    for pack in (False, True):
        yield hopper_variant(HopperOptions(Options(bf16, 128, 128, paged=True), page_size=64, fp8=True), pack=pack)
    yield hopper_variant(HopperOptions(Options(fp16, 64, 64, paged=True), page_size=64, fp8=True), pack=True)
    yield hopper_variant(HopperOptions(Options(bf16, 128, 128, paged=True, key_mask=True), page_size=64, fp8=True))
    for tile, tile_v in sm90.TALL_TILES:
        tall = HopperOptions(Options(bf16, tile, tile_v, paged=True), page_size=64, tall=True)
        for pack, split in product((False, True), (False, True)):
            yield hopper_variant(tall, pack=pack, split=split)
            yield hopper_variant(tall._replace(left_bounds=True), pack=pack, split=split)
        yield hopper_variant(HopperOptions(Options(bf16, tile, tile_v), tall=True))
        yield hopper_variant(HopperOptions(Options(fp16, tile, tile_v), tall=True))
    for dtype, (tile, tile_v) in product((bf16, fp16), sm90.OWN_TILES):
        own = HopperOptions(Options(dtype, tile, tile_v), own=True)
        yield hopper_variant(own)
        yield hopper_variant(own._replace(left_bounds=True))
    for cluster, tile in product((BY_ROWS, BY_HEADS), (128, 256)):
        plain = HopperOptions(Options(bf16, tile, tile), cluster=cluster)
        for each in (plain, HopperOptions(Options(bf16, tile, tile, paged=True), page_size=32, cluster=cluster)):
            yield hopper_variant(each)
            yield hopper_variant(each._replace(long=True))
            if can_be_tall(each):
                yield hopper_variant(each._replace(tall=True))
    yield hopper_variant(HopperOptions(Options(fp16, 128, 128), cluster=BY_HEADS))
    for head_dim, pack in product((64, 128), (False, True)):
        pages = HopperOptions(Options(bf16, head_dim, head_dim, paged=True), page_size=64, fp8=True, left_bounds=True)
        yield hopper_variant(pages, pack=pack, split=pack)
    yield hopper_variant(HopperOptions(Options(bf16, 64, 64, bias=1)))
    yield hopper_variant(HopperOptions(Options(bf16, 128, 128, bias=2)))


def _pairs_of_packed_tiles() -> Iterator[KernelVariant]:
    for (tile, tall), split in product(((128, False), (128, True), (256, False)), (False, True)):
        pages = HopperOptions(Options(torch.bfloat16, tile, tile, paged=True), long=True, page_size=32, tall=tall)
        yield hopper_variant(pages._replace(cluster=BY_ROWS), pack=True, split=split)


def _extras(dtype: torch.dtype) -> Iterator[Options]:
    yield Options(dtype, 64, 64, key_mask=True)
    yield Options(dtype, 128, 128, alibi=True)
    yield Options(dtype, 64, 64, bias=2)
    yield Options(dtype, 128, 128, bias=1)
    yield Options(dtype, 256, 256, paged=True, softcap=True)  # Gemma 2
