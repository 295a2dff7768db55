"""Linear layers with few rows against float64: every m, odd shapes, strides, bias, graphs, and bits that repeat."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_backend.heuristics.skinny import MAX_ROWS
from attention_backend.skinny import serves, skinny_linear

from .error_rule import assert_out_close, poisoned_memory
from .problems import generator, randn

DTYPES = (torch.bfloat16, torch.float16)
#: n, k: one tile and less, ends inside of a tile and of a line, fewer lines than warps, a tile and many a block.
SHAPES = (
    (1, 8),
    (16, 64),
    (33, 72),
    (40, 520),
    (576, 576),
    (1000, 1096),
    (4096, 4096),
    (4096, 14336),
    (6144, 4096),
    (9999, 264),
)


def problem(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    g = generator(("skinny", m, n, k, dtype), device)
    x, weight = randn((m, k), dtype, g), randn((n, k), dtype, g) / k**0.5
    return x, weight, randn((n,), dtype, g) if bias else None


def assert_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert out.shape == (x.shape[0], weight.shape[0])
    assert out.dtype == x.dtype
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_out_close(out, exact, F.linear(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16])
def test_products_are_as_exact_as_torchs(
    m: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = problem(m, *shape, dtype, device, bias=m % 2 == 1)
    with poisoned_memory():
        out = skinny_linear(x, weight, bias)
    assert_linear(out, x, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("m", range(1, MAX_ROWS + 1))
def test_every_number_of_rows_is_served(m: int, device: torch.device) -> None:
    x, weight, bias = problem(m, 2000, 1000, torch.bfloat16, device)
    with poisoned_memory():
        out = skinny_linear(x, weight, bias)
    assert_linear(out, x, weight, bias)


@pytest.mark.gpu
def test_a_weight_that_ends_memory_is_not_read_past_its_end(device: torch.device) -> None:
    """What lies behind a row's end and the last row is NaN."""
    g = generator("edges", device)
    held = torch.full((50, 1128), torch.nan, dtype=torch.bfloat16, device=device)
    rows = torch.full((8, 1128), torch.nan, dtype=torch.bfloat16, device=device)
    weight, x = held[:45, :1096], rows[:5, :1096]
    weight.copy_(randn((45, 1096), torch.bfloat16, g))
    x.copy_(randn((5, 1096), torch.bfloat16, g))
    with poisoned_memory():
        out = skinny_linear(x, weight)
    assert_linear(out, x, weight, None)


@pytest.mark.gpu
def test_a_nan_stays_in_its_row_and_column(device: torch.device) -> None:
    x, weight, _ = problem(16, 100, 200, torch.float16, device, bias=False)
    want = skinny_linear(x, weight)
    x[3, 199], weight[99, 0] = torch.nan, torch.nan
    out = skinny_linear(x, weight)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[3], hit[:, 99] = True, True
    assert torch.equal(out.isnan(), hit)
    assert torch.equal(out[~hit], want[~hit])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (1000, 14336)], ids=str)
def test_a_rows_bits_depend_on_no_other_row_nor_on_how_many(shape: tuple[int, int], cuda: torch.device) -> None:
    x, weight, bias = problem(16, *shape, torch.bfloat16, cuda)
    want = skinny_linear(x, weight, bias)
    for first, last in ((0, 1), (3, 10), (8, 16), (5, 14), (15, 16)):
        assert torch.equal(skinny_linear(x[first:last], weight, bias), want[first:last])


@pytest.mark.gpu
def test_repeats_are_bitwise_equal(device: torch.device) -> None:
    x, weight, bias = problem(8, 6144, 4096, torch.bfloat16, device)
    want = skinny_linear(x, weight, bias)
    for _ in range(50 if device.type == "cuda" else 2):
        assert torch.equal(skinny_linear(x, weight, bias), want)


def chain(x: Tensor, layers: list[list[Tensor]]) -> Tensor:
    """Linear layers whose inputs the kernel before them, ours or torch's, has only just written."""
    for i, (down, up) in enumerate(layers):
        y = skinny_linear(x, up)
        x = skinny_linear(y if i % 2 else F.silu(y), down)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 4, 16])
def test_a_graph_of_kernels_that_start_early_gives_the_same_bits(m: int, cuda: torch.device) -> None:
    g = generator(("graph", m), cuda)
    layers = [[randn(shape, torch.bfloat16, g) / 40 for shape in ((1024, 4096), (4096, 1024))] for _ in range(12)]
    x = torch.zeros((m, 1024), dtype=torch.bfloat16, device=cuda)
    chain(x, layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, layers)
    for i in range(30):
        x.copy_(randn((m, 1024), torch.bfloat16, g))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, chain(x, layers)), f"replay {i}"
        assert bool(got.any())


@pytest.mark.gpu
def test_early_launches_outside_of_graphs_keep_the_streams_order(cuda: torch.device) -> None:
    g = generator("early", cuda)
    weights = [randn((2048, 2048), torch.bfloat16, g) / 45 for _ in range(10)]
    x = randn((2, 2048), torch.bfloat16, g)
    torch.cuda.synchronize()  # nothing that writes a weight is under way
    want = x
    for weight in weights:
        want = skinny_linear(want, weight, early=False)
    for _ in range(20):
        out = x
        for weight in weights:
            out = skinny_linear(out, weight, early=True)
        assert torch.equal(out, want)


@pytest.mark.gpu
def test_what_is_served_on_a_gpu(cuda: torch.device) -> None:
    x, weight, _ = problem(16, 64, 128, torch.float16, cuda)
    assert serves(x, weight)
    assert not serves(torch.cat([x, x]), weight)
    assert not serves(x.float(), weight.float())
    assert not serves(x[:, :100], weight[:, :100])
    assert not serves(x[:, 1:121], weight[:, :120])
    assert not serves(x, weight.clone().requires_grad_())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 5, 40])
def test_products_on_cpu_are_torchs(m: int, dtype: torch.dtype) -> None:
    x, weight, bias = problem(m, 37, 61, dtype, torch.device("cpu"))
    assert torch.equal(skinny_linear(x, weight, bias), F.linear(x, weight, bias))
    assert not serves(x, weight)
