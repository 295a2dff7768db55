"""Every kernel compiles for every architecture, with no GPU, and no hot kernel spills. Cached in the user's cache.

Options that change scores are compiled for two architectures, of which the others' sources differ in nothing that an
option touches; `longwave kernels build` compiles all for all. Ada (sm_89) and sm_86 get the same instructions: of what
compiles for the one, the other compiles one variant of each kernel.
"""

import importlib.util
from collections.abc import Iterable

import pytest

from attention_backend.jit import ARCHS, KernelVariant, build_variants, check, default_cache, list_variants

EVERYTHING = ("sm_80", "sm_90a")
#: With NVRTC 13.0 116 of 121 hot kernels are the same code to the byte; all have the same registers and spills.
SAME_CODE = {"sm_86": "sm_89"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs the cuda extra (NVRTC)"),
]


def compiled(arch: str) -> Iterable[KernelVariant]:
    chosen = [v for v in list_variants([arch]) if v.hot or arch in EVERYTHING]
    if arch not in SAME_CODE:
        return chosen
    elsewhere = {(v.kernel, v.defines) for v in compiled(SAME_CODE[arch])}
    first = {v.kernel: v for v in reversed(chosen)}
    return {*first.values(), *(v for v in chosen if (v.kernel, v.defines) not in elsewhere)}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    results = build_variants(compiled(arch), default_cache())

    assert results, f"the covering set of {arch} is empty"
    assert check(results) == []
