"""The kernels of fused layers: the error rule against plain torch, exact where nothing is summed, and in CUDA graphs,
where each may start before the one before it has ended."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention_backend import layers
from attention_backend.reference import layers as reference

from .error_rule import assert_out_close
from .problems import generator, randn
from .test_graphs import captured

BF16 = torch.bfloat16
HALVES = (torch.bfloat16, torch.float16)
#: Every number of vectors a thread holds, whole and broken warps, and one vector.
WIDTHS = (8, 64, 576, 2048, 4096, 5120, 8192, 12288, 16384, 32768)


def norm_truth(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    doubles = x.double()
    normed = doubles * torch.rsqrt(doubles.square().mean(-1, keepdim=True) + eps)
    return normed * (weight.double() + unit_offset)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(width: int, dtype: torch.dtype, unit_offset: bool, device: torch.device) -> None:
    g = generator(("rms", width, dtype, unit_offset), device)
    for rows in (1, 5, 64):
        wide = randn((rows, width + 64), dtype, g)
        x, residual, weight = wide[:, :width], randn((rows, width), dtype, g), randn((width,), dtype, g)
        out = layers.rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
        assert_out_close(
            out, norm_truth(x, weight, 1e-5, unit_offset), reference.rms_norm(x, weight, 1e-5, unit_offset)
        )
        normed, total = layers.add_rms_norm(x, residual, weight, 1e-5, unit_offset=unit_offset)
        assert torch.equal(total, x + residual)
        same = reference.rms_norm(total, weight, 1e-5, unit_offset)
        assert_out_close(normed, norm_truth(total, weight, 1e-5, unit_offset), same)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gated_activation(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    g = generator(("gated", activation, dtype), device)
    for rows, width in ((1, 8), (3, 1032), (64, 14336), (300, 4096)):
        gate, up = (3 * randn((rows, 2 * width), dtype, g)).chunk(2, dim=1)
        truth = reference.gated_activation(gate.double(), up.double(), activation)
        out = layers.gated_activation(gate, up, activation)
        assert_out_close(out, truth, reference.gated_activation(gate, up, activation))
    extremes = torch.tensor([[-300.0, -80.0, -0.0, 0.0, 1e-3, 80.0, 300.0, 1.0]], dtype=dtype, device=device)
    ours = layers.gated_activation(extremes, torch.ones_like(extremes), activation)
    plain = reference.gated_activation(extremes, torch.ones_like(extremes), activation)
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-6)


class Heads:
    """Queries, keys and values as views of one projection, pages full of NaN, and tables."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int], dim: int, rotary_dim: int
    ) -> None:
        g = generator(("rotary", dtype, tokens, heads, dim, rotary_dim), device)
        host = torch.Generator().manual_seed(tokens + dim)
        (num_heads, kv_heads), self.page = heads, 16
        rows = randn((tokens, (num_heads + 2 * kv_heads) * dim), dtype, g)
        parts = rows.split([num_heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        self.q, self.k, self.v = (part.unflatten(1, (-1, dim)) for part in parts)
        blocks = -(-tokens // self.page) + 2
        self.pages = (blocks, kv_heads, self.page, dim)
        slots = torch.randperm(blocks * self.page, generator=host)[:tokens]
        self.slots = torch.where(torch.rand(tokens, generator=host) < 0.2, -1 - slots, slots).to(device)
        angles = torch.outer(torch.arange(tokens) * 37.0, 1e4 ** (-torch.arange(rotary_dim // 2) * 2 / rotary_dim))
        self.tables = (angles.cos().to(device), angles.sin().to(device))
        self.norms = (randn((dim,), dtype, g), randn((dim,), dtype, g))

    def caches(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        device = self.q.device
        if dtype == torch.float8_e4m3fn:
            full = [torch.full(self.pages, 0x7F, dtype=torch.uint8, device=device).view(dtype) for _ in "kv"]
        else:
            full = [torch.full(self.pages, torch.nan, dtype=dtype, device=device) for _ in "kv"]
        return full[0], full[1]


SHAPES = (
    ((32, 8), 128, 128),
    ((9, 3), 64, 64),
    ((4, 1), 32, 32),
    ((8, 4), 256, 256),
    ((6, 2), 96, 96),
    ((24, 8), 128, 96),
    ((3, 1), 512, 128),
    ((5, 5), 80, 32),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim", "rotary_dim"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["own", "fp8"])
def test_rotary_and_store_are_bitwise_plain_torchs(
    heads: tuple[int, int], dim: int, rotary_dim: int, dtype: torch.dtype, fp8: bool, device: torch.device
) -> None:
    if fp8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs sm_89")
    for tokens in (1, 7, 300):
        x = Heads(device, dtype, tokens, heads, dim, rotary_dim)
        ours, theirs = (x.caches(torch.float8_e4m3fn if fp8 else dtype) for _ in range(2))
        scales = [torch.linspace(0.01, 0.5, heads[1], device=device) if fp8 else None for _ in "kv"]
        out = layers.rotary_store(x.q, x.k, x.v, *ours, x.slots, *x.tables, k_scale=scales[0], v_scale=scales[1])
        plain = reference.rotary_store(
            x.q, x.k, x.v, *theirs, x.slots, *x.tables, None, None, 0.0, False, scales[0], scales[1]
        )
        assert torch.equal(out, plain)
        for mine, expected in zip(ours, theirs, strict=True):
            assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim", "rotary_dim"), SHAPES, ids=str)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_heads_norms_before_rotary(
    heads: tuple[int, int], dim: int, rotary_dim: int, unit_offset: bool, device: torch.device
) -> None:
    for tokens in (1, 40):
        x = Heads(device, BF16, tokens, heads, dim, rotary_dim)
        ours, theirs = x.caches(BF16), x.caches(BF16)
        options = {"q_norm": x.norms[0], "k_norm": x.norms[1], "eps": 1e-6, "unit_offset": unit_offset}
        out = layers.rotary_store(x.q, x.k, x.v, *ours, x.slots, *x.tables, **options)  # type: ignore[arg-type]
        plain = reference.rotary_store(
            x.q, x.k, x.v, *theirs, x.slots, *x.tables, *x.norms, 1e-6, unit_offset, None, None
        )
        truth = reference.rotated(norm_truth(x.q, x.norms[0], 1e-6, unit_offset), *x.tables)
        assert_out_close(out, truth, plain)
        assert torch.equal(ours[1].view(torch.uint8), theirs[1].view(torch.uint8))
        stored = ~theirs[0].isnan()
        assert torch.equal(~ours[0].isnan(), stored)
        assert_out_close(ours[0][stored], theirs[0][stored].double(), theirs[0][stored], noise=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_chain_of_layers_in_a_graph_is_bitwise_the_plain_calls(rows: int, cuda: torch.device) -> None:
    """Kernels that start early wait for what they read: 24 short ones after another, replayed with other inputs."""
    g = generator(("chain", rows), cuda)
    width, gated, depth = 1024, 2048, 8
    up = [randn((2 * gated, width), BF16, g) / 32 for _ in range(depth)]
    down = [randn((width, gated), BF16, g) / 45 for _ in range(depth)]
    norms = [randn((width,), BF16, g) for _ in range(depth)]
    x = torch.zeros(rows, width, dtype=BF16, device=cuda)

    def work() -> Tensor:
        block, residual = x, x
        for first, second, norm in zip(up, down, norms, strict=True):
            normed, residual = layers.add_rms_norm(block, residual, norm, 1e-6)
            gate, other = F.linear(normed, first).chunk(2, dim=1)
            block = F.linear(layers.gated_activation(gate, other, "silu"), second)
        return block + residual

    graph, out = captured(work)
    seen = []
    for _ in range(20):
        x.copy_(randn((rows, width), BF16, g))
        graph.replay()
        assert torch.equal(out, work())
        seen.append(out.clone())
    assert not any(torch.equal(a, b) for a, b in pairwise(seen))


@pytest.mark.gpu
def test_rotary_in_a_graph_follows_slots_and_tables(cuda: torch.device) -> None:
    x = Heads(cuda, BF16, 64, (32, 8), 128, 128)
    ours = x.caches(BF16)
    weight = randn((x.q.shape[1] * 128, 512), BF16, generator("weight", cuda))
    rows = torch.zeros(64, 512, dtype=BF16, device=cuda)

    def work() -> Tensor:
        q = F.linear(rows, weight).unflatten(1, (-1, 128))
        return layers.rotary_store(q, x.k, x.v, *ours, x.slots, *x.tables)

    graph, out = captured(work)
    for step in range(5):
        rows.copy_(randn((64, 512), BF16, generator(("rows", step), cuda)))
        x.slots.copy_(x.slots.roll(1))
        for table in x.tables:
            table.copy_(table.roll(1, 0))
        for cache in ours:
            cache.fill_(torch.nan)
        graph.replay()
        replayed = [out.clone(), *(cache.clone() for cache in ours)]
        for cache in ours:
            cache.fill_(torch.nan)
        plain = [work(), *ours]
        for mine, expected in zip(replayed, plain, strict=True):
            assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
def test_no_rows_are_no_work(device: torch.device) -> None:
    empty = torch.empty(0, 64, dtype=BF16, device=device)
    assert layers.rms_norm(empty, torch.ones(64, dtype=BF16, device=device), 1e-6).shape == (0, 64)
    assert layers.gated_activation(empty, empty, "silu").shape == (0, 64)
