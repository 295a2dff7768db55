"""Every kernel compiles for every architecture, with no GPU, and no hot kernel spills. Cached in the user's cache."""

import importlib.util

import pytest

from attention_backend.jit import ARCHS, check
from attention_backend.jit.build import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs the cuda extra (NVRTC)"),
]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    results = build([arch])

    assert results, f"the covering set of {arch} is empty"
    assert check(results) == []
