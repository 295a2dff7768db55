"""A layer between two attentions in one kernel: the error rule against plain torch, the same bits at every
run, and in CUDA graphs, where it reads weights before the kernels in front have ended."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attention_backend
from attention_backend import layer_chain as chains
from attention_backend import layers
from attention_backend.layer_chain import (
    MOST_ROWS,
    ChainOptions,
    ChainWeights,
    NextAttention,
    layer_chain,
    layer_chain_to_pages,
)
from attention_backend.metadata import KVPages
from attention_backend.reference import layers as reference

from .error_rule import assert_out_close, poisoned_memory
from .problems import generator, randn
from .test_graphs import captured

HALVES = (torch.bfloat16, torch.float16)
#: attended, width, gated, next: Llama-3.1-8B's, Qwen2.5-0.5B's; groups, columns and boxes that are not whole.
SIZES = (
    (4096, 4096, 14336, 6144),
    (896, 896, 4864, 1152),
    (2048, 1032, 1544, 264),
    (520, 2056, 8, 8),
    (3072, 2304, 9216, 1001),
)
OPTIONS = ChainOptions("silu", 1e-5, 1e-6)

pytestmark = pytest.mark.gpu


class Chain:
    """Random weights and rows."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], *, bias: bool = False
    ) -> None:
        attended, width, gated, following = sizes
        g = generator(("chain", dtype, sizes), device)

        def linear(out: int, inner: int) -> Tensor:
            return randn((out, inner), dtype, g) / inner**0.5

        self.g, self.dtype, self.sizes = g, dtype, sizes
        self.weights = ChainWeights(
            linear(width, attended),
            randn((width,), dtype, g),
            linear(2 * gated, width),
            linear(width, gated),
            randn((width,), dtype, g),
            linear(following, width),
            randn((following,), dtype, g) if bias else None,
        )

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        return randn((count, self.sizes[0]), self.dtype, self.g), randn((count, self.sizes[1]), self.dtype, self.g)


def plain(attended: Tensor, residual: Tensor, w: ChainWeights, options: ChainOptions) -> tuple[Tensor, Tensor]:
    """The formula in the dtype of its inputs."""
    linear, norm = torch.nn.functional.linear, reference.rms_norm
    total = residual + linear(attended, w.out)
    gate, up = linear(norm(total, w.norm_mlp, options.eps_mlp, options.unit_offset), w.gate_up).chunk(2, dim=1)
    total = total + linear(reference.gated_activation(gate, up, options.activation), w.down)
    return total, linear(norm(total, w.norm_next, options.eps_next, options.unit_offset), w.next, w.next_bias)


def doubles(w: ChainWeights) -> ChainWeights:
    parts = (w.out, w.norm_mlp, w.gate_up, w.down, w.norm_next, w.next)
    return ChainWeights(*(x.double() for x in parts), None if w.next_bias is None else w.next_bias.double())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_errors_are_those_of_plain_torch(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, rows: int, hopper: torch.device
) -> None:
    chain = Chain(hopper, dtype, sizes, bias=rows % 2 == 0)
    x = chain.rows(rows)
    with poisoned_memory():
        ours = layer_chain(*x, chain.weights, OPTIONS)
    truth = plain(*(t.double() for t in x), doubles(chain.weights), OPTIONS)
    for out, exact, same in zip(ours, truth, plain(*x, chain.weights, OPTIONS), strict=True):
        assert_out_close(out, exact, same)


@pytest.mark.parametrize(("activation", "unit_offset"), [("gelu", False), ("gelu_tanh", True)])
def test_activations_and_norms_of_other_families(activation: str, unit_offset: bool, hopper: torch.device) -> None:
    chain = Chain(hopper, torch.bfloat16, SIZES[1])
    options = replace(OPTIONS, activation=activation, unit_offset=unit_offset)
    x = chain.rows(3)
    truth = plain(*(t.double() for t in x), doubles(chain.weights), options)
    for out, exact, same in zip(
        layer_chain(*x, chain.weights, options), truth, plain(*x, chain.weights, options), strict=True
    ):
        assert_out_close(out, exact, same)


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_every_run_gives_the_same_bits(sizes: tuple[int, int, int, int], hopper: torch.device) -> None:
    chain = Chain(hopper, torch.bfloat16, sizes)
    attended, residual = chain.rows(MOST_ROWS)
    first = layer_chain(attended, residual, chain.weights, OPTIONS)
    differing = torch.zeros((), dtype=torch.int64, device=hopper)
    for _ in range(1000):
        total, projected = layer_chain(attended, residual, chain.weights, OPTIONS)
        differing += (total != first[0]).any() | (projected != first[1]).any()
    assert int(differing) == 0


