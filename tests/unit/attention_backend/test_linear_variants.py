"""Tiles and segments of linear attention: what fits, and that pieces make the whole."""

import pytest
import torch

from attention_backend.heuristics.sm80 import SHARED_MEMORY
from attention_backend.jit import ARCHS
from attention_backend.kernels.linear_variants import (
    HEAD_DIMS,
    LinearOptions,
    Segments,
    causal_kernel,
    covering,
    full_kernel,
    segments,
    states_kernel,
)

DTYPE = torch.float16


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_fits_every_gpu(arch: str, head_dim: int) -> None:
    options = LinearOptions(DTYPE, head_dim)
    for kernel in (states_kernel(options, arch), full_kernel(options, arch)[0], causal_kernel(options, arch)):
        assert kernel.smem_bytes <= SHARED_MEMORY[arch]
        assert kernel.threads % 32 == 0
        assert kernel.blocks_per_sm >= 1


@pytest.mark.parametrize("tokens", [1, 64, 65, 1000, 4096, 4099, 65536, 1_000_003])
@pytest.mark.parametrize("pairs", [1, 16, 100, 5000])
@pytest.mark.parametrize("unit", [64, 128])
def test_pieces_are_the_whole_length(tokens: int, pairs: int, unit: int) -> None:
    pieces = segments(tokens, pairs, 264, unit=unit, state_tokens=256, again=1.5)
    assert pieces.length % unit == 0
    assert (pieces.count - 1) * pieces.length < tokens <= pieces.count * pieces.length


def test_few_heads_are_cut_to_fill_the_card_and_many_are_not() -> None:
    assert segments(65536, 16, 264, state_tokens=256, again=1.5) == Segments(16, 4096)
    assert segments(65536, 264, 264, state_tokens=256, again=1.5).count == 1
    assert segments(200, 1, 264, state_tokens=256, again=1.5).count == 1


def test_every_kernel_is_in_the_covering_set() -> None:
    kernels = {variant.kernel for variant in covering("sm_90a")}
    assert kernels == {"linear_states", "linear_prefix", "linear_full", "linear_causal"}
