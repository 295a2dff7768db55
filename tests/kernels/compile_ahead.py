"""Compiles the kernels that selected cases need, on all cores, before the first of them runs: minutes become seconds.

Only a head start: a kernel that is missing here is compiled at its first launch as usual.
"""

from collections.abc import Iterable

import torch

from attention_backend.heuristics import sm90
from attention_backend.heuristics.decode import DECODE_ROWS, FEW_HOPPER_ROWS, hopper_page_rows
from attention_backend.heuristics.sm80_backward import is_short
from attention_backend.heuristics.sm90 import BY_HEADS, BY_ROWS, CLUSTER
from attention_backend.jit import KernelVariant, arch_for, build_variants, default_cache
from attention_backend.kernels import hopper_backward_variants
from attention_backend.kernels.backward_variants import backward_variant
from attention_backend.kernels.decode_variants import decode_variant, hopper_decode_variant
from attention_backend.kernels.hopper_backward_variants import BackwardOptions
from attention_backend.kernels.hopper_variants import (
    HopperOptions,
    can_be_tall,
    can_own_keys,
    can_share_keys,
    hopper_variant,
)
from attention_backend.kernels.variants import Options, f32_variant, forward_variant

from .problems import Case


def options_of(case: Case) -> Options:
    return Options(
        case.torch_dtype,
        case.dim,
        case.dim_v,
        paged="paged" in case.layout,
        key_mask=case.keys == "key_mask",
        softcap="softcap" in case.score,
        alibi="alibi" in case.score,
        bias={"bias_float": 1, "bias_element": 2}.get(case.keys, 0),
    )


def variants_of(case: Case, arch: str) -> list[KernelVariant]:
    options = options_of(case)
    if case.torch_dtype == torch.float32:
        return [f32_variant(options, arch)[0]]
    variants = [forward_variant(options, arch)[0]]
    rows = case.heads // case.kv_heads * case.sq
    if rows <= DECODE_ROWS:
        page = case.page if options.paged else 0
        if arch == "sm_90a" and not options.key_mask and (not page or hopper_page_rows(page)):
            variants += [hopper_decode_variant(options, rows, page)[0]]
        else:
            variants += [decode_variant(options, arch, rows)[0]]
    if arch == "sm_90a" and rows > FEW_HOPPER_ROWS and not (options.paged and case.page % sm90.MIN_PAGE_ROWS):
        page = case.page if options.paged else 0
        which = HopperOptions(options, case.sk >= sm90.LONG, page, left_bounds=has_left_bounds(case))
        if can_own_keys(which):
            variants += [hopper_variant(which._replace(own=True, long=False))]
        for each in (which, which._replace(tall=True)) if can_be_tall(which) else (which,):
            variants += [hopper_variant(each), hopper_variant(each, pack=True)]
            if can_share_keys(each):
                by = (BY_ROWS, BY_HEADS) if case.heads // case.kv_heads % CLUSTER == 0 else (BY_ROWS,)
                variants += [hopper_variant(each._replace(cluster=cluster)) for cluster in by]
    return variants


def has_left_bounds(case: Case) -> bool:
    return case.mask in ("window", "sliding", "chunk") or case.keys in ("leftpad", "mask_desc")


def backward_variants_of(case: Case, arch: str) -> list[KernelVariant]:
    """The main kernels of a case's gradients; a group's heads are shared by several blocks where these are few."""
    options = options_of(case)
    if case.torch_dtype == torch.float32 or options.paged or options.bias:
        return []
    short = is_short(max(options.tiles), case.sk, tapered=case.mask == "causal")
    variants = [backward_variant(options, arch, deterministic=False, short=short)[0]]
    if arch == "sm_90a":
        names = ("dtype", "head_dim", "head_dim_v", "key_mask", "softcap", "alibi")
        for deterministic in (False, True):
            which = BackwardOptions(
                **{name: getattr(options, name) for name in names},
                deterministic=deterministic,
                parts=case.heads > case.kv_heads,
                left_bounds=has_left_bounds(case),
            )
            variants += [hopper_backward_variants.backward_variant(which)[0]]
    return variants


def compile_ahead(cases: Iterable[Case], backward_cases: Iterable[Case] = ()) -> None:
    arch = arch_for(torch.cuda.get_device_capability())
    backward_cases = list(backward_cases)
    variants = [variant for case in (*cases, *backward_cases) for variant in variants_of(case, arch)]
    variants += [variant for case in backward_cases for variant in backward_variants_of(case, arch)]
    build_variants(variants, default_cache())