def test_weights_may_be_parts_of_larger_ones(hopper: torch.device) -> None:
    chain = Chain(hopper, torch.bfloat16, SIZES[1])
    wide = torch.cat([chain.weights.down, chain.weights.down], dim=1)
    part = replace(chain.weights, down=wide[:, : chain.weights.down.shape[1]])
    x = chain.rows(2)
    ours, theirs = layer_chain(*x, part, OPTIONS), layer_chain(*x, chain.weights, OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rows", [1, MOST_ROWS])
def test_a_graph_of_layers_follows_its_inputs(rows: int, hopper: torch.device) -> None:
    """Several layers behind each other, each of which starts while the one before it runs."""
    sizes = (1024, 1024, 2816, 1024)
    layers = [Chain(hopper, torch.bfloat16, sizes) for _ in range(4)]
    attended, residual = layers[0].rows(rows)

    def work() -> Tensor:
        x, total = attended, residual
        for layer in layers:
            total, x = layer_chain(x, total, layer.weights, OPTIONS)
        return torch.cat([total, x], dim=1)

    graph, out = captured(work)
    for _ in range(20):
        fresh = layers[0].rows(rows)
        attended.copy_(fresh[0])
        residual.copy_(fresh[1])
        graph.replay()
        assert torch.equal(out, work())
    for _ in range(200):
        graph.replay()
    assert torch.equal(out, work())


def test_weights_that_change_between_replays_are_read(hopper: torch.device) -> None:
    chain = Chain(hopper, torch.bfloat16, SIZES[1])
    x = chain.rows(2)
    graph, out = captured(lambda: layer_chain(*x, chain.weights, OPTIONS)[1])
    for _ in range(3):
        chain.weights.out.copy_(torch.randn_like(chain.weights.out))
        graph.replay()
        assert torch.equal(out, layer_chain(*x, chain.weights, OPTIONS)[1])


def test_streams_run_beside_each_other(hopper: torch.device) -> None:
    """All blocks of a launch wait for each other: two launches at once must not each hold a part of the GPU."""
    chain = Chain(hopper, torch.bfloat16, SIZES[1])
    x = chain.rows(1)
    expected = layer_chain(*x, chain.weights, OPTIONS)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(layer_chain(*x, chain.weights, OPTIONS))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for found in results for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("fp8", [False, True], ids=["pages", "float8 pages"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(8, 2, 128, 128), (14, 2, 64, 64), (3, 3, 96, 48), (5, 1, 80, 16)]
)
def test_products_in_pages_are_those_of_two_calls(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, fp8: bool, hopper: torch.device
) -> None:
    check_products_in_pages(heads, kv_heads, head_dim, rotary_dim, (1024, 2816), hopper, fp8=fp8)


def check_products_in_pages(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    widths: tuple[int, int],
    hopper: torch.device,
    *,
    fp8: bool,
) -> None:
    """Bit for bit the chain and rotary_store one after the other; other slots stay what they were."""
    for rows, dtype in ((1, torch.bfloat16), (MOST_ROWS, torch.float16)):
        chain = Chain(hopper, dtype, (heads * head_dim, *widths, (heads + 2 * kv_heads) * head_dim), bias=rows > 1)
        x, g = chain.rows(rows), chain.g
        cache = randn((5, kv_heads, 16, head_dim), dtype, g)
        scale = torch.rand(kv_heads, generator=g, device=hopper) + 0.5
        slots = torch.tensor([37, -1, 64, 2], device=hopper)[:rows]
        angles = 6.3 * torch.rand(rows, rotary_dim // 2, generator=g, device=hopper)
        tables = (angles.cos(), angles.sin())

        def pages() -> KVPages:
            k, v = (c.to(torch.float8_e4m3fn) if fp8 else c.clone() for c in (cache, cache.flip(0)))  # noqa: B023
            return KVPages(k, v, scale if fp8 else None, scale.flip(0) if fp8 else None)  # noqa: B023

        ours, theirs = pages(), pages()
        total, queries = layer_chain_to_pages(*x, chain.weights, OPTIONS, NextAttention(heads, ours, slots, *tables))
        expected, products = layer_chain(*x, chain.weights, OPTIONS)
        q, k, v = products.unflatten(1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)
        scales = {"k_scale": theirs.k_scale, "v_scale": theirs.v_scale}
        turned = layers.rotary_store(q, k, v, theirs.k, theirs.v, slots, *tables, **scales)
        assert torch.equal(total, expected)
        assert torch.equal(queries, turned)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_what_it_refuses_raises(hopper: torch.device) -> None:
    chain = Chain(hopper, torch.bfloat16, (64, 64, 60, 64))
    with pytest.raises(attention_backend.UnsupportedError, match="multiples of 8"):
        layer_chain(*chain.rows(1), chain.weights, OPTIONS)
    assert chains.refuses(hopper, torch.float32, attended_width=64, width=64, gated_width=64) is not None
    for rows, gated_width in ((1, 100_000), (3, 40_000), (MOST_ROWS + 1, 64)):
        widths = {"attended_width": 64, "width": 64, "gated_width": gated_width}
        assert chains.refuses(hopper, torch.bfloat16, **widths, rows=rows) is not None
