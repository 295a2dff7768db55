"""A linear layer of a few rows in one kernel: the error rule against plain torch, the same bits at every run, and in
CUDA graphs, where it reads weights before the kernels in front have ended."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention_backend import layers, linears
from attention_backend.heuristics.skinny_linear import FEWEST_ROWS, MOST_ROWS, SkinnyConfig
from attention_backend.kernels import skinny_linear as kernel
from attention_backend.reference import layers as reference

from .error_rule import assert_out_close, poisoned_memory
from .problems import generator, randn
from .test_graphs import captured

HALVES = (torch.bfloat16, torch.float16)
#: Tiles of every kind: parts of the depth that a cluster shares out, gates.
CONFIGS = (
    SkinnyConfig(64),
    SkinnyConfig(224),
    SkinnyConfig(64, 4),
    SkinnyConfig(128, 8),
    SkinnyConfig(192, 2),
    SkinnyConfig(256, 8),
    SkinnyConfig(224, gated=True),
    SkinnyConfig(128, 4, gated=True),
)
#: Rows, depth, tiles; and blocks, of which a cluster of more than one has no second tile. Nothing is whole, and a last
#: copy of a stage may lie beyond the depth.
SIZES = ((5, 1032, 3, 3), (64, 1160, 2, 2), (33, 1280, 3, 2))
#: Width, depth: the last two are torch's, for few bytes and for tiles that fit badly.
LAYERS = ((6144, 4096), (4096, 14336), (4112, 4096), (9216, 3072), (1152, 896), (4608, 3584))

pytestmark = pytest.mark.gpu


def layer(device: torch.device, dtype: torch.dtype, rows: int, depth: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight, bias."""
    g = generator(("skinny", dtype, rows, depth, width), device)
    return randn((rows, depth), dtype, g), randn((width, depth), dtype, g) / depth**0.5, randn((width,), dtype, g)


def gated(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The formula in the dtype of its inputs."""
    gate, up = F.linear(x, weight).chunk(2, dim=1)
    return reference.gated_activation(gate, up, activation)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_tile(config: SkinnyConfig, dtype: torch.dtype, hopper: torch.device) -> None:
    for rows, depth, tiles, blocks in SIZES:
        if config.cluster > 1 and blocks < tiles:
            continue
        width = tiles * config.outputs - 24
        x, weight, bias = layer(hopper, dtype, rows, depth, width * (2 if config.gated else 1))
        with poisoned_memory():
            if config.gated:
                out = kernel.skinny_linear(x, weight, None, config, activation="silu", blocks=blocks * config.cluster)
                assert_out_close(out, gated(x.double(), weight.double(), "silu"), gated(x, weight, "silu"))
            else:
                out = kernel.skinny_linear(x, weight, bias, config, blocks=blocks * config.cluster)
                truth = F.linear(x.double(), weight.double(), bias.double())
                assert_out_close(out, truth, F.linear(x, weight, bias))


@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_every_activation(activation: str, hopper: torch.device) -> None:
    x, weight, _ = layer(hopper, torch.bfloat16, 9, 576, 2 * 104)
    out = kernel.skinny_linear(3 * x, weight, None, SkinnyConfig(224, gated=True), activation=activation)
    assert_out_close(out, gated(3 * x.double(), weight.double(), activation), gated(3 * x, weight, activation))


@pytest.mark.parametrize("size", LAYERS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_any_rows_of_any_layer(size: tuple[int, int], dtype: torch.dtype, cuda: torch.device) -> None:
    width, depth = size
    for rows in (1, FEWEST_ROWS, 8, 24, 63, MOST_ROWS, MOST_ROWS + 1):
        x, weight, bias = layer(cuda, dtype, rows, depth, width)
        wide = torch.cat([x, x], dim=1)  # rows need not lie together
        with poisoned_memory():
            for rows_of in (x, wide[:, :depth]):
                out = linears.linear(rows_of, weight, bias)
                assert_out_close(out, F.linear(x.double(), weight.double(), bias.double()), F.linear(x, weight, bias))
            out = linears.gated_linear(x, weight, "silu")
            assert_out_close(out, gated(x.double(), weight.double(), "silu"), gated(x, weight, "silu"))


def test_results_repeat_and_rows_do_not_depend_on_each_other(hopper: torch.device) -> None:
    x, weight, bias = layer(hopper, torch.bfloat16, 64, 4096, 4096)
    assert kernel.config_of(x, weight, gated=False) is not None
    first = linears.linear(x, weight, bias)
    differing = torch.zeros((), dtype=torch.int64, device=hopper)
    for _ in range(1000):
        differing += (linears.linear(x, weight, bias) != first).any()
    assert int(differing) == 0
    x[7] = torch.nan
    alone = linears.linear(x, weight, bias)
    assert alone[7].isnan().all()
    rest = torch.arange(64, device=hopper) != 7
    assert torch.equal(alone[rest], first[rest])
    assert torch.equal(linears.linear(x[:5], weight, bias), first[:5])


def test_in_a_graph_where_each_starts_early(hopper: torch.device) -> None:
    """A layer's products one after the other: each reads what the one before has just written."""
    x, qkv, _ = layer(hopper, torch.bfloat16, 24, 4096, 4096)
    _, gate_up, _ = layer(hopper, torch.bfloat16, 24, 4096, 8192)
    assert kernel.config_of(x, qkv, gated=False)
    assert kernel.config_of(x, gate_up, gated=True)
    norm = torch.ones(4096, dtype=torch.bfloat16, device=hopper)

    def steps() -> Tensor:
        y = x
        for _ in range(8):
            y, total = layers.add_rms_norm(linears.linear(y, qkv), y, norm, 1e-5)
            y = layers.rms_norm(linears.gated_linear(y, gate_up, "silu") + total, norm, 1e-5)
        return y

    graph, out = captured(steps)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(out, steps())
