"""Building many variants, and what a build must not contain."""

from pathlib import Path

import pytest

pytest.importorskip("cupy")

from attention_backend.jit import (
    ARCHS,
    BuildResult,
    CacheDirectoryError,
    CompileError,
    CompileReport,
    KernelCache,
    KernelVariant,
    archs_named,
    build_variants,
    check,
)

VARIANTS = [KernelVariant("scale", arch, (("TIMES", times),), hot=True) for arch in ARCHS for times in (1, 2)]


def test_every_variant_is_built_once_and_reported_in_order(cache: KernelCache) -> None:
    seen: list[BuildResult] = []
    results = build_variants([*VARIANTS, VARIANTS[0]], cache, jobs=2, progress=seen.append)
    assert [result.variant for result in results] == VARIANTS
    assert sorted(map(str, (result.variant for result in seen))) == sorted(map(str, VARIANTS))
    assert not any(result.cached for result in results)
    assert all(result.cached for result in build_variants(VARIANTS, cache))
    assert check(results) == []


def test_a_hot_kernel_may_neither_spill_nor_use_local_memory(cache: KernelCache) -> None:
    hot = [KernelVariant("spill", "sm_80", hot=True), KernelVariant("local", "sm_80", hot=True)]
    spill, stack, local = check(build_variants(hot, cache))
    assert spill.startswith("spill[sm_80] spills ")
    assert stack.startswith("spill[sm_80] uses ")
    assert local == "local[sm_80] uses 256 bytes of local memory"


def test_a_kernel_that_is_not_hot_may_spill(cache: KernelCache) -> None:
    assert check(build_variants([KernelVariant("spill", "sm_80")], cache)) == []


def test_serialised_wgmma_is_a_violation_of_any_kernel() -> None:
    line = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    report = CompileReport(128, 0, 0, 0, (), (line, "k.cuh(3): warning #177-D: never referenced"))
    assert check([BuildResult(KernelVariant("k", "sm_90a"), 1.0, False, report)]) == [f"k[sm_90a]: {line}"]


def test_all_kernels_that_do_not_compile_are_named_and_the_others_are_built(cache: KernelCache, kernels: Path) -> None:
    for name in ("bad", "worse"):
        (kernels / f"{name}.cuh").write_text(f"#error {name} of purpose\n")
    broken = [KernelVariant(name, "sm_80") for name in ("bad", "worse")]
    with pytest.raises(CompileError, match=r"2 of 3(.|\n)*(bad|worse) of purpose(.|\n)*(bad|worse) of purpose"):
        build_variants([broken[0], VARIANTS[0], broken[1]], cache, jobs=1)
    assert cache.get(VARIANTS[0]).cached


def test_a_directory_that_cannot_be_trusted_ends_the_build(cache: KernelCache, cache_path: Path) -> None:
    cache_path.mkdir()
    cache_path.chmod(0o777)
    with pytest.raises(CacheDirectoryError):
        build_variants(VARIANTS, cache)


def test_architectures_are_named_one_by_one_or_all() -> None:
    assert archs_named("all") == ARCHS
    assert archs_named("sm_90a") == ("sm_90a",)
    assert archs_named("sm_80, sm_89") == ("sm_80", "sm_89")
    with pytest.raises(ValueError, match="sm_90: give all, or some of sm_75"):
        archs_named("sm_80,sm_90")
