"""Variants and architectures."""

import pytest

from attention_backend.jit import (
    ARCHS,
    KernelSource,
    KernelVariant,
    SourceError,
    UnsupportedArchError,
    arch_for,
    runs_on,
)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_every_gpu_from_turing_on_gets_an_architecture_it_can_run(capability: tuple[int, int], arch: str) -> None:
    assert arch_for(capability) == arch
    assert runs_on(arch, capability)


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 2), (9, 1), (11, 0), (13, 0)])
def test_a_gpu_without_kernels_is_refused_by_its_number(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedArchError, match=rf"capability {capability[0]}\.{capability[1]}.*sm_75, sm_80"):
        arch_for(capability)


def test_an_exact_architecture_runs_on_that_gpu_only() -> None:
    assert not runs_on("sm_90a", (9, 1))
    assert not runs_on("sm_90a", (10, 0))


def test_variants_are_equal_whatever_the_order_of_their_defines_and_the_hot_flag() -> None:
    one = KernelVariant("k", "sm_80", (("A", 1), ("B", True)))
    other = KernelVariant("k", "sm_80", (("B", 1), ("A", 1)), hot=True)
    assert one == other
    assert len({one, other}) == 1
    assert str(one) == "k[sm_80, A=1, B=1]"


@pytest.mark.parametrize("defines", [(("A", 1), ("A", 2)), (("-I/tmp", 1),), (("A B", 1),)])
def test_defines_that_are_no_defines_are_refused(defines: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ValueError):
        KernelVariant("k", "sm_80", defines)


def test_an_architecture_kernels_are_not_built_for_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedArchError, match=r"sm_90'.*sm_90a"):
        KernelVariant("k", "sm_90")
    assert len(ARCHS) == 7


@pytest.mark.parametrize("name", ["nothing_of_that_name", "../../problem", "parts/element"])
def test_only_a_kernel_of_the_folder_is_a_source(name: str) -> None:
    with pytest.raises(SourceError, match="there is no kernel"):
        KernelSource.named(name)
