"""Every kernel compiles for every architecture, with no GPU, and no hot kernel spills. Cached in the user's cache.

Not all for all, which `longwave kernels build` does and which takes ten minutes of a CPU: what has compiled for one
architecture is compiled for another where that could spoil it. `make test` compiles the generic kernels for sm_80 and
Hopper's own for sm_90a, at the width that most models have, with every value of every option, and for the other
architectures each kernel's first variant. The rest is `make test-all`:

* Options that change scores, whose kernels may spill, are compiled for sm_80, and those of Hopper's own kernels at
  one width, of the six that they have.
* A variant that has compiled for an architecture before is compiled for the next one if it had few registers to
  spare, or is the first of its kernel. Registers differ little: with NVRTC 13.0, of 291 that are left out so all but
  4 keep within the limit that they would be near, and those 4 are small ones, of blocks that may have 255.
* sm_86 gets Ada's instructions: 116 of 121 hot kernels are the same code to the byte.
"""

import importlib.util
from collections.abc import Iterable
from functools import cache

import pytest

from attention_backend.jit import ARCHS, KernelVariant, build_variants, check, default_cache, list_variants
from attention_backend.jit.build import BuildResult
from attention_backend.kernels.hopper_backward_variants import other_tiles

OPTIONS = "sm_80"
HOPPER_WIDTHS = (128,)
COMMON_WIDTHS = (None, 0, 128)  # no width, or none compiled in
SAME_CODE = {"sm_86": "sm_89"}
#: Each after those that it is compared with.
ORDER = ("sm_80", "sm_90a", "sm_89", "sm_86", "sm_100", "sm_120", "sm_75")
#: Registers that a thread can have in blocks of 256, 384, 512, ... threads.
LIMITS = (64, 80, 96, 128, 168, 255)
SPARE = 0.85

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs the cuda extra (NVRTC)"),
]


def chosen(arch: str) -> list[KernelVariant]:
    shared = {variant.kernel for variant in list_variants([OPTIONS])}

    def wanted(variant: KernelVariant) -> bool:
        if variant.hot or arch == OPTIONS:
            return True
        return variant.kernel not in shared and dict(variant.defines).get("HEAD_DIM") in HOPPER_WIDTHS

    return [variant for variant in list_variants([arch]) if wanted(variant)]


def is_tight(result: BuildResult) -> bool:
    registers = result.report.registers
    return registers > SPARE * next(limit for limit in LIMITS if limit >= registers)


def code(variant: KernelVariant) -> tuple[object, ...]:
    return variant.kernel, variant.defines


def left_out(arch: str) -> set[tuple[object, ...]]:
    if arch in SAME_CODE:
        return {code(variant) for variant in chosen(SAME_CODE[arch])}
    before = [result for earlier in ORDER[: ORDER.index(arch)] for result in results(earlier)]
    return {code(r.variant) for r in before} - {code(r.variant) for r in before if is_tight(r)}


def is_at_home(variant: KernelVariant) -> bool:
    """Generic kernels for sm_80, Hopper's own for sm_90a."""
    shared = {variant.kernel for variant in list_variants([OPTIONS])}
    return (variant.arch == OPTIONS) == (variant.kernel in shared)


def firsts(variants: Iterable[KernelVariant]) -> list[KernelVariant]:
    """Of each kernel; of one at home at each width of a head."""

    def key(variant: KernelVariant) -> tuple[object, ...]:
        return variant.kernel, dict(variant.defines).get("HEAD_DIM") if is_at_home(variant) else None

    return list({key(variant): variant for variant in reversed(list(variants))}.values())


def every_value(variants: Iterable[KernelVariant]) -> list[KernelVariant]:
    """Few of them, in which each kernel's every define has every value once."""
    by_kernel: dict[str, list[KernelVariant]] = {}
    for variant in variants:
        by_kernel.setdefault(variant.kernel, []).append(variant)
    picked = [of_one[0] for of_one in by_kernel.values()]
    for first, of_one in zip(tuple(picked), by_kernel.values(), strict=True):
        missing = {define for variant in of_one for define in variant.defines} - set(first.defines)
        while missing:
            best = max(of_one, key=lambda variant: len(missing.intersection(variant.defines)))
            picked.append(best)
            missing -= set(best.defines)
    return picked


def everyday(arch: str) -> list[KernelVariant]:
    variants = list_variants([arch])
    common = [v for v in variants if is_at_home(v) and dict(v.defines).get("HEAD_DIM") in COMMON_WIDTHS]
    some = every_value(common)
    kernels = {variant.kernel for variant in some}
    return [*some, *{v.kernel: v for v in reversed(chosen(arch)) if v.kernel not in kernels}.values()]


@cache
def results(arch: str) -> list[BuildResult]:
    variants, without = chosen(arch), left_out(arch)
    return build_variants([*firsts(variants), *(v for v in variants if code(v) not in without)], default_cache())


@pytest.mark.parametrize("arch", ORDER)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    assert everyday(arch), f"the covering set of {arch} is empty"
    assert check(build_variants(everyday(arch), default_cache())) == []


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ORDER)
def test_every_variant_that_an_architecture_could_spoil_compiles_without_spills(arch: str) -> None:
    assert check(results(arch)) == []


@pytest.mark.thorough
def test_tiles_of_the_hopper_backward_that_are_not_the_default_compile_without_spills() -> None:
    assert check(build_variants(other_tiles(), default_cache())) == []


def test_no_architecture_is_left_out() -> None:
    assert sorted(ORDER) == sorted(ARCHS)
