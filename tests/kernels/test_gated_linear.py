"""A gated linear layer of many rows in one kernel: the error rule against plain torch, the same bits at every run."""

import pytest
import torch

from attention_backend import layers, linears
from attention_backend.heuristics.gated_linear import GatedConfig
from attention_backend.kernels import gated_linear as kernel

from .error_rule import assert_out_close, poisoned_memory
from .test_skinny_linear import HALVES, gated, layer

CONFIGS = (GatedConfig(), GatedConfig(cluster=1, band=2), GatedConfig(stages=2, band=1))
#: Rows, depth, width, blocks. Nothing is whole; blocks have several tiles, or one.
SIZES = ((300, 328, 520, 2), (1, 64, 8, 2), (777, 264, 392, 6))

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_tile(config: GatedConfig, dtype: torch.dtype, hopper: torch.device) -> None:
    for rows, depth, width, blocks in SIZES:
        x, weight, _ = layer(hopper, dtype, rows, depth, 2 * width)
        with poisoned_memory():
            out = kernel.gated_linear(x, weight, config, "silu", blocks=blocks)
            assert_out_close(out, gated(x.double(), weight.double(), "silu"), gated(x, weight, "silu"))


@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_every_activation(activation: str, hopper: torch.device) -> None:
    x, weight, _ = layer(hopper, torch.bfloat16, 130, 576, 2 * 104)
    out = kernel.gated_linear(3 * x, weight, GatedConfig(), activation)
    assert_out_close(out, gated(3 * x.double(), weight.double(), activation), gated(3 * x, weight, activation))


def test_results_repeat_and_rows_do_not_depend_on_each_other(hopper: torch.device) -> None:
    """As a step calls it, of a model's size: blocks have some tiles each, and rings go round often."""
    x, weight, _ = layer(hopper, torch.bfloat16, 1024, 4096, 2 * 14336)
    assert kernel.config_of(x, weight) is not None
    with poisoned_memory():
        first = linears.gated_linear(x, weight, "silu")
    assert_out_close(first, gated(x.double(), weight.double(), "silu"), gated(x, weight, "silu"))
    differing = torch.zeros((), dtype=torch.int64, device=hopper)
    for _ in range(1000):
        differing += (linears.gated_linear(x, weight, "silu") != first).any()
    assert int(differing) == 0
    wide = torch.cat([x, x], dim=1)  # rows need not lie together
    assert torch.equal(linears.gated_linear(wide[:, 4096:], weight, "silu"), first)
    x[7] = torch.nan
    alone = linears.gated_linear(x, weight, "silu")
    assert alone[7].isnan().all()
    rest = torch.arange(1024, device=hopper) != 7
    assert torch.equal(alone[rest], first[rest])
    assert torch.equal(kernel.gated_linear(x[512:], weight, GatedConfig(), "silu"), first[512:])
