"""Every kernel compiles for every architecture, with no GPU, and no hot kernel spills. Cached in the user's cache.

Options that change scores are compiled for two architectures, of which the others' sources differ in nothing that an
option touches; `longwave kernels build` compiles all for all.
"""

import importlib.util

import pytest

from attention_backend.jit import ARCHS, build_variants, check, default_cache, list_variants

EVERYTHING = ("sm_80", "sm_90a")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs the cuda extra (NVRTC)"),
]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    results = build_variants((v for v in list_variants([arch]) if v.hot or arch in EVERYTHING), default_cache())

    assert results, f"the covering set of {arch} is empty"
    assert check(results) == []
