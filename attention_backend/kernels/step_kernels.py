"""The attention kernels that steps over a paged cache will want, known before any runs: so they are compiled side by
side, not one after another as steps meet them. Knows no model and no device."""

from collections.abc import Iterator
from itertools import product

import torch

from attention_backend.heuristics.decode import DECODE_ROWS, FEW_HOPPER_ROWS, hopper_page_rows
from attention_backend.heuristics.sm90 import BY_ROWS, LONG, MIN_PAGE_ROWS, shares_keys_from
from attention_backend.heuristics.sm90_chunks import PAIRS_KEYS
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels.decode_variants import decode_variant, hopper_decode_variant
from attention_backend.kernels.flash_merge import merge_variant
from attention_backend.kernels.hopper_variants import (
    HopperOptions,
    can_be_tall,
    can_share_keys,
    hopper_layout,
    hopper_variant,
    reads_fp8_pages,
)
from attention_backend.kernels.variants import Options, forward_variant

_HOPPER = "sm_90a"


def step_variants(
    arch: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    *,
    group: int,
    page_size: int,
    softcap: bool = False,
    left_bounds: bool = False,
    fp8_kv: bool = False,
    most_keys: int = LONG,
) -> Iterator[KernelVariant]:
    """For layers of `group` query heads a key head over pages of `page_size` keys, dtype bfloat16 or float16: prefill,
    decode and short prefills, merges; `most_keys`: of a sequence. With `left_bounds` layers have windows or chunks;
    without, there may be passes over keys that requests share and over those behind, of which both see keys from some
    key on. Raises UnsupportedError for what no kernel serves."""
    options = Options(dtype, head_dim, head_dim_v, paged=True, softcap=softcap)
    most_rows = DECODE_ROWS
    if arch == _HOPPER and page_size % MIN_PAGE_ROWS == 0:
        if not fp8_kv:
            most_rows = FEW_HOPPER_ROWS
        which = HopperOptions(options, page_size=page_size, left_bounds=left_bounds)
        yield from _hopper_forwards(which, group, most_keys, fp8_kv=fp8_kv)
    else:
        yield forward_variant(options, arch)[0]
    rows = group
    while rows <= most_rows:
        if arch == _HOPPER and hopper_page_rows(page_size) is not None:
            yield hopper_decode_variant(options, rows, page_size, fp8_kv=fp8_kv)[0]
        else:
            yield decode_variant(options, arch, rows, fp8_kv=fp8_kv)[0]
        rows *= 2
    yield merge_variant(dtype, head_dim_v, arch)


def _hopper_forwards(which: HopperOptions, group: int, most_keys: int, *, fp8_kv: bool) -> Iterator[KernelVariant]:
    each_kind = [which, which._replace(long=True)] if most_keys >= LONG else [which]  # with fp8_kv of copies
    if can_be_tall(which):
        each_kind += [kind._replace(tall=True) for kind in each_kind]
    if fp8_kv and reads_fp8_pages(which.options):
        each_kind.append(which._replace(fp8=True))
    packs = (False, True) if group > 1 else (False,)
    for each in each_kind:
        for bounds, pack, split in product({which.left_bounds, True}, packs, (False, True)):
            yield hopper_variant(each._replace(left_bounds=bounds), pack=pack, split=split)
        if not each.long or not can_share_keys(each) or which.left_bounds:
            continue
        shared = shares_keys_from(hopper_layout(each).tiles[0], group, causal=True)
        if shared and most_keys >= shared[1]:
            for bounds in (False, True):
                yield hopper_variant(each._replace(left_bounds=bounds, cluster=shared[0]))
        if group > 1 and most_keys >= PAIRS_KEYS:
            for split in (False, True):
                yield hopper_variant(each._replace(cluster=BY_ROWS), pack=True, split=split)
