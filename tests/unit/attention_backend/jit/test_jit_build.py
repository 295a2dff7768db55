"""Building many variants, and what a build must not contain."""

import os
import stat
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

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
    list_variants,
)
from attention_backend.jit import build as build_module
from attention_backend.jit.artefact import Artefact

VARIANTS = [KernelVariant("scale", arch, (("TIMES", times),), hot=True) for arch in ARCHS for times in (1, 2)]


@pytest.fixture
def covering_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of attention_backend.dispatch, one that selects two variants an architecture, one of them twice."""
    dispatch = ModuleType("attention_backend.dispatch")

    def covering_set(arch: str) -> Iterator[KernelVariant]:
        for times in (1, 2, 1):
            yield KernelVariant("scale", arch, (("TIMES", times),))

    dispatch.covering_set = covering_set  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attention_backend.dispatch", dispatch)


@pytest.mark.usefixtures("covering_set")
def test_the_list_is_the_covering_set_of_every_architecture_without_repeats() -> None:
    assert list_variants() == VARIANTS
    assert list_variants(["sm_89"]) == [variant for variant in VARIANTS if variant.arch == "sm_89"]


@pytest.mark.usefixtures("covering_set")
def test_a_build_for_an_image_is_readable_by_other_users_and_serves_as_one(
    kernels: Path, cache_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "KernelCache", partial(KernelCache, sources=kernels))
    out = tmp_path / "opt/kernels"
    umask = os.umask(0o022)  # what image builds have; a stricter one is obeyed
    try:
        results = build_module.build(["sm_90a"], out=out)
    finally:
        os.umask(umask)
    assert [result.variant.arch for result in results] == ["sm_90a", "sm_90a"]
    for path in (out, *(path for path in out.rglob("*") if not path.relative_to(out).parts[0].startswith("."))):
        readable = stat.S_IROTH | stat.S_IXOTH if path.is_dir() else stat.S_IROTH
        assert path.stat().st_mode & readable == readable
    cache = KernelCache(cache_path, image=out, sources=kernels)
    assert all(cache.get(result.variant).cached for result in results)


@pytest.mark.usefixtures("covering_set")
def test_a_build_without_a_directory_goes_to_the_users_cache(
    kernels: Path, cache_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(cache_path, sources=kernels)
    monkeypatch.setattr(build_module, "default_cache", lambda: cache)
    assert not any(result.cached for result in build_module.build(["sm_80"]))
    assert all(result.cached for result in build_module.build(["sm_80"]))


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


def test_a_build_reads_the_sources_of_a_kernel_once(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's start looks up some forty variants of a dozen kernels, and nobody waits for less."""
    read: list[str] = []
    snapshot = cache.snapshot
    monkeypatch.setattr(cache, "snapshot", lambda kernel: read.append(kernel) or snapshot(kernel))
    results = build_variants([*VARIANTS, *VARIANTS], cache)
    assert [result.variant for result in results] == VARIANTS
    assert len(read) == len({variant.kernel for variant in VARIANTS}) < len(VARIANTS)
    assert [result.artefact.cubin for result in results] == [cache.get(variant).artefact.cubin for variant in VARIANTS]


def test_a_kernel_that_is_not_hot_may_spill(cache: KernelCache) -> None:
    assert check(build_variants([KernelVariant("spill", "sm_80")], cache)) == []


def test_serialised_wgmma_is_a_violation_of_any_kernel() -> None:
    line = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    report = CompileReport(128, 0, 0, 0, (), (line, "k.cuh(3): warning #177-D: never referenced"))
    built = Artefact("key", "k[sm_90a]", b"", report, 1.0)
    assert check([BuildResult(KernelVariant("k", "sm_90a"), False, built)]) == [f"k[sm_90a]: {line}"]


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
