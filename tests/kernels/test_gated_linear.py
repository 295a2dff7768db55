"""A gated linear layer of many rows in one kernel: the error rule against plain torch, the same bits at every run."""

import pytest
import torch

from attention_backend import layers, linears
from attention_backend.heuristics.gated_linear import CONFIGS, GatedConfig, gated_config
from attention_backend.kernels import device
from attention_backend.kernels import gated_linear as kernel

from .error_rule import assert_out_close, poisoned_memory
from .test_skinny_linear import HALVES, gated, layer

OTHERS = (GatedConfig(cluster=1, band=2), GatedConfig(outputs=112, band=2), GatedConfig(stages=2, band=1))
#: Rows, depth, width, blocks. Nothing is whole; blocks have several tiles, or one.
SIZES = (((300, 328, 520), 2), ((1, 64, 8), 2), ((777, 264, 392), 6))

pytestmark = pytest.mark.gpu


def check(
    config: GatedConfig, dtype: torch.dtype, sizes: tuple[int, int, int], blocks: int | None, where: torch.device
) -> None:
    """Rows, depth and width of `sizes`, by at most so many blocks, against float64."""
    rows, depth, width = sizes
    x, weight, _ = layer(where, dtype, rows, depth, 2 * width)
    with poisoned_memory():
        out = kernel.gated_linear(x, weight, config, "silu", blocks=blocks)
    assert_out_close(out, gated(x.double(), weight.double(), "silu"), gated(x, weight, "silu"))


@pytest.mark.parametrize("config", [*CONFIGS, *OTHERS], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_tile(config: GatedConfig, dtype: torch.dtype, hopper: torch.device) -> None:
    for sizes, blocks in SIZES:
        check(config, dtype, sizes, blocks, hopper)


@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_every_activation(activation: str, hopper: torch.device) -> None:
    x, weight, _ = layer(hopper, torch.bfloat16, 130, 576, 2 * 104)
    out = kernel.gated_linear(3 * x, weight, GatedConfig(), activation)
    assert_out_close(out, gated(3 * x.double(), weight.double(), activation), gated(3 * x, weight, activation))


@pytest.mark.parametrize("rows", [256, 384, 896])
def test_rows_of_a_step_that_other_tiles_fill(rows: int, hopper: torch.device) -> None:
    config = gated_config(rows, 14336, 4096, device.num_sms(hopper.index))
    assert config is not None
    check(config, torch.bfloat16, (rows, 4096, 14336), None, hopper)


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
