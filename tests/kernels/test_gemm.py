"""A linear layer of many rows with what follows it in one kernel: the error rule against plain torch, the same bits at
every run."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention_backend import layers, linears
from attention_backend.heuristics.gemm import GemmConfig
from attention_backend.kernels import gemm as kernel

from .error_rule import assert_out_close, poisoned_memory
from .problems import generator, randn
from .test_skinny_linear import HALVES, gated, layer

#: Clusters, stages, bands.
TILES = ((2, 3, 8), (1, 3, 2), (2, 2, 1))
#: Rows, depth, width, blocks. Nothing is whole; blocks have several tiles, or one.
SIZES = ((300, 328, 520, 2), (1, 64, 8, 2), (777, 264, 392, 6))

pytestmark = pytest.mark.gpu


def beside(x: Tensor, width: int) -> Tensor:
    """A residual for rows x."""
    return randn((x.shape[0], width), x.dtype, generator(("residual", x.dtype, x.shape, width), x.device))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_tile(tile: tuple[int, int, int], dtype: torch.dtype, hopper: torch.device) -> None:
    for rows, depth, width, blocks in SIZES:
        x, weight, _ = layer(hopper, dtype, rows, depth, 2 * width)
        with poisoned_memory():
            out = kernel.gemm(x, weight, GemmConfig(True, *tile), activation="silu", blocks=blocks)
            assert_out_close(out, gated(x.double(), weight.double(), "silu"), gated(x, weight, "silu"))
        residual = beside(x, 2 * width)
        for given in (residual, torch.cat([residual, residual], dim=1)[:, 2 * width :]):  # rows need not lie together
            with poisoned_memory():
                out = kernel.gemm(x, weight, GemmConfig(False, *tile), residual=given, blocks=blocks)
                truth = residual.double() + F.linear(x.double(), weight.double())
                assert_out_close(out, truth, residual + F.linear(x, weight))


@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_every_activation(activation: str, hopper: torch.device) -> None:
    x, weight, _ = layer(hopper, torch.bfloat16, 130, 576, 2 * 104)
    out = kernel.gemm(3 * x, weight, GemmConfig(gated=True), activation=activation)
    assert_out_close(out, gated(3 * x.double(), weight.double(), activation), gated(3 * x, weight, activation))


@pytest.mark.parametrize("adds", [False, True])
def test_results_repeat_and_rows_do_not_depend_on_each_other(adds: bool, hopper: torch.device) -> None:
    """As a step calls it, of a model's size: blocks have some tiles each, and rings go round often."""
    x, weight, _ = layer(hopper, torch.bfloat16, 1024, 4096, 28672)
    residual = beside(x, 28672) if adds else None
    assert kernel.config_of(x, weight, residual) is not None

    def run(x: Tensor) -> Tensor:
        if residual is None:
            return linears.gated_linear(x, weight, "silu")
        return linears.added_linear(x, weight, residual)

    with poisoned_memory():
        first = run(x)
    if residual is None:
        assert_out_close(first, gated(x.double(), weight.double(), "silu"), gated(x, weight, "silu"))
    else:
        truth = residual.double() + F.linear(x.double(), weight.double())
        assert_out_close(first, truth, residual + F.linear(x, weight))
    for _ in range(100):
        assert torch.equal(run(x), first)
    assert torch.equal(run(torch.cat([x, x], dim=1)[:, 4096:]), first)  # rows need not lie together
    x[7] = torch.nan
    alone = run(x)
    assert alone[7].isnan().all()
    rest = torch.arange(1024, device=hopper) != 7
    assert torch.equal(alone[rest], first[rest])
